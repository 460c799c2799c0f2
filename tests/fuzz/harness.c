/* Feeds mutated payloads to one codec's kernels. test_fuzz.py puts the codec's generated source before
   this file, and compiles both with AddressSanitizer and UndefinedBehaviorSanitizer.

   fuzz CORPUS MUTATIONS SEED

   CORPUS, little-endian, int64 unless stated: bytes per value, floats in the codec's table, the table
   (float), number of cases; for each case: number of values, bytes per payload, bytes of workspace
   for (rows, threads) = (1, 1), (1, 2), (2, 1), (2, 2), number of payloads, the payloads.

   Every buffer is a heap block of its exact size, so an access one byte beyond it ends the program. A
   kernel must return 0 or the number of a malformed row, and 0 for valid payloads. Prints how many
   mutated payloads were decoded and how many were refused. */
#include <stdio.h>
#include <stdlib.h>

enum { PAYLOADS = 8, PEERS = 2, ROWS = 2 };

typedef struct {
  int64_t numel, nbytes, payloads;
  uint8_t *payload[PAYLOADS]; /* valid */
  Row rows[2][ROWS];          /* buffers of a call; in [1], payloads are misaligned by one byte */
  void *workspace[ROWS][2];
} Case;

static uint64_t state;
static uint64_t random_bits(void) {
  state += 0x9E3779B97F4A7C15u;
  uint64_t x = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
static int64_t below(int64_t n) { return n > 0 ? (int64_t)(random_bits() % (uint64_t)n) : 0; }

static void stop(const char *why) {
  fprintf(stderr, "harness: %s\n", why);
  exit(2);
}

static void *block(int64_t nbytes) {
  void *memory = malloc(nbytes);
  if (!memory) stop("no memory");
  return memory;
}

static void read_all(FILE *file, void *to, int64_t nbytes) {
  if (nbytes && fread(to, nbytes, 1, file) != 1) stop("the corpus is too short");
}
static int64_t read_number(FILE *file) {
  int64_t number;
  read_all(file, &number, sizeof number);
  return number;
}

/* One to four changes, as a bad link, a bad peer or a wrong plan might make. */
static void mutate(uint8_t *payload, const Case *c) {
  if (c->nbytes == 0) return;
  for (int64_t left = 1 + below(4); left; left--) {
    const int64_t at = below(c->nbytes), rest = c->nbytes - at;
    const int64_t length = 1 + below(rest < 16 || below(4) == 0 ? rest : 16);
    const uint8_t *other = c->payload[below(c->payloads)];
    switch (below(9)) {
      case 0: payload[at] ^= 1u << below(8); break;
      case 1: payload[at] = (uint8_t)random_bits(); break;
      case 2: for (int64_t i = 0; i < length; i++) payload[at + i] = (uint8_t)random_bits(); break;
      case 3: memset(payload + at, 0xff, length); break;
      case 4: memset(payload + at, 0, length); break;
      case 5: memcpy(payload + at, other + at, length); break;
      case 6: memcpy(payload + at, other + below(c->nbytes - length + 1), length); break;
      case 7: payload[at] += below(2) ? 1 : -1; break;
      case 8: for (int64_t i = 0; i < length; i++) payload[below(c->nbytes)] ^= 0x80; break;
    }
  }
}

/* Finite values with random bits. */
static uint8_t noise[1 << 18];
static void fill(void *values, int64_t nbytes) {
  if (nbytes > (int64_t)sizeof noise / 2) stop("too many values");
  memcpy(values, noise + below(sizeof noise / 2) / 8 * 8, nbytes);
}

typedef int Form(const Row *, int64_t, int32_t, int32_t, const int64_t *, float, int32_t, void *,
                 const float *);
static const struct { const char *name; Form *run; int peers; } forms[] = {
  {"decode", decode, 0},
  {"decode_add", decode_add, 0},
  {"decode_sum", decode_sum, 1},
  {"reduce_encode", reduce_encode, 1},
  {"reduce_encode_ef", reduce_encode_ef, 1},
};

/* Run all forms over one or two rows; the last row holds the payloads under test. Returns how many of
   the forms refused it. */
static int try_all(const Case *c, int64_t value_nbytes, const float *table, int mutated) {
  const int n = 1 + (below(8) == 0), threads = 1 + (below(128) == 0);
  const int off = (int)below(2);
  Row rows[ROWS];
  int refused = 0;
  for (int r = 0; r < n; r++) {
    rows[r] = c->rows[off][r];
    uint8_t *source = (uint8_t *)rows[r].source;
    memcpy(rows[r].payload, c->payload[below(c->payloads)], c->nbytes);
    for (int k = 0; k < PEERS; k++)
      memcpy(source + k * c->nbytes, c->payload[below(c->payloads)], c->nbytes);
    if (mutated && r == n - 1) {
      mutate(rows[r].payload, c);
      mutate(source + below(PEERS) * c->nbytes, c);
    }
    fill(rows[r].values, c->numel * value_nbytes);
    fill(rows[r].residual, c->numel * 4);
    rows[r].start = below(1000), rows[r].key = random_bits(), rows[r].shared = random_bits();
  }
  void *workspace = c->workspace[n - 1][threads - 1];
  int64_t distances[2 * PEERS]; /* and origins */
  for (int k = 0; k < PEERS; k++) distances[k] = k * c->nbytes, distances[PEERS + k] = k;
  for (unsigned f = 0; f < sizeof forms / sizeof *forms; f++) {
    const int alone = forms[f].peers && below(2); /* all contributions are payloads */
    const int ranks = forms[f].peers ? PEERS + !alone : 1, rank = alone ? -1 : (int)below(ranks);
    const int failed = forms[f].run(rows, n, ranks, rank, distances, 0.5f, threads, workspace, table);
    if (failed != 0 && !(mutated && failed == n)) {
      fprintf(stderr, "harness: %s of %lld values returned %d for row %d of %d, %s\n",
              forms[f].name, (long long)c->numel, failed, n, n, mutated ? "mutated" : "genuine");
      exit(3);
    }
    refused += failed != 0;
  }
  return refused;
}

static void read_case(FILE *file, Case *c, int64_t value_nbytes) {
  c->numel = read_number(file), c->nbytes = read_number(file);
  for (int i = 0; i < 4; i++) c->workspace[i / 2][i % 2] = block(read_number(file));
  c->payloads = read_number(file);
  if (c->payloads < 1 || c->payloads > PAYLOADS) stop("1 to 8 payloads per case");
  for (int64_t p = 0; p < c->payloads; p++)
    read_all(file, c->payload[p] = block(c->nbytes), c->nbytes);
  for (int off = 0; off < 2; off++)
    for (int r = 0; r < ROWS; r++) {
      uint8_t *payload = block(c->nbytes + off), *source = block(PEERS * c->nbytes + off);
      c->rows[off][r] = (Row){.values = block(c->numel * value_nbytes),
                              .residual = block(c->numel * 4), .payload = payload + off,
                              .source = source + off, .numel = c->numel};
    }
}

int main(int argc, char **argv) {
  if (argc != 4) stop("usage: fuzz CORPUS MUTATIONS SEED");
  FILE *file = fopen(argv[1], "rb");
  if (!file) stop("no corpus");
  const int64_t value_nbytes = read_number(file), numbers = read_number(file);
  float *table = block(numbers * 4);
  read_all(file, table, numbers * 4);
  const int64_t count = read_number(file);
  Case *cases = block(count * sizeof *cases);
  double weight[64], total = 0; /* large cases take longer, so they are drawn less often */
  if (count < 1 || count > 64) stop("1 to 64 cases");
  for (Case *c = cases; c < cases + count; c++) {
    read_case(file, c, value_nbytes);
    weight[c - cases] = total += 1.0 / (double)(c->numel + 64);
  }
  fclose(file);
  const int64_t mutations = atoll(argv[2]);
  state = strtoull(argv[3], 0, 10);
  for (unsigned i = 0; i < sizeof noise; i++)
    noise[i] = (uint8_t)random_bits() & (i % 2 ? 0xbf : 0xff); /* finite as fp32, fp16 and bf16 */
  for (Case *c = cases; c < cases + count; c++)
    for (int i = 0; i < 16; i++) try_all(c, value_nbytes, table, 0);
  int64_t decoded = 0, refused = 0;
  for (int64_t i = 0; i < mutations; i++) {
    const double at = (double)(random_bits() >> 11) * 0x1p-53 * total;
    const Case *c = cases;
    while (weight[c - cases] <= at && c < cases + count - 1) c++;
    const int no = try_all(c, value_nbytes, table, 1);
    refused += no != 0, decoded += no == 0;
  }
  printf("%lld decoded, %lld refused\n", (long long)decoded, (long long)refused);
  return 0;
}

/* Runs kernels on another machine's CPU, or an emulated one. test_neon.py puts a codec's generated
   source before this file. Standard input holds cases, in int64 unless stated: form, number of
   values, bytes per value, bytes per payload, bytes of workspace, ranks, rank, number of peer
   payloads, floats in the codec's table, start, key, shared key; then values, residual, payload, the
   peer payloads, the table. For each case, payload, values and residual go to standard output. */
#include <stdio.h>
#include <stdlib.h>

typedef int Form(const Row *, int64_t, int32_t, int32_t, const int64_t *, float, int32_t, void *,
                 const float *);
static Form *const forms[] = {FORMS};

static void *take(int64_t nbytes) {
  void *memory = malloc(nbytes + 1);
  if (nbytes && fread(memory, nbytes, 1, stdin) != 1) exit(2);
  return memory;
}

int main(void) {
  int64_t h[12];
  while (fread(h, sizeof h, 1, stdin) == 1) {
    Row row = {.numel = h[1], .start = h[9], .key = (uint64_t)h[10], .shared = (uint64_t)h[11]};
    row.values = take(h[1] * h[2]);
    row.residual = take(h[1] * 4);
    row.payload = take(h[3]);
    row.source = take(h[3] * h[7]);
    const float *table = take(h[8] * 4);
    int64_t distances[2 * h[7] + 1];
    for (int64_t k = 0; k < h[7]; k++) distances[k] = k * h[3], distances[h[7] + k] = k;
    if (forms[h[0]](&row, 1, h[5], h[6], distances, 1.0f / 3, 2, malloc(h[4] + 1), table)) return 3;
    fwrite(row.payload, 1, h[3], stdout);
    fwrite(row.values, 1, h[1] * h[2], stdout);
    fwrite(row.residual, 1, h[1] * 4, stdout);
  }
  return 0;
}

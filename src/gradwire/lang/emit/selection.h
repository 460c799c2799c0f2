/* Selections: entries are staged in the order of their elements, dropped when too many to be among
   the largest, and stored when all elements have been seen; received ones are read entry by entry. */
enum { RUN = 128 };

/* Keys in the order of numbers, any NaN the largest; 0 is no number's key. */
INLINE uint32_t key_of(float x) {
  const uint32_t u = bits_of(x);
  return is_nan(x) ? 0xffc00000 : u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000);
}
INLINE float from_key(uint32_t key) {
  return float_of(key ^ ((uint32_t)((int32_t)~key >> 31) | 0x80000000));
}

INLINE int any_above(const uint32_t *keys, uint32_t threshold) {
  uint32_t any = 0;
#pragma omp simd reduction(| : any)
  for (int i = 0; i < 16; i++) any |= keys[i] > threshold;
  return any != 0;
}

/* Their places, a bit each: a branch per candidate, not one per key. */
INLINE uint32_t all_above(const uint32_t *keys, uint32_t threshold) {
  uint32_t all = 0;
#pragma omp simd reduction(| : all)
  for (int i = 0; i < 16; i++) all |= (uint32_t)(keys[i] > threshold) << i;
  return all;
}

INLINE int64_t size_of(int64_t n, double fraction, int64_t least) {
  const int64_t share = (int64_t)(fraction * (double)n), size = share > least ? share : least;
  return size < n ? size : n;
}

/* What a thread has staged of a row: column 0 are indices, 1 keys, the others what is gathered. */
struct Staging {
  int64_t count, most, room;
  uint32_t threshold, *numbers;
};
INLINE uint32_t *column(const Staging *s, int c) { return s->numbers + c * s->room; }
INLINE void begin(Staging *s, int64_t most, uint32_t floor) {
  s->count = 0, s->most = most, s->threshold = floor;
}

typedef struct { const uint32_t *key; int64_t count; } Keys;
typedef struct { uint32_t key; int64_t ties; } Cut;

/* The k-th largest key, and how many of that very key are among the k: radix selection. */
static Cut cut_of(const Keys *keys, int n, int64_t k) {
  uint64_t prefix = 0;
  for (int shift = 21, width = 11; shift >= 0; width = shift == 10 ? 10 : 11, shift -= width) {
    uint32_t histogram[2048] = {0};
    for (int t = 0; t < n; t++)
      for (int64_t e = 0; e < keys[t].count; e++) {
        const uint64_t key = keys[t].key[e];
        if (key >> (shift + width) == prefix) histogram[key >> shift & ((1u << width) - 1)]++;
      }
    uint32_t bucket = (1u << width) - 1;
    while (bucket && histogram[bucket] < k) k -= histogram[bucket--];
    prefix = prefix << width | bucket;
    if (shift == 0) break;
  }
  return (Cut){(uint32_t)prefix, k};
}

/* After a block: drop what can no longer be selected. An entry of the threshold's key comes too
   late, since ties go to the first. Without keys, the first entries are the ones. */
INLINE void trim(Staging *s, int columns, int ranked) {
  if (!ranked) {
    if (s->count >= s->most) s->threshold = UINT32_MAX;
    return;
  }
  if (s->count <= 2 * s->most + RUN) return;
  const Keys keys = {column(s, 1), s->count};
  Cut cut = cut_of(&keys, 1, s->most);
  int64_t kept = 0;
  for (int64_t e = 0; e < s->count; e++) {
    const uint32_t key = column(s, 1)[e];
    if (key < cut.key || (key == cut.key && cut.ties-- <= 0)) continue;
    for (int c = 0; c < columns; c++) column(s, c)[kept] = column(s, c)[e];
    kept++;
  }
  s->count = kept, s->threshold = cut.key;
}

/* Which of all threads' staged entries are selected. */
typedef struct { int64_t entries, left; Cut cut; } Pick;
static Pick pick_of(const Staging *staged, int n, int ranked) {
  int64_t total = 0;
  Keys keys[n];
  for (int t = 0; t < n; t++) {
    keys[t] = (Keys){column(&staged[t], 1), staged[t].count};
    total += staged[t].count;
  }
  const int64_t most = staged->most, entries = total < most ? total : most;
  Pick pick = {entries, entries, {0, total}};
  if (ranked && total > most) pick.cut = cut_of(keys, n, most);
  return pick;
}
INLINE int picked(Pick *p, uint32_t key) {
  if (key < p->cut.key || p->left == 0) return 0;
  if (key == p->cut.key && p->cut.ties-- <= 0) return 0;
  p->left--;
  return 1;
}

/* Entries that are stored together. */
typedef struct { uint32_t index[RUN]; float gathered[16][RUN]; } Run;

/* Where a walk over blocks is in a received payload: the next entry, or the next kept block. */
struct Cursor { int64_t entries, next; int valid; };
INLINE void fail(const Call *call, const Row *row) {
  const int number = (int)(row - call->rows) + 1;
#pragma omp atomic write
  *call->failed = number;
}
INLINE Cursor entries_from(
    const Call *call, const Row *row, const uint8_t *field, int64_t blocks, int64_t b, int64_t most) {
  const u16 *counts = (const u16 *)field;
  int64_t before = 0, after = 0;
  for (int64_t i = 0; i < b; i++) before += counts[i];
  for (int64_t i = b; i < blocks; i++) after += counts[i];
  const Cursor cursor = {before + after, before, before + after <= most};
  if (!cursor.valid) fail(call, row);
  return cursor;
}
INLINE int64_t count_at(const Cursor *cursor, const uint8_t *field, int64_t b) {
  return cursor->valid ? ((const u16 *)field)[b] : 0;
}
INLINE Cursor blocks_from(const uint8_t *flags, int64_t b) {
  int64_t before = 0;
  for (int64_t i = 0; i < b; i++) before += flags[i] != 0;
  return (Cursor){0, before, 1};
}

/* Entry `e` of `entries` codes of `bits` bits, packed in runs. Full runs divide by constants. */
INLINE uint32_t code_in(const uint8_t *plane, uint32_t j, uint32_t m, int bits) {
  uint32_t code = 0;
#pragma GCC unroll 4
  for (int width = 8, at = 0; width; width /= 2) {
    if (!(bits & width)) continue;
    const uint32_t length = (m * width + 7) / 8;
    code |= (plane[j % length] >> (j / length * width) & ((1u << width) - 1)) << at;
    plane += length, at += width;
  }
  return code;
}
INLINE uint32_t code_at(const uint8_t *field, uint64_t e, uint64_t entries, int bits) {
  const uint64_t run = e / RUN, left = entries - run * RUN;
  const uint8_t *plane = field + run * (RUN * bits / 8);
  if (left >= RUN) return code_in(plane, e % RUN, RUN, bits);
  return code_in(plane, e % RUN, (uint32_t)left, bits);
}
INLINE uint32_t trit_at(const uint8_t *field, int64_t e, int64_t entries) {
  const int64_t run = e / RUN, left = entries - run * RUN;
  const int m = left < RUN ? (int)left : RUN, j = (int)(e % RUN), length = (m + 4) / 5;
  static const uint8_t weight[5] = {1, 3, 9, 27, 81};
  return field[run * ((RUN + 4) / 5) + j % length] / weight[j / length] % 3;
}

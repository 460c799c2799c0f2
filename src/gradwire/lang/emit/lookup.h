/* Numbers that codes stand for, from a table of up to 64 that lies in registers. Of longer ones, and
   where no instruction picks from a whole vector, they are read from memory one by one, which still
   beats choosing among all. */
INLINE void look_up(
    float *restrict out, const uint8_t *restrict codes, int m, const float *numbers, const int size) {
  int i = 0;
#if defined(__AVX2__) && !defined(__clang__)
  enum { MOST = 64 / LANES };
  const int tables = size > 64 ? 0 : (size + LANES - 1) / LANES, end = tables ? m : 0;
  Lanes table[MOST];
  for (int t = 0; t < tables; t++) {
    float part[LANES];
    for (int k = 0; k < LANES; k++) part[k] = numbers[(t * LANES + k) % size];
    memcpy(&table[t], part, sizeof part);
  }
  i32 *wide = (i32 *)out; /* by a loop of its own: gcc 12 widens vectors element by element */
#pragma omp simd
  for (int k = 0; k < end; k++) wide[k] = codes[k];
  for (; i + LANES <= end; i += LANES) {
    Bits code;
    memcpy(&code, wide + i, sizeof code);
    Lanes x = __builtin_shuffle(table[0], code);
#pragma GCC unroll 8
    for (int t = 1; t < tables; t++) {
      const Bits here = code >= t * LANES;
      x = (Lanes)(((Bits)x & ~here) | ((Bits)__builtin_shuffle(table[t], code) & here));
    }
    memcpy(out + i, &x, sizeof x);
  }
#endif
  for (; i < m; i++) out[i] = numbers[codes[i]];
}

/* Number floor(x): of NaN and beyond them the last, below 0 the first. */
INLINE float number_at(const float *numbers, const int size, const float x) {
  const float below = x < size - 1 ? x : size - 1; /* in floats, or gcc 12 makes branches */
  return numbers[(int)(below < 1 ? 0 : below)];
}

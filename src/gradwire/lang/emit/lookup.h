/* Numbers that codes stand for, from a table that lies in registers. Where no instruction picks from
   a whole vector, they are read from memory one by one, which still beats choosing among all. */
INLINE void look_up(
    float *restrict out, const uint8_t *restrict codes, int m, const float *numbers, const int size) {
  int i = 0;
#if defined(__AVX2__) && !defined(__clang__)
  enum { MOST = 64 / LANES };
  const int tables = (size + LANES - 1) / LANES;
  Lanes table[MOST];
  for (int t = 0; t < tables; t++) {
    float part[LANES];
    for (int k = 0; k < LANES; k++) part[k] = numbers[(t * LANES + k) % size];
    memcpy(&table[t], part, sizeof part);
  }
  i32 *wide = (i32 *)out; /* by a loop of its own: gcc 12 widens vectors element by element */
#pragma omp simd
  for (int k = 0; k < m; k++) wide[k] = codes[k];
  for (; i + LANES <= m; i += LANES) {
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

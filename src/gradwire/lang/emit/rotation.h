/* Randomised Hadamard transforms. Sums and differences are taken at distances 1, 2, 4, ... in that
   order, which is part of the wire format; here several distances are done while values stay in
   registers, so that a block of 1024 is read and written two to four times and not ten. */

/* As many vectors as fit into this machine's registers, and leave some free. */
enum { VECTORS = LANES == 16 ? 16 : 8 };

/* At a distance of less than a vector: the lower of two values takes their sum, the upper, whose
   sign is flipped, their difference. */
INLINE Lanes beside(Lanes x, const int distance) {
  Bits from, sign;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) from[i] = i ^ distance, sign[i] = i & distance ? INT32_MIN : 0;
#ifdef __clang__
  Lanes other;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) other[i] = x[i ^ distance];
#else
  const Lanes other = __builtin_shuffle(x, from);
#endif
  return other + (Lanes)((Bits)x ^ sign);
}

/* From `distance` up, all distances within `n` vectors that lie so far apart; if these are the first,
   those within a vector come before. If they are the last, all is multiplied by `scale` then. */
INLINE void butterflies(
    float *x, int size, int distance, const int n, const int first, const int last, float scale) {
  for (int low = 0; low < size; low += n * distance)
    for (int at = low; at < low + distance; at += LANES) {
      Lanes v[VECTORS];
#pragma GCC unroll 16
      for (int k = 0; k < n; k++) {
        memcpy(&v[k], x + at + k * distance, sizeof v[k]);
        if (!first) continue;
        v[k] = beside(v[k], 1), v[k] = beside(v[k], 2);
        if (LANES > 4) v[k] = beside(v[k], 4);
        if (LANES > 8) v[k] = beside(v[k], 8);
      }
#pragma GCC unroll 4
      for (int apart = 1; apart < n; apart *= 2)
#pragma GCC unroll 16
        for (int k = 0; k < n; k++)
          if (!(k & apart)) {
            const Lanes a = v[k], b = v[k + apart];
            v[k] = a + b, v[k + apart] = a - b;
          }
#pragma GCC unroll 16
      for (int k = 0; k < n; k++) {
        if (last) v[k] *= scale;
        memcpy(x + at + k * distance, &v[k], sizeof v[k]);
      }
    }
}
INLINE void few_butterflies(float *x, int size, float scale) {
  for (int distance = 1; distance < size; distance *= 2)
    for (int i = 0; i < size; i++)
      if (!(i & distance)) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b, x[i + distance] = a - b;
      }
  for (int i = 0; i < size; i++) x[i] *= scale;
}

/* Normalised transforms of the powers of two that make up m, the largest first. */
static __attribute__((noinline)) void hadamard(float *x, int m) {
  for (int begin = 0, size; begin < m; begin += size) {
    for (size = 1; size * 2 <= m - begin; size *= 2) {}
    float *part = x + begin;
    const float scale = (float)(1.0 / sqrt((double)size));
    if (size < LANES) {
      few_butterflies(part, size, scale);
      continue;
    }
    if (size < LANES * VECTORS) {
      butterflies(part, size, LANES, 1, 1, size == LANES, scale);
      for (int done = LANES; done < size; done *= 2)
        butterflies(part, size, done, 2, 0, done * 2 == size, scale);
      continue;
    }
    int done = LANES * VECTORS;
    if (done == size) butterflies(part, size, LANES, VECTORS, 1, 1, scale);
    else butterflies(part, size, LANES, VECTORS, 1, 0, scale);
    for (; done * 4 < size; done *= 4) butterflies(part, size, done, 4, 0, 0, scale);
    if (done * 4 == size) butterflies(part, size, done, 4, 0, 1, scale);
    else if (done < size) butterflies(part, size, done, 2, 0, 1, scale);
  }
}

/* Flip the sign of half the values: of those whose uniform number is not below 1/2. */
INLINE float flipped(float x, Stream s, uint32_t weyl) {
  return float_of(bits_of(x) ^ (mixed(s, weyl) & 0x80000000));
}

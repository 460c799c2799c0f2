/* What every generated kernel stands on: the ABI, conversions, reductions, planes, the RNG.
   lang/eager.py defines the meaning of each of these; this file must give the same bits. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef __OPTIMIZE__
#define INLINE static inline __attribute__((always_inline))
#else /* compiles in two thirds of the time */
#define INLINE static __attribute__((unused))
#endif

/* As many floats as a vector of this machine has. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));

/* A row of the table that a call takes; layout.ROW describes the same 64 bytes. */
typedef struct {
  void *values;
  float *residual;
  uint8_t *payload;
  const uint8_t *source;
  int64_t numel, start;
  uint64_t key, shared;
} Row;

typedef struct Staging Staging; /* of codecs that select: see selection.h */
typedef struct Cursor Cursor;
typedef struct {
  const Row *rows;
  int64_t n;
  const int64_t *distances; /* from a row's source to each payload that is summed */
  int32_t ranks, rank;
  float factor;
  float *workspace;
  const float *table;
  int *failed; /* 1 + the number of a row whose payload cannot be decoded */
  Staging *staging;
  int large; /* values are too many to stay in the cache */
} Call;

/* Copy n bytes to memory past the cache, which then need not read what is overwritten. */
#if defined(__AVX512F__)
typedef int64_t Line __attribute__((vector_size(64), aligned(1), may_alias));
#define STREAM(to, x) __asm__("vmovntdq %1, %0" : "=m"(*(to)) : "v"(x))
#elif defined(__AVX__)
typedef int64_t Line __attribute__((vector_size(32), aligned(1), may_alias));
#define STREAM(to, x) __asm__("vmovntdq %1, %0" : "=m"(*(to)) : "x"(x))
#elif defined(__SSE2__)
typedef int64_t Line __attribute__((vector_size(16), aligned(1), may_alias));
#define STREAM(to, x) __asm__("movntdq %1, %0" : "=m"(*(to)) : "x"(x))
#endif

INLINE void past_cache(void *to, const void *from, int64_t n) {
  uint8_t *out = to;
  const uint8_t *in = from;
#ifdef STREAM
  int64_t head = -(uintptr_t)out & 63;
  head = head < n ? head : n;
  memcpy(out, in, head);
  for (out += head, in += head, n -= head; n >= 64; out += 64, in += 64, n -= 64)
    for (int k = 0; k < 64; k += sizeof(Line)) STREAM((Line *)(out + k), *(const Line *)(in + k));
#endif
  memcpy(out, in, n);
}
/* After the last of these, before another thread is told. */
INLINE void past_cache_end(void) {
#ifdef STREAM
  __asm__ volatile("sfence" ::: "memory");
#endif
}

/* Payloads have no alignment. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE int is_finite(float x) { return fabsf(x) < INFINITY; }
INLINE int is_nan(float x) { return x != x; }
INLINE int64_t blocks_of(int64_t numel, int64_t block) { return (numel + block - 1) / block; }

/* Casts to stored types: finite values saturate, but in fp16 become infinite from 65520 on; and there
   is one NaN. */
INLINE float to_fp32(float x) { return is_nan(x) ? float_of(0x7fc00000) : x; }

INLINE uint32_t to_bf16_nearest(float x) {
  const uint32_t u = bits_of(x), sign = u & 0x80000000, magnitude = u & 0x7fffffff;
  uint32_t r = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16;
  r = r > 0x7f7f ? 0x7f7f : r;
  r = magnitude >= 0x7f800000 ? 0x7f80 : r;
  return magnitude > 0x7f800000 ? 0x7fc0 : r | sign >> 16;
}

INLINE uint32_t to_bf16_outward(float x, uint32_t negative) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  uint32_t r = magnitude >> 16;
  r += (u >> 31) == negative && (magnitude & 0xffff) != 0;
  r = r > 0x7f7f ? 0x7f7f : r;
  r = magnitude >= 0x7f800000 ? 0x7f80 : r;
  return magnitude > 0x7f800000 ? 0x7fc0 : r | (u >> 31) << 15;
}
INLINE uint32_t to_bf16_down(float x) { return to_bf16_outward(x, 1); }
INLINE uint32_t to_bf16_up(float x) { return to_bf16_outward(x, 0); }

INLINE uint32_t to_fp16_nearest(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  /* normal: move the exponent's bias and round the dropped 13 bits to nearest even */
  uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the lowest bits */
  uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  uint32_t r = magnitude < 0x38800000 ? small : normal;
  r = magnitude >= 0x477ff000 ? 0x7c00 : r;
  return magnitude > 0x7f800000 ? 0x7e00 : r | (u >> 31) << 15;
}
INLINE uint32_t to_fp16_saturated(float x) {
  const uint32_t r = to_fp16_nearest(x);
  return (r & 0x7fff) == 0x7c00 && is_finite(x) ? r - 1 : r;
}

/* E4M3: no infinities, so that these become NaN too. */
INLINE uint32_t to_fp8(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  /* subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the lowest bits */
  uint32_t small = bits_of(float_of(magnitude) + 0x1p14f) - 0x46800000;
  uint32_t r = magnitude < 0x3c800000 ? small : normal;
  r = magnitude >= 0x43e00000 ? 0x7e : r;
  return magnitude >= 0x7f800000 ? 0x7f : r | (u >> 31) << 7;
}

/* A constant that the compiler does not know: gcc 12 makes a comparison and a choice of a limit that
   it knows, and one instruction of one that lies in a register. */
INLINE float limit(float x) {
  uint32_t u = bits_of(x);
  __asm__("" : "+r"(u));
  return float_of(u);
}
INLINE int32_t to_uint(float x, float zero, float top) {
  x = x > zero ? x : zero;
  x = x < top ? x : top;
  return (int32_t)x;
}

INLINE int32_t to_int32(float x) {
  x = is_nan(x) ? 0.0f : x;
  x = x < 2147483520.0f ? x : 2147483520.0f;
  return (int32_t)(x > -2147483520.0f ? x : -2147483520.0f);
}

INLINE float from_bf16(uint32_t h) { return float_of(h << 16); }

INLINE float from_fp16(uint32_t h) {
  /* as a float, the 15 bits are the value times 2^-112, subnormals included */
  const float scaled = float_of((h & 0x7fff) << 13) * 0x1p112f;
  const uint32_t magnitude = (h & 0x7c00) == 0x7c00 ? 0x7f800000 | (h & 0x3ff) << 13 : bits_of(scaled);
  return float_of(magnitude | (h & 0x8000) << 16);
}

INLINE float from_fp8(uint32_t h) {
  const uint32_t low = h & 0x7f;
  /* a subnormal float as an operand, as in from_fp16, would be slow here: these are common */
  uint32_t magnitude = low < 8 ? bits_of((float)(int32_t)low * 0x1p-9f) : (low << 20) + (120u << 23);
  magnitude = low == 0x7f ? 0x7fc00000 : magnitude;
  return float_of(magnitude | (h & 0x80) << 24);
}

/* Ask for memory that the next group will read, while this one computes. */
INLINE void prefetch(const void *from, int64_t nbytes) {
  for (int64_t k = 0; k < nbytes; k += 64) __builtin_prefetch((const char *)from + k);
}
#define PREFETCH(from, n) prefetch(from, (n) * sizeof *(from))

/* Three extremes of the bits of floats tell the least and the greatest of them, and whether one is a
   NaN: as integers, floats ascend from +0 and negative ones descend to -0, so that `least` is the
   negative number closest to zero, and `top` the one farthest from it, if there is one. */
INLINE float extreme(int32_t chosen, int32_t most, uint32_t top) {
  const int nan = most > 0x7f800000 || top > 0xff800000;
  return nan ? float_of(0x7fc00000) : float_of((uint32_t)chosen) + 0.0f;
}
INLINE float lowest(int32_t least, int32_t most, uint32_t top) {
  return extreme(top >> 31 ? (int32_t)top : least, most, top);
}
INLINE float highest(int32_t least, int32_t most, uint32_t top) {
  return extreme(most >= 0 ? most : least, most, top);
}
/* Unless there are both signs, lowest() or highest() takes the third, which a block rarely needs: the
   values are then read again, and not kept in registers until then. */
INLINE int has_one_sign(int32_t most, uint32_t top) {
  const int one = (int32_t)(top & ~most) >= 0;
  if (one) __asm__ volatile("" ::: "memory");
  return __builtin_expect(one, 0);
}
#define EXTREMES_OF(x, m) \
  int32_t least = INT32_MAX, most = INT32_MIN; \
  uint32_t top = 0; \
  for (int64_t i = 0; i < m; i++) { \
    const uint32_t u = bits_of(x[i]); \
    least = (int32_t)u < least ? (int32_t)u : least; \
    most = (int32_t)u > most ? (int32_t)u : most; \
    top = u > top ? u : top; \
  }
INLINE float minimum(float *x, int64_t m) {
  EXTREMES_OF(x, m)
  return lowest(least, most, top);
}
INLINE float maximum(float *x, int64_t m) {
  EXTREMES_OF(x, m)
  return highest(least, most, top);
}

/* The upper half is added to the lower until one is left, +0 beyond m; in place. Written out, so
   that the loops over a full block have constant trip counts. */
INLINE void halve(float *x, int64_t m, int64_t p) {
  const int64_t n = m < p ? 0 : m < 2 * p ? m - p : p;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) x[i] += x[i + p];
}
INLINE float tree_sum(float *x, int64_t m) {
  int64_t p = 4096;
  while (p < m) p *= 2;
  for (; p > 2048; p /= 2) halve(x, m, p);
  halve(x, m, 2048), halve(x, m, 1024), halve(x, m, 512), halve(x, m, 256), halve(x, m, 128);
  halve(x, m, 64), halve(x, m, 32), halve(x, m, 16);
  float lane[16] = {0};
  for (int64_t i = 0; i < 16 && i < m; i++) lane[i] = x[i];
#pragma GCC unroll 4
  for (int half = 8; half; half /= 2)
#pragma GCC unroll 8
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0] + 0.0f;
}

/* A plane of `width` bits, cut from bit `at` of codes of `bits`: byte j holds codes j, j + length, ...
   `codes` has room for 8 values past m; they are zero when packing. Eight bytes are taken as one
   number, whose bits stay in their bytes: vectors of bytes have no shifts. */
#define EACH(byte) ((byte) * 0x0101010101010101u)
INLINE uint8_t *pack(uint8_t *out, const uint8_t *codes, int m, int width, int at, int bits) {
  const int length = (m * width + 7) / 8, mask = (1 << width) - 1, words = length / 8;
  const uint64_t each = width == bits ? UINT64_MAX : EACH(mask);
#pragma omp simd
  for (int j = 0; j < words; j++) {
    uint64_t word = 0;
#pragma GCC unroll 8
    for (int k = 0; k < 8 / width; k++)
      word |= (((const u64 *)(codes + k * length))[j] >> at & each) << (k * width);
    ((u64 *)out)[j] = word;
  }
  for (int j = 8 * words; j < length; j++) {
    unsigned byte = 0;
#pragma GCC unroll 8
    for (int k = 0; k < 8 / width; k++)
      byte |= ((codes[j + k * length] >> at) & mask) << (k * width);
    out[j] = (uint8_t)byte;
  }
  return out + length;
}
INLINE const uint8_t *unpack(const uint8_t *in, uint8_t *codes, int m, int width, int at) {
  const int length = (m * width + 7) / 8, mask = (1 << width) - 1, words = length / 8;
#pragma GCC unroll 8
  for (int k = 0; k < 8 / width; k++) {
    u64 *to = (u64 *)(codes + k * length);
#pragma omp simd
    for (int j = 0; j < words; j++) {
      const uint64_t word = (((const u64 *)in)[j] >> (k * width) & EACH(mask)) << at;
      to[j] = at ? to[j] | word : word;
    }
    for (int j = 8 * words; j < length; j++) {
      const unsigned cell = ((in[j] >> (k * width)) & mask) << at;
      codes[j + k * length] = (uint8_t)(at ? codes[j + k * length] | cell : cell);
    }
  }
  return in + length;
}

/* With AVX2 alone a loop that narrows its numbers spends ten instructions on 32 of them. So it leaves
   32 bits of each code, a PART of a block at a time, which stay in registers if the loop over the part
   has been unrolled, and are narrowed there. */
#if defined(__AVX2__) && !defined(__AVX512BW__)
#include <immintrin.h>
enum { PART = 32 };
#define STEP PART
typedef int32_t Code;
#define CODE(bytes, part) part[i - from]
#define NARROW(bytes, part) narrow(bytes + from, part, to - from)
INLINE void narrow(uint8_t *bytes, const Code *codes, int n) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int i = 0;
#pragma GCC unroll 4
  for (; i + 32 <= n; i += 32) {
    __m256i from[4];
    memcpy(from, codes + i, sizeof from);
    const __m256i low = _mm256_packs_epi32(from[0], from[1]);
    const __m256i high = _mm256_packs_epi32(from[2], from[3]);
    const __m256i all = _mm256_packus_epi16(low, high);
    _mm256_storeu_si256((__m256i *)(bytes + i), _mm256_permutevar8x32_epi32(all, order));
  }
  for (; i < n; i++) bytes[i] = (uint8_t)(codes[i] < 0 ? 0 : codes[i]);
}
/* A number below 0 or NaN becomes a number below 0, of which narrow() makes 0. */
INLINE Code to_code(float x, float zero, float top) {
  x = top < x ? top : x; /* by itself, or gcc 12 chooses among converted numbers */
  return (int32_t)x;
}
#else
enum { PART = 1 };
#define STEP BLOCK
typedef uint8_t Code;
#define CODE(bytes, part) bytes[i]
#define NARROW(bytes, part)
INLINE int32_t to_code(float x, float zero, float top) { return to_uint(x, zero, top); }
#endif

/* Five trits in a byte: byte j holds trits j, j + length, ... `codes` is zero past m. They are as
   wide as the numbers that they are made of, and narrowed by themselves: where widths mix in a loop,
   compilers take 64 values at once, and a block of 80 leaves them 16. */
enum { TRITS = 64 };
INLINE void pack_trits(uint8_t *out, const int32_t *codes, int m) {
  const int length = (m + 4) / 5;
  for (int from = 0; from < length; from += TRITS) {
    const int n = length - from < TRITS ? length - from : TRITS;
    int32_t byte[TRITS] = {0};
#pragma omp simd
    for (int j = 0; j < n; j++)
#pragma GCC unroll 5
      for (int k = 4; k >= 0; k--) byte[j] = byte[j] * 3 + codes[from + j + k * length];
    for (int j = 0; j < n; j++) out[from + j] = (uint8_t)byte[j];
  }
}
INLINE void unpack_trits(const uint8_t *in, int32_t *codes, int m) {
  const int length = (m + 4) / 5;
  for (int from = 0; from < length; from += TRITS) {
    const int n = length - from < TRITS ? length - from : TRITS;
    uint16_t byte[TRITS];
    for (int j = 0; j < n; j++) byte[j] = in[from + j];
#pragma GCC unroll 5
    for (int k = 0; k < 5; k++)
#pragma omp simd
      for (int j = 0; j < n; j++) {
        const uint16_t rest = (uint16_t)(byte[j] * 171) >> 9; /* a third, of a byte */
        codes[from + j + k * length] = (uint16_t)(byte[j] - rest * 3), byte[j] = rest;
      }
  }
}

/* The counter-based RNG of lang/rng.py. */
typedef struct { uint32_t low, high; } Stream;
INLINE Stream stream(uint64_t key, uint64_t number) {
  uint64_t x = key + (number + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  const Stream s = {(uint32_t)x, (uint32_t)(x >> 32)};
  return s;
}
/* `weyl` is (index + s.low) * WEYL, a sequence that a loop over indices steps by addition. */
#define WEYL 0x9E3779B1u
INLINE uint32_t mixed(Stream s, uint32_t weyl) {
  uint32_t x = weyl ^ weyl >> 16;
  x = (x ^ s.high) * 0x7FEB352Du;
  x ^= x >> 15;
  return x * 0x846CA68Bu;
}
/* 24 random bits, and the uniform number that they are in units of 2^-24. */
INLINE float drawn(Stream s, uint32_t weyl) { return (float)(int32_t)(mixed(s, weyl) >> 8); }
INLINE float uniform(float r) { return r * 0x1p-24f; }
/* The same, added to x: it is a multiple of 2^-24, exactly, so that the sum alone is rounded. */
INLINE float plus_uniform(float x, float r) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(r, 0x1p-24f, x);
#else
  return x + uniform(r);
#endif
}

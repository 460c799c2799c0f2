/* Products of matrices with thin factors, and orthonormal columns, for PowerSGD.

   A factor of r columns is stored transposed, as r rows. All values that ranks must compute alike
   (columns, averages) are sums in a fixed order, whatever the threads: lang/lowrank.py does the same
   with numpy. The other sums, left and right, are in a fixed order too, so that no bit depends on
   which matrices share a call. Nothing is contracted to fused multiply-adds. */
#include <math.h>
#include <stdint.h>
#include <string.h>

int omp_get_num_threads(void);
int omp_get_thread_num(void);

typedef float V __attribute__((vector_size(64)));
typedef float U __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64)));
typedef double D __attribute__((vector_size(64)));
typedef double E __attribute__((vector_size(64), aligned(8), may_alias));

enum { W = 16, L = 8, ROWS = 64, STRIP = 64 };

/* A matrix and its factors; lang/lowrank.py describes the same 80 bytes. */
typedef struct {
  float *values;   /* M, n x m; the average in the end */
  float *residual; /* n x m, or null */
  float *basis;    /* m x r: Q of the last step */
  float *start;    /* r x m: Q with scaled columns */
  float *left;     /* r x n: P */
  float *own;      /* r x m: M^T P of this rank */
  float *right;    /* r x m: its average over ranks */
  int64_t n, m;
  int32_t r, kept; /* kept: whether the average is finite, so that residual and basis change */
} Matrix;

/* Keep a vector in its register: gcc 12 would load it again for each product. */
#ifdef __AVX512F__
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v)
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

#define MINE(counter) ((counter)++ % team == me)
#define TEAM                                  \
  const int team = omp_get_num_threads();     \
  const int me = omp_get_thread_num();        \
  int64_t turn = 0;

/* start = basis transposed, each column times a power of two that brings its largest value to
   [1, 2): M Q spans the same space, and stays in range whatever the scale of M. */
static void scale(const Matrix *a) {
  const int64_t m = a->m;
  const int r = a->r;
  for (int k = 0; k < r; k++) {
    float *row = a->start + k * m;
    float most = 0;
    for (int64_t j = 0; j < m; j++) row[j] = a->basis[j * r + k];
    for (int64_t j = 0; j < m; j++) most = fabsf(row[j]) > most ? fabsf(row[j]) : most;
    if (most == 0 || !isfinite(most)) continue;
    int exponent;
    frexpf(most, &exponent);
    /* two factors: for a subnormal number, one would overflow */
    const int half = (1 - exponent) / 2;
    const float one = ldexpf(1, half), two = ldexpf(1, 1 - exponent - half);
    for (int64_t j = 0; j < m; j++) row[j] = row[j] * one * two;
  }
}

/* Half of the lanes of each sum in `a`, plus the other half; then the same of `b`. */
#define FOLD(a, b, low, high) (SHUFFLE(a, b, low) + SHUFFLE(a, b, high))
#define LIST(...) __VA_ARGS__

/* The sums of the lanes of 16 vectors, each in the same order. */
static inline V totals(const V s[16]) {
  V a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = FOLD(s[2 * i], s[2 * i + 1],
                LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    b[i] = FOLD(a[2 * i], a[2 * i + 1],
                LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    c[i] = FOLD(b[2 * i], b[2 * i + 1],
                LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
  return FOLD(c[0], c[1], LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
              LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
}

/* The products of 4 rows of M and 4 columns of Q. */
static void dot4(const float *const x[4], const float *const y[4], int64_t m, float out[4][4]) {
  V s[16];
  memset(s, 0, sizeof s);
  const int64_t whole = m / W * W;
  for (int64_t j = 0; j < whole; j += W) {
    V y0 = *(const U *)(y[0] + j), y1 = *(const U *)(y[1] + j);
    V y2 = *(const U *)(y[2] + j), y3 = *(const U *)(y[3] + j);
    KEEP(y0);
    KEEP(y1);
    KEEP(y2);
    KEEP(y3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      V v = *(const U *)(x[i] + j);
      KEEP(v);
      s[4 * i] += v * y0;
      s[4 * i + 1] += v * y1;
      s[4 * i + 2] += v * y2;
      s[4 * i + 3] += v * y3;
    }
  }
  *(U *)out = totals(s);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++)
      for (int64_t j = whole; j < m; j++) out[i][k] += x[i][j] * y[k][j];
}

/* M += residual, and P = M Q. */
static void left_rows(const Matrix *a, int64_t first, int64_t last) {
  const int64_t n = a->n, m = a->m;
  for (int64_t i = first; i < last; i += 4) {
    const float *x[4], *y[4];
    float out[4][4];
    const int rows = last - i < 4 ? last - i : 4;
    if (a->residual) {
      float *restrict g = a->values + i * m;
      const float *restrict e = a->residual + i * m;
      for (int64_t j = 0; j < rows * m; j++) g[j] += e[j];
    }
    for (int l = 0; l < 4; l++) x[l] = a->values + (i + (l < rows ? l : 0)) * m;
    const int64_t ahead = (last - i < 8 ? last - i - 4 : 4) * m; /* values of the next rows */
    for (int k = 0; k < a->r; k += 4) {
      const int columns = a->r - k < 4 ? a->r - k : 4;
      for (int64_t j = ahead * k / a->r; j < ahead * (k + 4) / a->r && j < ahead; j += W) {
        __builtin_prefetch(a->values + (i + 4) * m + j, 1, 2);
        if (a->residual) __builtin_prefetch(a->residual + (i + 4) * m + j, 0, 2);
      }
      for (int l = 0; l < 4; l++) y[l] = a->start + (k + (l < columns ? l : 0)) * m;
      dot4(x, y, m, out);
      for (int l = 0; l < columns; l++)
        for (int o = 0; o < rows; o++) a->left[(k + l) * n + i + o] = out[o][l];
    }
  }
}

/* Add to 4 rows of `own` the sums over rows [first, last) of P times M, on columns [j, j + w). */
static void right_strip(const Matrix *a, int64_t first, int64_t last, int64_t j, int w, int k) {
  const int64_t n = a->n, m = a->m;
  const int columns = a->r - k < 4 ? a->r - k : 4;
  const float *p[4];
  for (int l = 0; l < 4; l++) p[l] = a->left + (k + (l < columns ? l : 0)) * n;
  float sums[4][STRIP];
  if (w == STRIP) {
    V s[4][4];
    memset(s, 0, sizeof s);
    for (int64_t i = first; i < last; i++) {
      const float *x = a->values + i * m + j;
      V x0 = *(const U *)x, x1 = *(const U *)(x + W);
      V x2 = *(const U *)(x + 2 * W), x3 = *(const U *)(x + 3 * W);
      KEEP(x0);
      KEEP(x1);
      KEEP(x2);
      KEEP(x3);
      if (!k) { /* the next strip, or the next rows */
        __builtin_prefetch(x + 4 * W, 0, 2);
        __builtin_prefetch(x + 5 * W, 0, 2);
        __builtin_prefetch(x + 6 * W, 0, 2);
        __builtin_prefetch(x + 7 * W, 0, 2);
      }
#pragma GCC unroll 4
      for (int l = 0; l < 4; l++) {
        const float f = p[l][i];
        s[l][0] += f * x0;
        s[l][1] += f * x1;
        s[l][2] += f * x2;
        s[l][3] += f * x3;
      }
    }
    memcpy(sums, s, sizeof sums);
  } else {
    memset(sums, 0, sizeof sums);
    for (int64_t i = first; i < last; i++) {
      const float *x = a->values + i * m + j;
      for (int l = 0; l < 4; l++)
        for (int c = 0; c < w; c++) sums[l][c] += p[l][i] * x[c];
    }
  }
  for (int l = 0; l < columns; l++) {
    float *out = a->own + (k + l) * m + j;
    for (int c = 0; c < w; c++) out[c] += sums[l][c];
  }
}

/* own = right = M^T P, on columns [begin, end). */
static void right_columns(const Matrix *a, int64_t begin, int64_t end) {
  const int64_t n = a->n, m = a->m;
  for (int k = 0; k < a->r; k++) memset(a->own + k * m + begin, 0, (end - begin) * sizeof(float));
  for (int64_t i = 0; i < n; i += ROWS)
    for (int64_t j = begin; j < end; j += STRIP)
      for (int k = 0; k < a->r; k += 4)
        right_strip(a, i, i + ROWS < n ? i + ROWS : n, j, end - j < STRIP ? end - j : STRIP, k);
  for (int k = 0; k < a->r; k++)
    memcpy(a->right + k * m + begin, a->own + k * m + begin, (end - begin) * sizeof(float));
}

/* 4 x 64 values of P times `factor`, summed over columns of P in order. */
static inline void product4(const Matrix *a, const float *factor, int64_t i, int64_t j, V s[4][4]) {
  const int64_t n = a->n, m = a->m;
  for (int k = 0; k < a->r; k++) {
    const float *p = a->left + k * n + i, *q = factor + k * m + j;
    V q0 = *(const U *)q, q1 = *(const U *)(q + W);
    V q2 = *(const U *)(q + 2 * W), q3 = *(const U *)(q + 3 * W);
    KEEP(q0);
    KEEP(q1);
    KEEP(q2);
    KEEP(q3);
    if (!k) {
#pragma GCC unroll 4
      for (int l = 0; l < 4; l++) {
        s[l][0] = p[l] * q0;
        s[l][1] = p[l] * q1;
        s[l][2] = p[l] * q2;
        s[l][3] = p[l] * q3;
      }
      continue;
    }
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
      s[l][0] += p[l] * q0;
      s[l][1] += p[l] * q1;
      s[l][2] += p[l] * q2;
      s[l][3] += p[l] * q3;
    }
  }
}

static float product1(const Matrix *a, const float *factor, int64_t i, int64_t j) {
  float sum = a->left[i] * factor[j];
  for (int k = 1; k < a->r; k++) sum += a->left[k * a->n + i] * factor[k * a->m + j];
  return sum;
}

/* residual = M - P own^T where the average is kept, and M = P right^T, on rows [first, last). */
static void finish_rows(const Matrix *a, int64_t first, int64_t last) {
  const int64_t m = a->m;
  float *e = a->kept ? a->residual : 0;
  for (int64_t j = 0; j < m; j += STRIP) {
    int64_t i = first;
    if (m - j >= STRIP)
      for (; i + 4 <= last; i += 4) {
        V s[4][4];
        for (int l = 4; l < 8 && i + l < last; l++)
          for (int c = 0; c < STRIP; c += W) {
            __builtin_prefetch(a->values + (i + l) * m + j + c, 1, 2);
            if (e) __builtin_prefetch(e + (i + l) * m + j + c, 1, 2);
          }
        if (e) {
          product4(a, a->own, i, j, s);
#pragma GCC unroll 4
          for (int l = 0; l < 4; l++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
              const int64_t at = (i + l) * m + j + c * W;
              *(U *)(e + at) = *(const U *)(a->values + at) - s[l][c];
            }
        }
        product4(a, a->right, i, j, s);
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++)
#pragma GCC unroll 4
          for (int c = 0; c < 4; c++) *(U *)(a->values + (i + l) * m + j + c * W) = s[l][c];
      }
    for (; i < last; i++)
      for (int64_t c = j; c < m && c < j + STRIP; c++) {
        const int64_t at = i * m + c;
        if (e) e[at] = a->values[at] - product1(a, a->own, i, c);
        a->values[at] = product1(a, a->right, i, c);
      }
  }
}

/* Whether |P right^T| is surely finite, P's values being at most 1. */
static int bounded(const Matrix *a) {
  float most = 0;
  for (int64_t j = 0; j < a->r * a->m; j++) {
    const float size = fabsf(a->right[j]);
    most = size <= most ? most : size; /* NaN stays */
    if (size != size) return 0;
  }
  return most * (a->r + 1) <= 3.0e38f;
}

static void keep_basis(const Matrix *a) {
  for (int k = 0; k < a->r; k++)
    for (int64_t j = 0; j < a->m; j++) a->basis[j * a->r + k] = a->right[k * a->m + j];
}

static double sum8(D v) {
  for (int half = L / 2; half; half /= 2)
    for (int l = 0; l < half; l++) v[l] = v[l] + v[l + half];
  return v[0];
}

/* x . y[k * stride] for each k < count; n is a multiple of L. */
static void dots(const double *x, const double *y, int64_t stride, int64_t n, int count, double *out) {
  int k = 0;
  for (; k + 4 <= count; k += 4, y += 4 * stride) {
    D s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    for (int64_t i = 0; i < n; i += L) {
      const D v = *(const E *)(x + i);
      s0 += v * *(const E *)(y + i);
      s1 += v * *(const E *)(y + stride + i);
      s2 += v * *(const E *)(y + 2 * stride + i);
      s3 += v * *(const E *)(y + 3 * stride + i);
    }
    out[k] = sum8(s0), out[k + 1] = sum8(s1), out[k + 2] = sum8(s2), out[k + 3] = sum8(s3);
  }
  for (; k < count; k++, y += stride) {
    D s = {0};
    for (int64_t i = 0; i < n; i += L) s += *(const E *)(x + i) * *(const E *)(y + i);
    out[k] = sum8(s);
  }
}

/* x -= the sum of shares[k] * y[k * stride], in order, for k < count. */
static void take(double *x, const double *y, int64_t stride, int64_t n, int count, const double *shares) {
  for (int64_t i = 0; i < n && count; i += L) {
    D sum = shares[0] * *(const E *)(y + i);
    for (int k = 1; k < count; k++) sum += shares[k] * *(const E *)(y + k * stride + i);
    *(E *)(x + i) -= sum;
  }
}

static double length(const double *x, int64_t n) {
  double square;
  dots(x, x, 0, n, 1, &square);
  return sqrt(square);
}

static void project(double *x, const double *y, int64_t stride, int64_t n, int count, double *shares) {
  dots(x, y, stride, n, count, shares);
  take(x, y, stride, n, count, shares);
}

/* Gram-Schmidt with reorthogonalisation on r rows of `n` values, padded to `wide`. */
static void gram_schmidt(double *rows, int64_t stride, int64_t n, int64_t wide, int r, double *shares) {
  for (int k = 0; k < r; k++) {
    double *row = rows + k * stride;
    const double size = length(row, wide);
    project(row, rows, stride, wide, k, shares);
    if (length(row, wide) <= 1e-9 * size) {
      int64_t axis = 0;
      double least = INFINITY;
      for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int l = 0; l < k; l++) sum += rows[l * stride + i] * rows[l * stride + i];
        if (sum < least) least = sum, axis = i;
      }
      memset(row, 0, wide * sizeof *row);
      row[axis] = 1;
    }
    project(row, rows, stride, wide, k, shares);
    const double size_now = length(row, wide);
    for (int64_t i = 0; i < wide; i++) row[i] /= size_now;
  }
}

/* The rows times the inverse of the Cholesky factor of their Gram matrix, r x r in `g`. Returns 0,
   and changes no row, if a row is nearly dependent on those before it. */
static int cholesky(double *rows, int64_t stride, int64_t wide, int r, double *g) {
  for (int k = 0; k < r; k++) dots(rows + k * stride, rows, stride, wide, k + 1, g + k * r);
  for (int k = 0; k < r; k++) {
    const double square = g[k * r + k];
    for (int l = 0; l <= k; l++) {
      double sum = g[k * r + l];
      for (int o = 0; o < l; o++) sum -= g[k * r + o] * g[l * r + o];
      if (l < k) g[k * r + l] = sum * g[l * r + l];
      else if (!(sum > 1e-8 * square)) return 0;
      else g[k * r + k] = 1 / sqrt(sum); /* the diagonal holds inverses */
    }
  }
  for (int64_t i = 0; i < wide; i += L)
    for (int k = 0; k < r; k++) {
      D v = *(E *)(rows + k * stride + i);
      for (int l = 0; l < k; l++) v -= g[k * r + l] * *(E *)(rows + l * stride + i);
      *(E *)(rows + k * stride + i) = v * g[k * r + k];
    }
  return 1;
}

/* Orthonormal rows of `left`, all NaN if one is not finite; `scratch` holds one matrix. */
static void columns_of(const Matrix *a, int cheap, double *scratch) {
  const int64_t n = a->n, wide = (n + L - 1) / L * L, stride = wide + L;
  const int r = a->r;
  double *shares = scratch + r * stride;
  int finite = 1;
  for (int k = 0; k < r; k++) {
    const float *row = a->left + k * n;
    double *out = scratch + k * stride;
    int fine = 1;
    for (int64_t i = 0; i < n; i++) fine &= fabsf(row[i]) <= 3.4028234663852886e38f;
    for (int64_t i = 0; i < n; i++) out[i] = row[i];
    for (int64_t i = n; i < wide; i++) out[i] = 0;
    finite &= fine;
  }
  if (finite && !(cheap && cholesky(scratch, stride, wide, r, shares)))
    gram_schmidt(scratch, stride, n, wide, r, shares);
  for (int k = 0; k < r; k++)
    for (int64_t i = 0; i < n; i++) a->left[k * n + i] = finite ? scratch[k * stride + i] : NAN;
}

void lowrank_left(const Matrix *all, int64_t count, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    TEAM
    for (int64_t at = 0; at < count; at++)
      if (MINE(turn)) scale(&all[at]);
#pragma omp barrier
    for (int64_t at = 0; at < count; at++)
      for (int64_t i = 0; i < all[at].n; i += ROWS)
        if (MINE(turn)) left_rows(&all[at], i, i + ROWS < all[at].n ? i + ROWS : all[at].n);
  }
}

/* `scratch` has `each` doubles per thread: r (n + 16) + r r of the largest. */
void lowrank_columns(const Matrix *all, int64_t count, int32_t threads, int32_t cheap, double *scratch,
                     int64_t each) {
#pragma omp parallel num_threads(threads)
  {
    TEAM
    for (int64_t at = 0; at < count; at++)
      if (MINE(turn)) columns_of(&all[at], cheap, scratch + me * each);
  }
}

void lowrank_right(const Matrix *all, int64_t count, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    TEAM
    for (int64_t at = 0; at < count; at++) {
      /* whole strips to each thread */
      const int64_t m = all[at].m, strips = (m + STRIP - 1) / STRIP;
      const int64_t begin = strips * me / team * STRIP, end = strips * (me + 1) / team * STRIP;
      if (begin < m) right_columns(&all[at], begin, end < m ? end : m);
    }
  }
}

void lowrank_finish(Matrix *all, int64_t count, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    TEAM
    for (int64_t at = 0; at < count; at++)
      if (MINE(turn)) {
        all[at].kept = bounded(&all[at]);
        if (all[at].kept) keep_basis(&all[at]);
        else /* too large for a sum: as good as not finite */
          for (int64_t j = 0; j < all[at].r * all[at].m; j++) all[at].right[j] = NAN;
      }
#pragma omp barrier
    for (int64_t at = 0; at < count; at++)
      for (int64_t i = 0; i < all[at].n; i += ROWS)
        if (MINE(turn)) finish_rows(&all[at], i, i + ROWS < all[at].n ? i + ROWS : all[at].n);
  }
}

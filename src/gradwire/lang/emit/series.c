/* Kernel calls one after the other, so that Python makes one call whatever codecs it has rows of.
   It is a library of its own: kernels do not change with it, and stay in every cache. */
#include <stdint.h>

/* What every form of every codec is; c_rows.py writes the same. */
typedef int Form(const void *rows, int64_t n, int32_t ranks, int32_t rank, const int64_t *distances,
                 float factor, int32_t threads, void *workspace, const float *table);

/* A kernel call; lang/series.py describes the same 64 bytes. */
typedef struct {
  Form *form;
  const void *rows;
  int64_t n;
  const int64_t *distances;
  void *workspace;
  const float *table;
  int32_t ranks, rank, threads;
  float factor;
} Entry;

/* 0, or of the first call that found a payload that it cannot decode, behind which none is made:
   its place in the upper half, and in the lower what it returned, 1 + the number of the row. */
int64_t run_series(const Entry *entries, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    const Entry *e = &entries[k];
    const int failed = e->form(e->rows, e->n, e->ranks, e->rank, e->distances, e->factor,
                               e->threads, e->workspace, e->table);
    if (failed) return k << 32 | failed;
  }
  return 0;
}

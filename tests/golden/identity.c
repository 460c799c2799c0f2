enum { BLOCK = 1024, PARTIALS = 0 };

/* Where a row's fields begin, its random streams, its part of the workspace. */
typedef struct {
  const Row *row;
  int64_t blocks, at[2];
  Stream streams[1];
  float *partials;
} Place;

INLINE Place place_of(const Row *row, float *partials) {
  Place p = {.row = row, .blocks = blocks_of(row->numel, BLOCK), .partials = partials};
  const int64_t full = row->numel / BLOCK, rest = row->numel % BLOCK;
  int64_t at = 0;
  p.at[0] = at, at += full * 4096 + rest * 4;  /* value */
  p.at[1] = at;
  return p;
}

/* The part of the workspace that belongs to a row. */
INLINE int64_t floats_of(int64_t numel) {
  return (blocks_of(numel, BLOCK) + 1) * PARTIALS;
}

INLINE void encode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    f32 *restrict p1 = (f32 *)(payload + place->at[0] + b * 4096);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n1 = to_fp32(n0);
      p1[i] = (f32)n1;
    }
  }
}

static __attribute__((noinline, noipa)) void encode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_group0(call, place, b, count, m);
}

static void encode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 4 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) encode_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int encode(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    encode_sweep0(&call, thread, of);
  }
  return failed;
}

INLINE void encode_ef_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    f32 *restrict p3 = (f32 *)(payload + place->at[0] + b * 4096);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n1 = residual[i];
      const float n2 = n0 + n1;
      const float n3 = to_fp32(n2);
      const float n4 = n2 - n3;
      const int n5 = is_finite(n4);
      const float n6 = n5 ? n4 : n1;
      p3[i] = (f32)n3;
      residual[i] = n6;
    }
  }
}

static __attribute__((noinline, noipa)) void encode_ef_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_ef_group0(call, place, b, count, m);
}

static void encode_ef_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 1 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) encode_ef_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_ef_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_ef_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int encode_ef(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    encode_ef_sweep0(&call, thread, of);
  }
  return failed;
}

INLINE void decode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict to = (float *)place->row->values + b * BLOCK;
    float fresh[BLOCK] __attribute__((aligned(64)));
    float *restrict values = call->large ? fresh : to;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = ((const f32 *)(payload + place->at[0] + b * 4096))[i];
      const float n2 = n0 * factor;
      const float n3 = to_fp32(n2);
      values[i] = n3;
    }
    if (call->large) past_cache(to, fresh, m * sizeof *to);
  }
}

static __attribute__((noinline, noipa)) void decode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_group0(call, place, b, count, m);
}

static void decode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 4 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) decode_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) decode_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) decode_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int decode(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
  int64_t total = 0;
  for (int64_t r = 0; r < n; r++) total += rows[r].numel;
  call.large = total >= 262144;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    decode_sweep0(&call, thread, of);
    past_cache_end();
  }
  return failed;
}

INLINE void decode_add_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n1 = ((const f32 *)(payload + place->at[0] + b * 4096))[i];
      const float n2 = n0 + n1;
      const float n3 = to_fp32(n2);
      values[i] = n3;
    }
  }
}

static __attribute__((noinline, noipa)) void decode_add_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_add_group0(call, place, b, count, m);
}

static void decode_add_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 4 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) decode_add_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) decode_add_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) decode_add_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int decode_add(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    decode_add_sweep0(&call, thread, of);
  }
  return failed;
}

INLINE void decode_sum_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  float a2_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a2_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          a2_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n1 = ((const f32 *)(source + place->at[0] + b * 4096))[i];
          a2_[g][i] += n1;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a2 = a2_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n4 = a2[i] * factor;
      const float n5 = to_fp32(n4);
      values[i] = n5;
    }
  }
}

static __attribute__((noinline, noipa)) void decode_sum_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_sum_group0(call, place, b, count, m);
}

static void decode_sum_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 4 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) decode_sum_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) decode_sum_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) decode_sum_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int decode_sum(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    decode_sum_sweep0(&call, thread, of);
  }
  return failed;
}

INLINE void reduce_encode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  float a2_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a2_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          a2_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n1 = ((const f32 *)(source + place->at[0] + b * 4096))[i];
          a2_[g][i] += n1;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a2 = a2_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
    f32 *restrict p5 = (f32 *)(payload + place->at[0] + b * 4096);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n4 = a2[i] * factor;
      const float n5 = to_fp32(n4);
      const float n6 = to_fp32(n5);
      p5[i] = (f32)n5;
      values[i] = n6;
    }
  }
}

static __attribute__((noinline, noipa)) void reduce_encode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_group0(call, place, b, count, m);
}

static void reduce_encode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 4 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int reduce_encode(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    reduce_encode_sweep0(&call, thread, of);
  }
  return failed;
}

INLINE void reduce_encode_ef_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  float a4_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a4_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          const float n1 = residual[i];
          const float n2 = n0 + n1;
          a4_[g][i] += n2;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n3 = ((const f32 *)(source + place->at[0] + b * 4096))[i];
          a4_[g][i] += n3;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a4 = a4_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    f32 *restrict p7 = (f32 *)(payload + place->at[0] + b * 4096);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n6 = a4[i] * factor;
      const float n7 = to_fp32(n6);
      const float n8 = to_fp32(n7);
      const float n9 = n6 - n7;
      const float n10 = n9 / factor;
      const int n11 = is_finite(n10);
      const float n1 = residual[i];
      const float n12 = n11 ? n10 : n1;
      p7[i] = (f32)n7;
      values[i] = n8;
      residual[i] = n12;
    }
  }
}

static __attribute__((noinline, noipa)) void reduce_encode_ef_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_ef_group0(call, place, b, count, m);
}

static void reduce_encode_ef_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 1 };
  int64_t total = 0, seen = 0;
  for (int64_t r = 0; r < call->n; r++) total += blocks_of(call->rows[r].numel, BLOCK);
  const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n && seen < last; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    int64_t b = first > seen ? first - seen : 0;
    const int64_t end = last - seen < blocks ? last - seen : blocks;
    if (b < end) {
      Place place = place_of(row, partials);
      const int64_t stop = end < full ? end : full;
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_ef_group0(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_ef_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_ef_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

int reduce_encode_ef(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
    const int64_t *distances, float factor, int32_t threads, void *workspace,
    const float *table) {
  int failed = 0;
  Call call = {rows, n, distances, ranks, rank, factor, workspace, table, &failed};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num(), of = omp_get_num_threads();
    reduce_encode_ef_sweep0(&call, thread, of);
  }
  return failed;
}

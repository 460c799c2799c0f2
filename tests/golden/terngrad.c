enum { BLOCK = 1024, PARTIALS = 2 };

/* Where a row's fields begin, its random streams, its part of the workspace. */
typedef struct {
  const Row *row;
  int64_t blocks, at[4];
  Stream streams[1];
  float *partials;
} Place;

INLINE Place place_of(const Row *row, float *partials) {
  Place p = {.row = row, .blocks = blocks_of(row->numel, BLOCK), .partials = partials};
  const int64_t full = row->numel / BLOCK, rest = row->numel % BLOCK;
  int64_t at = 0;
  p.at[0] = at, at += 4;  /* low */
  p.at[1] = at, at += 4;  /* half */
  p.at[2] = at, at += full * 256 + (rest * 2 + 7) / 8;  /* code */
  p.at[3] = at;
  p.streams[0] = stream(row->key, 0u);
  return p;
}

/* The part of the workspace that belongs to a row. */
INLINE int64_t floats_of(int64_t numel) {
  return (blocks_of(numel, BLOCK) + 1) * PARTIALS;
}

/* Compute tensor reduction `index` of every row from the partial results of its blocks; rows are
   divided among threads. Text that follows the codec's struct Place. */
INLINE void complete(
    const int index, float (*reduce)(float *, int64_t), const Call *call, int thread, int threads) {
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n; r++) {
    const int64_t numel = call->rows[r].numel, blocks = blocks_of(numel, BLOCK);
    if (r % threads == thread && blocks)
      partials[PARTIALS * blocks + index] = reduce(partials + index * blocks, blocks);
    partials += floats_of(numel);
  }
}

INLINE void encode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  int32_t least0_[GROUP];
  int32_t most0_[GROUP];
  uint32_t top0_[GROUP];
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    int32_t least0 = INT32_MAX;
    int32_t most0 = INT32_MIN;
    uint32_t top0 = 0;
#pragma omp simd reduction(max : most0) reduction(max : top0)
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      most0 = (int32_t)bits_of(n0) > most0 ? (int32_t)bits_of(n0) : most0;
      top0 = (uint32_t)bits_of(n0) > top0 ? (uint32_t)bits_of(n0) : top0;
    }
    if (has_one_sign(most0, top0)) {
#pragma omp simd reduction(min : least0)
      for (int i = 0; i < m; i++) {
        const float n0 = values[i];
        least0 = (int32_t)bits_of(n0) < least0 ? (int32_t)bits_of(n0) : least0;
      }
    }
    least0_[g] = least0;
    most0_[g] = most0;
    top0_[g] = top0;
  }
  float s1_[GROUP];
  float s4_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n1 = lowest(least0_[g], most0_[g], top0_[g]);
    s1_[g] = n1;
    const float n4 = highest(least0_[g], most0_[g], top0_[g]);
    s4_[g] = n4;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n1 = s1_[g];
    place->partials[0 * place->blocks + b] = n1;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n4 = s4_[g];
    place->partials[1 * place->blocks + b] = n4;
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
      for (; b + GROUP <= stop; b += GROUP) encode_rest0(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

INLINE void encode_group1(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  const float n2 = place->partials[PARTIALS * place->blocks + 0];
  const float n3 = to_fp32(n2);
  const float n5 = place->partials[PARTIALS * place->blocks + 1];
  const float n7 = n5 * 0.5f;
  const float n8 = n3 * 0.5f;
  const float n9 = n7 - n8;
  const float n11 = n9 / 3.0f;
  const float n12 = to_fp32(n11);
  const float n16 = 1.0f / n12;
  const int n17 = is_finite(n16);
  const float n19 = n17 ? n16 : 0.0f;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    uint8_t c23[BLOCK + 8] __attribute__((aligned(64)));
    memset(c23 + m, 0, 8 * sizeof *c23);
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part23[PART] __attribute__((aligned(64)));
#pragma omp simd linear(stream0_weyl : WEYL)
      for (int i = from; i < to; i++) {
        const float n0 = values[i];
        const float n13 = n0 * 0.5f;
        const float n14 = n13 - n8;
        const float n20 = n14 * n19;
        const float n21 = uniform(drawn(stream0, stream0_weyl));
        const float n22 = plus_uniform(n20, drawn(stream0, stream0_weyl));
        const int32_t n23 = to_code(n22, limit0, limit1);
        CODE(c23, part23) = n23;
        stream0_weyl += WEYL;
      }
      NARROW(c23, part23);
    }
    uint8_t *out23 = payload + place->at[2] + b * 256;
    out23 = pack(out23, c23, m, 2, 0, 2);
  }
  if (b0 == 0) *(f32 *)(payload + place->at[0]) = (f32)n3;
  if (b0 == 0) *(f32 *)(payload + place->at[1]) = (f32)n12;
}

static __attribute__((noinline, noipa)) void encode_rest1(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_group1(call, place, b, count, m);
}

static void encode_sweep1(const Call *call, int thread, int threads) {
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
      for (; b + GROUP <= stop; b += GROUP) encode_group1(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_rest1(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_rest1(call, &place, b, 1, (int)(row->numel - full * BLOCK));
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
#pragma omp barrier
    complete(0, minimum, &call, thread, of);
    complete(1, maximum, &call, thread, of);
#pragma omp barrier
    encode_sweep1(&call, thread, of);
  }
  return failed;
}

INLINE void encode_ef_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  int32_t least2_[GROUP];
  int32_t most2_[GROUP];
  uint32_t top2_[GROUP];
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    int32_t least2 = INT32_MAX;
    int32_t most2 = INT32_MIN;
    uint32_t top2 = 0;
#pragma omp simd reduction(max : most2) reduction(max : top2)
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n1 = residual[i];
      const float n2 = n0 + n1;
      most2 = (int32_t)bits_of(n2) > most2 ? (int32_t)bits_of(n2) : most2;
      top2 = (uint32_t)bits_of(n2) > top2 ? (uint32_t)bits_of(n2) : top2;
    }
    if (has_one_sign(most2, top2)) {
#pragma omp simd reduction(min : least2)
      for (int i = 0; i < m; i++) {
        const float n0 = values[i];
        const float n1 = residual[i];
        const float n2 = n0 + n1;
        least2 = (int32_t)bits_of(n2) < least2 ? (int32_t)bits_of(n2) : least2;
      }
    }
    least2_[g] = least2;
    most2_[g] = most2;
    top2_[g] = top2;
  }
  float s3_[GROUP];
  float s6_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n3 = lowest(least2_[g], most2_[g], top2_[g]);
    s3_[g] = n3;
    const float n6 = highest(least2_[g], most2_[g], top2_[g]);
    s6_[g] = n6;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n3 = s3_[g];
    place->partials[0 * place->blocks + b] = n3;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n6 = s6_[g];
    place->partials[1 * place->blocks + b] = n6;
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
      for (; b + GROUP <= stop; b += GROUP) encode_ef_rest0(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_ef_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_ef_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

INLINE void encode_ef_group1(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  const float n4 = place->partials[PARTIALS * place->blocks + 0];
  const float n5 = to_fp32(n4);
  const float n7 = place->partials[PARTIALS * place->blocks + 1];
  const float n9 = n7 * 0.5f;
  const float n10 = n5 * 0.5f;
  const float n11 = n9 - n10;
  const float n13 = n11 / 3.0f;
  const float n14 = to_fp32(n13);
  const float n18 = 1.0f / n14;
  const int n19 = is_finite(n18);
  const float n21 = n19 ? n18 : 0.0f;
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    uint8_t c25[BLOCK + 8] __attribute__((aligned(64)));
    memset(c25 + m, 0, 8 * sizeof *c25);
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part25[PART] __attribute__((aligned(64)));
#pragma omp simd linear(stream0_weyl : WEYL)
      for (int i = from; i < to; i++) {
        const float n0 = values[i];
        const float n1 = residual[i];
        const float n2 = n0 + n1;
        const float n15 = n2 * 0.5f;
        const float n16 = n15 - n10;
        const float n22 = n16 * n21;
        const float n23 = uniform(drawn(stream0, stream0_weyl));
        const float n24 = plus_uniform(n22, drawn(stream0, stream0_weyl));
        const int32_t n25 = to_uint(n24, limit0, limit1);
        const float n26 = (float)n25;
        const float n27 = n14 * n26;
        const float n28 = n5 + n27;
        const float n29 = n28 + n27;
        const float n30 = n2 - n29;
        const int n31 = is_finite(n30);
        const float n32 = n31 ? n30 : n1;
        CODE(c25, part25) = n25;
        residual[i] = n32;
        stream0_weyl += WEYL;
      }
      NARROW(c25, part25);
    }
    uint8_t *out25 = payload + place->at[2] + b * 256;
    out25 = pack(out25, c25, m, 2, 0, 2);
  }
  if (b0 == 0) *(f32 *)(payload + place->at[0]) = (f32)n5;
  if (b0 == 0) *(f32 *)(payload + place->at[1]) = (f32)n14;
}

static __attribute__((noinline, noipa)) void encode_ef_rest1(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_ef_group1(call, place, b, count, m);
}

static void encode_ef_sweep1(const Call *call, int thread, int threads) {
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
      for (; b + GROUP <= stop; b += GROUP) encode_ef_group1(call, &place, b, GROUP, BLOCK);
      if (b < stop) encode_ef_rest1(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) encode_ef_rest1(call, &place, b, 1, (int)(row->numel - full * BLOCK));
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
#pragma omp barrier
    complete(0, minimum, &call, thread, of);
    complete(1, maximum, &call, thread, of);
#pragma omp barrier
    encode_ef_sweep1(&call, thread, of);
  }
  return failed;
}

INLINE void decode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float n0 = ((const f32 *)(payload + place->at[0]))[0];
  const float n1 = ((const f32 *)(payload + place->at[1]))[0];
  uint8_t a2_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *in2 = payload + place->at[2] + b * 256;
    in2 = unpack(in2, a2_[g], m, 2, 0);
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *restrict a2 = a2_[g];
    float *restrict to = (float *)place->row->values + b * BLOCK;
    float fresh[BLOCK] __attribute__((aligned(64)));
    float *restrict values = call->large ? fresh : to;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n3 = (float)a2[i];
      const float n4 = n1 * n3;
      const float n5 = n0 + n4;
      const float n6 = n5 + n4;
      const float n8 = n6 * factor;
      const float n9 = to_fp32(n8);
      values[i] = n9;
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
  const float n1 = ((const f32 *)(payload + place->at[0]))[0];
  const float n2 = ((const f32 *)(payload + place->at[1]))[0];
  uint8_t a3_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *in3 = payload + place->at[2] + b * 256;
    in3 = unpack(in3, a3_[g], m, 2, 0);
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *restrict a3 = a3_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n4 = (float)a3[i];
      const float n5 = n2 * n4;
      const float n6 = n1 + n5;
      const float n7 = n6 + n5;
      const float n8 = n0 + n7;
      const float n9 = to_fp32(n8);
      values[i] = n9;
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
  float a8_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a8_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          a8_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const float n1 = ((const f32 *)(source + place->at[0]))[0];
        const float n2 = ((const f32 *)(source + place->at[1]))[0];
        uint8_t a3_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in3 = source + place->at[2] + b * 256;
        in3 = unpack(in3, a3_[g], m, 2, 0);
        const uint8_t *restrict a3 = a3_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n4 = (float)a3[i];
          const float n5 = n2 * n4;
          const float n6 = n1 + n5;
          const float n7 = n6 + n5;
          a8_[g][i] += n7;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a8 = a8_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n10 = a8[i] * factor;
      const float n11 = to_fp32(n10);
      values[i] = n11;
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
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  float a8_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a8_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          a8_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const float n1 = ((const f32 *)(source + place->at[0]))[0];
        const float n2 = ((const f32 *)(source + place->at[1]))[0];
        uint8_t a3_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in3 = source + place->at[2] + b * 256;
        in3 = unpack(in3, a3_[g], m, 2, 0);
        const uint8_t *restrict a3 = a3_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n4 = (float)a3[i];
          const float n5 = n2 * n4;
          const float n6 = n1 + n5;
          const float n7 = n6 + n5;
          a8_[g][i] += n7;
        }
      }
    }
  }
  int32_t least10_[GROUP];
  int32_t most10_[GROUP];
  uint32_t top10_[GROUP];
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a8 = a8_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
    int32_t least10 = INT32_MAX;
    int32_t most10 = INT32_MIN;
    uint32_t top10 = 0;
#pragma omp simd reduction(max : most10) reduction(max : top10)
    for (int i = 0; i < m; i++) {
      const float n10 = a8[i] * factor;
      most10 = (int32_t)bits_of(n10) > most10 ? (int32_t)bits_of(n10) : most10;
      top10 = (uint32_t)bits_of(n10) > top10 ? (uint32_t)bits_of(n10) : top10;
    }
    if (has_one_sign(most10, top10)) {
#pragma omp simd reduction(min : least10)
      for (int i = 0; i < m; i++) {
        const float n10 = a8[i] * factor;
        least10 = (int32_t)bits_of(n10) < least10 ? (int32_t)bits_of(n10) : least10;
      }
    }
    least10_[g] = least10;
    most10_[g] = most10;
    top10_[g] = top10;
  }
  float s11_[GROUP];
  float s14_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n11 = lowest(least10_[g], most10_[g], top10_[g]);
    s11_[g] = n11;
    const float n14 = highest(least10_[g], most10_[g], top10_[g]);
    s14_[g] = n14;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n11 = s11_[g];
    place->partials[0 * place->blocks + b] = n11;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n14 = s14_[g];
    place->partials[1 * place->blocks + b] = n14;
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
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_rest0(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

INLINE void reduce_encode_group1(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 4 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  const float n12 = place->partials[PARTIALS * place->blocks + 0];
  const float n13 = to_fp32(n12);
  const float n15 = place->partials[PARTIALS * place->blocks + 1];
  const float n17 = n15 * 0.5f;
  const float n18 = n13 * 0.5f;
  const float n19 = n17 - n18;
  const float n21 = n19 / 3.0f;
  const float n22 = to_fp32(n21);
  const float n26 = 1.0f / n22;
  const int n27 = is_finite(n26);
  const float n29 = n27 ? n26 : 0.0f;
  float a8_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a8_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          a8_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const float n1 = ((const f32 *)(source + place->at[0]))[0];
        const float n2 = ((const f32 *)(source + place->at[1]))[0];
        uint8_t a3_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in3 = source + place->at[2] + b * 256;
        in3 = unpack(in3, a3_[g], m, 2, 0);
        const uint8_t *restrict a3 = a3_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n4 = (float)a3[i];
          const float n5 = n2 * n4;
          const float n6 = n1 + n5;
          const float n7 = n6 + n5;
          a8_[g][i] += n7;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a8 = a8_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
    float a31[BLOCK] __attribute__((aligned(64)));
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
#pragma omp simd linear(stream0_weyl : WEYL)
    for (int i = 0; i < m; i++) {
      const float n31 = uniform(drawn(stream0, stream0_weyl));
      a31[i] = drawn(stream0, stream0_weyl);
      stream0_weyl += WEYL;
    }
    uint8_t c33[BLOCK + 8] __attribute__((aligned(64)));
    memset(c33 + m, 0, 8 * sizeof *c33);
    int32_t a33[BLOCK] __attribute__((aligned(64)));
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part33[PART] __attribute__((aligned(64)));
#pragma omp simd
      for (int i = from; i < to; i++) {
        const float n10 = a8[i] * factor;
        const float n23 = n10 * 0.5f;
        const float n24 = n23 - n18;
        const float n30 = n24 * n29;
        const float n32 = plus_uniform(n30, a31[i]);
        const int32_t n33 = to_uint(n32, limit0, limit1);
        CODE(c33, part33) = n33;
        a33[i] = n33;
      }
      NARROW(c33, part33);
    }
    uint8_t *out33 = payload + place->at[2] + b * 256;
    out33 = pack(out33, c33, m, 2, 0, 2);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n34 = (float)a33[i];
      const float n35 = n22 * n34;
      const float n36 = n13 + n35;
      const float n37 = n36 + n35;
      const float n38 = to_fp32(n37);
      values[i] = n38;
    }
  }
  if (b0 == 0) *(f32 *)(payload + place->at[0]) = (f32)n13;
  if (b0 == 0) *(f32 *)(payload + place->at[1]) = (f32)n22;
}

static __attribute__((noinline, noipa)) void reduce_encode_rest1(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_group1(call, place, b, count, m);
}

static void reduce_encode_sweep1(const Call *call, int thread, int threads) {
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
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_group1(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_rest1(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_rest1(call, &place, b, 1, (int)(row->numel - full * BLOCK));
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
#pragma omp barrier
    complete(0, minimum, &call, thread, of);
    complete(1, maximum, &call, thread, of);
#pragma omp barrier
    reduce_encode_sweep1(&call, thread, of);
  }
  return failed;
}

INLINE void reduce_encode_ef_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  float a10_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a10_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          const float n1 = residual[i];
          const float n2 = n0 + n1;
          a10_[g][i] += n2;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const float n3 = ((const f32 *)(source + place->at[0]))[0];
        const float n4 = ((const f32 *)(source + place->at[1]))[0];
        uint8_t a5_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in5 = source + place->at[2] + b * 256;
        in5 = unpack(in5, a5_[g], m, 2, 0);
        const uint8_t *restrict a5 = a5_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n6 = (float)a5[i];
          const float n7 = n4 * n6;
          const float n8 = n3 + n7;
          const float n9 = n8 + n7;
          a10_[g][i] += n9;
        }
      }
    }
  }
  int32_t least12_[GROUP];
  int32_t most12_[GROUP];
  uint32_t top12_[GROUP];
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a10 = a10_[g];
    int32_t least12 = INT32_MAX;
    int32_t most12 = INT32_MIN;
    uint32_t top12 = 0;
#pragma omp simd reduction(max : most12) reduction(max : top12)
    for (int i = 0; i < m; i++) {
      const float n12 = a10[i] * factor;
      most12 = (int32_t)bits_of(n12) > most12 ? (int32_t)bits_of(n12) : most12;
      top12 = (uint32_t)bits_of(n12) > top12 ? (uint32_t)bits_of(n12) : top12;
    }
    if (has_one_sign(most12, top12)) {
#pragma omp simd reduction(min : least12)
      for (int i = 0; i < m; i++) {
        const float n12 = a10[i] * factor;
        least12 = (int32_t)bits_of(n12) < least12 ? (int32_t)bits_of(n12) : least12;
      }
    }
    least12_[g] = least12;
    most12_[g] = most12;
    top12_[g] = top12;
  }
  float s13_[GROUP];
  float s16_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n13 = lowest(least12_[g], most12_[g], top12_[g]);
    s13_[g] = n13;
    const float n16 = highest(least12_[g], most12_[g], top12_[g]);
    s16_[g] = n16;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n13 = s13_[g];
    place->partials[0 * place->blocks + b] = n13;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n16 = s16_[g];
    place->partials[1 * place->blocks + b] = n16;
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
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_ef_rest0(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_ef_rest0(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_ef_rest0(call, &place, b, 1, (int)(row->numel - full * BLOCK));
    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

INLINE void reduce_encode_ef_group1(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 1 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(3.0f);
  const Stream stream0 = place->streams[0];
  const float n14 = place->partials[PARTIALS * place->blocks + 0];
  const float n15 = to_fp32(n14);
  const float n17 = place->partials[PARTIALS * place->blocks + 1];
  const float n19 = n17 * 0.5f;
  const float n20 = n15 * 0.5f;
  const float n21 = n19 - n20;
  const float n23 = n21 / 3.0f;
  const float n24 = to_fp32(n23);
  const float n28 = 1.0f / n24;
  const int n29 = is_finite(n28);
  const float n31 = n29 ? n28 : 0.0f;
  float a10_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a10_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          const float n1 = residual[i];
          const float n2 = n0 + n1;
          a10_[g][i] += n2;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const float n3 = ((const f32 *)(source + place->at[0]))[0];
        const float n4 = ((const f32 *)(source + place->at[1]))[0];
        uint8_t a5_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in5 = source + place->at[2] + b * 256;
        in5 = unpack(in5, a5_[g], m, 2, 0);
        const uint8_t *restrict a5 = a5_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n6 = (float)a5[i];
          const float n7 = n4 * n6;
          const float n8 = n3 + n7;
          const float n9 = n8 + n7;
          a10_[g][i] += n9;
        }
      }
    }
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a10 = a10_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    uint8_t c35[BLOCK + 8] __attribute__((aligned(64)));
    memset(c35 + m, 0, 8 * sizeof *c35);
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part35[PART] __attribute__((aligned(64)));
#pragma omp simd linear(stream0_weyl : WEYL)
      for (int i = from; i < to; i++) {
        const float n12 = a10[i] * factor;
        const float n25 = n12 * 0.5f;
        const float n26 = n25 - n20;
        const float n32 = n26 * n31;
        const float n33 = uniform(drawn(stream0, stream0_weyl));
        const float n34 = plus_uniform(n32, drawn(stream0, stream0_weyl));
        const int32_t n35 = to_uint(n34, limit0, limit1);
        const float n36 = (float)n35;
        const float n37 = n24 * n36;
        const float n38 = n15 + n37;
        const float n39 = n38 + n37;
        const float n40 = to_fp32(n39);
        const float n41 = n12 - n39;
        const float n42 = n41 / factor;
        const int n43 = is_finite(n42);
        const float n1 = residual[i];
        const float n44 = n43 ? n42 : n1;
        CODE(c35, part35) = n35;
        values[i] = n40;
        residual[i] = n44;
        stream0_weyl += WEYL;
      }
      NARROW(c35, part35);
    }
    uint8_t *out35 = payload + place->at[2] + b * 256;
    out35 = pack(out35, c35, m, 2, 0, 2);
  }
  if (b0 == 0) *(f32 *)(payload + place->at[0]) = (f32)n15;
  if (b0 == 0) *(f32 *)(payload + place->at[1]) = (f32)n24;
}

static __attribute__((noinline, noipa)) void reduce_encode_ef_rest1(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_ef_group1(call, place, b, count, m);
}

static void reduce_encode_ef_sweep1(const Call *call, int thread, int threads) {
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
      for (; b + GROUP <= stop; b += GROUP) reduce_encode_ef_group1(call, &place, b, GROUP, BLOCK);
      if (b < stop) reduce_encode_ef_rest1(call, &place, b, (int)(stop - b), BLOCK), b = stop;
      if (b < end) reduce_encode_ef_rest1(call, &place, b, 1, (int)(row->numel - full * BLOCK));
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
#pragma omp barrier
    complete(0, minimum, &call, thread, of);
    complete(1, maximum, &call, thread, of);
#pragma omp barrier
    reduce_encode_ef_sweep1(&call, thread, of);
  }
  return failed;
}

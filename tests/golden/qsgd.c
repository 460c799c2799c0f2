enum { BLOCK = 128, PARTIALS = 0 };

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
  p.at[0] = at, at += p.blocks * 2;  /* low */
  p.at[1] = at, at += p.blocks * 2;  /* half */
  p.at[2] = at, at += full * 64 + (rest * 4 + 7) / 8;  /* code */
  p.at[3] = at;
  p.streams[0] = stream(row->key, 0u);
  return p;
}

/* The part of the workspace that belongs to a row. */
INLINE int64_t floats_of(int64_t numel) {
  return (blocks_of(numel, BLOCK) + 1) * PARTIALS;
}

INLINE void encode_group0(const Call *call, const Place *place, int64_t b0, const int count, const int m) {
  enum { GROUP = 32 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(15.0f);
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
  uint32_t s2_[GROUP];
  float s3_[GROUP];
  float s5_[GROUP];
  float s6_[GROUP];
  float s7_[GROUP];
  float s8_[GROUP];
  float s10_[GROUP];
  uint32_t s11_[GROUP];
  float s15_[GROUP];
  float s16_[GROUP];
  int s17_[GROUP];
  float s19_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n1 = lowest(least0_[g], most0_[g], top0_[g]);
    s1_[g] = n1;
    const uint32_t n2 = to_bf16_down(n1);
    s2_[g] = n2;
    const float n3 = highest(least0_[g], most0_[g], top0_[g]);
    s3_[g] = n3;
    const float n5 = n3 * 0.5f;
    s5_[g] = n5;
    const float n6 = from_bf16(n2);
    s6_[g] = n6;
    const float n7 = n6 * 0.5f;
    s7_[g] = n7;
    const float n8 = n5 - n7;
    s8_[g] = n8;
    const float n10 = n8 / 15.0f;
    s10_[g] = n10;
    const uint32_t n11 = to_bf16_up(n10);
    s11_[g] = n11;
    const float n15 = from_bf16(n11);
    s15_[g] = n15;
    const float n16 = 1.0f / n15;
    s16_[g] = n16;
    const int n17 = is_finite(n16);
    s17_[g] = n17;
    const float n19 = n17 ? n16 : 0.0f;
    s19_[g] = n19;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n7 = s7_[g];
    const float n19 = s19_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP + GROUP / 4) * BLOCK, m);
    uint8_t c23[BLOCK + 8] __attribute__((aligned(64)));
    memset(c23 + m, 0, 8 * sizeof *c23);
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part23[PART] __attribute__((aligned(64)));
#pragma omp simd linear(stream0_weyl : WEYL)
      for (int i = from; i < to; i++) {
        const float n0 = values[i];
        const float n12 = n0 * 0.5f;
        const float n13 = n12 - n7;
        const float n20 = n13 * n19;
        const float n21 = uniform(drawn(stream0, stream0_weyl));
        const float n22 = plus_uniform(n20, drawn(stream0, stream0_weyl));
        const int32_t n23 = to_code(n22, limit0, limit1);
        CODE(c23, part23) = n23;
        stream0_weyl += WEYL;
      }
      NARROW(c23, part23);
    }
    uint8_t *out23 = payload + place->at[2] + b * 64;
    out23 = pack(out23, c23, m, 4, 0, 4);
  }
  u16 *restrict at0 = (u16 *)(payload + place->at[0]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n2 = s2_[g];
    at0[g] = (u16)n2;
  }
  u16 *restrict at1 = (u16 *)(payload + place->at[1]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n11 = s11_[g];
    at1[g] = (u16)n11;
  }
}

static __attribute__((noinline, noipa)) void encode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_group0(call, place, b, count, m);
}

static void encode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 32 };
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
  enum { GROUP = 8 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(15.0f);
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
  uint32_t s4_[GROUP];
  float s5_[GROUP];
  float s7_[GROUP];
  float s8_[GROUP];
  float s9_[GROUP];
  float s10_[GROUP];
  float s12_[GROUP];
  uint32_t s13_[GROUP];
  float s17_[GROUP];
  float s18_[GROUP];
  int s19_[GROUP];
  float s21_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n3 = lowest(least2_[g], most2_[g], top2_[g]);
    s3_[g] = n3;
    const uint32_t n4 = to_bf16_down(n3);
    s4_[g] = n4;
    const float n5 = highest(least2_[g], most2_[g], top2_[g]);
    s5_[g] = n5;
    const float n7 = n5 * 0.5f;
    s7_[g] = n7;
    const float n8 = from_bf16(n4);
    s8_[g] = n8;
    const float n9 = n8 * 0.5f;
    s9_[g] = n9;
    const float n10 = n7 - n9;
    s10_[g] = n10;
    const float n12 = n10 / 15.0f;
    s12_[g] = n12;
    const uint32_t n13 = to_bf16_up(n12);
    s13_[g] = n13;
    const float n17 = from_bf16(n13);
    s17_[g] = n17;
    const float n18 = 1.0f / n17;
    s18_[g] = n18;
    const int n19 = is_finite(n18);
    s19_[g] = n19;
    const float n21 = n19 ? n18 : 0.0f;
    s21_[g] = n21;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n9 = s9_[g];
    const float n21 = s21_[g];
    const float n17 = s17_[g];
    const float n8 = s8_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(residual + (GROUP + GROUP / 4) * BLOCK, m);
    PREFETCH(values + (GROUP + GROUP / 4) * BLOCK, m);
    float a23[BLOCK] __attribute__((aligned(64)));
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
#pragma omp simd linear(stream0_weyl : WEYL)
    for (int i = 0; i < m; i++) {
      const float n23 = uniform(drawn(stream0, stream0_weyl));
      a23[i] = drawn(stream0, stream0_weyl);
      stream0_weyl += WEYL;
    }
    uint8_t c25[BLOCK + 8] __attribute__((aligned(64)));
    memset(c25 + m, 0, 8 * sizeof *c25);
    int32_t a25[BLOCK] __attribute__((aligned(64)));
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part25[PART] __attribute__((aligned(64)));
#pragma omp simd
      for (int i = from; i < to; i++) {
        const float n0 = values[i];
        const float n1 = residual[i];
        const float n2 = n0 + n1;
        const float n14 = n2 * 0.5f;
        const float n15 = n14 - n9;
        const float n22 = n15 * n21;
        const float n24 = plus_uniform(n22, a23[i]);
        const int32_t n25 = to_uint(n24, limit0, limit1);
        CODE(c25, part25) = n25;
        a25[i] = n25;
      }
      NARROW(c25, part25);
    }
    uint8_t *out25 = payload + place->at[2] + b * 64;
    out25 = pack(out25, c25, m, 4, 0, 4);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n1 = residual[i];
      const float n2 = n0 + n1;
      const float n26 = (float)a25[i];
      const float n27 = n17 * n26;
      const float n28 = n8 + n27;
      const float n29 = n28 + n27;
      const float n30 = n2 - n29;
      const int n31 = is_finite(n30);
      const float n32 = n31 ? n30 : n1;
      residual[i] = n32;
    }
  }
  u16 *restrict at0 = (u16 *)(payload + place->at[0]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n4 = s4_[g];
    at0[g] = (u16)n4;
  }
  u16 *restrict at1 = (u16 *)(payload + place->at[1]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n13 = s13_[g];
    at1[g] = (u16)n13;
  }
}

static __attribute__((noinline, noipa)) void encode_ef_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  encode_ef_group0(call, place, b, count, m);
}

static void encode_ef_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 8 };
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
  enum { GROUP = 32 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  uint32_t s0_[GROUP];
  float s1_[GROUP];
  uint32_t s2_[GROUP];
  float s3_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n0 = ((const u16 *)(payload + place->at[0]))[b];
    s0_[g] = n0;
    const float n1 = from_bf16(n0);
    s1_[g] = n1;
    const uint32_t n2 = ((const u16 *)(payload + place->at[1]))[b];
    s2_[g] = n2;
    const float n3 = from_bf16(n2);
    s3_[g] = n3;
  }
  uint8_t a4_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *in4 = payload + place->at[2] + b * 64;
    in4 = unpack(in4, a4_[g], m, 4, 0);
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n3 = s3_[g];
    const float n1 = s1_[g];
    const uint8_t *restrict a4 = a4_[g];
    float *restrict to = (float *)place->row->values + b * BLOCK;
    float fresh[BLOCK] __attribute__((aligned(64)));
    float *restrict values = call->large ? fresh : to;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n5 = (float)a4[i];
      const float n6 = n3 * n5;
      const float n7 = n1 + n6;
      const float n8 = n7 + n6;
      const float n10 = n8 * factor;
      const float n11 = to_fp32(n10);
      values[i] = n11;
    }
    if (call->large) past_cache(to, fresh, m * sizeof *to);
  }
}

static __attribute__((noinline, noipa)) void decode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_group0(call, place, b, count, m);
}

static void decode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 32 };
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
  enum { GROUP = 32 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  uint32_t s1_[GROUP];
  float s2_[GROUP];
  uint32_t s3_[GROUP];
  float s4_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n1 = ((const u16 *)(payload + place->at[0]))[b];
    s1_[g] = n1;
    const float n2 = from_bf16(n1);
    s2_[g] = n2;
    const uint32_t n3 = ((const u16 *)(payload + place->at[1]))[b];
    s3_[g] = n3;
    const float n4 = from_bf16(n3);
    s4_[g] = n4;
  }
  uint8_t a5_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint8_t *in5 = payload + place->at[2] + b * 64;
    in5 = unpack(in5, a5_[g], m, 4, 0);
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n4 = s4_[g];
    const float n2 = s2_[g];
    const uint8_t *restrict a5 = a5_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n0 = values[i];
      const float n6 = (float)a5[i];
      const float n7 = n4 * n6;
      const float n8 = n2 + n7;
      const float n9 = n8 + n7;
      const float n10 = n0 + n9;
      const float n11 = to_fp32(n10);
      values[i] = n11;
    }
  }
}

static __attribute__((noinline, noipa)) void decode_add_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_add_group0(call, place, b, count, m);
}

static void decode_add_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 32 };
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
  enum { GROUP = 32 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
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
          a10_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const uint32_t n1 = ((const u16 *)(source + place->at[0]))[b];
        const float n2 = from_bf16(n1);
        const uint32_t n3 = ((const u16 *)(source + place->at[1]))[b];
        const float n4 = from_bf16(n3);
        uint8_t a5_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in5 = source + place->at[2] + b * 64;
        in5 = unpack(in5, a5_[g], m, 4, 0);
        const uint8_t *restrict a5 = a5_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n6 = (float)a5[i];
          const float n7 = n4 * n6;
          const float n8 = n2 + n7;
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
    PREFETCH(values + (GROUP) * BLOCK, m);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n12 = a10[i] * factor;
      const float n13 = to_fp32(n12);
      values[i] = n13;
    }
  }
}

static __attribute__((noinline, noipa)) void decode_sum_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  decode_sum_group0(call, place, b, count, m);
}

static void decode_sum_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 32 };
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
  enum { GROUP = 32 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(15.0f);
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
          a10_[g][i] += n0;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const uint32_t n1 = ((const u16 *)(source + place->at[0]))[b];
        const float n2 = from_bf16(n1);
        const uint32_t n3 = ((const u16 *)(source + place->at[1]))[b];
        const float n4 = from_bf16(n3);
        uint8_t a5_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in5 = source + place->at[2] + b * 64;
        in5 = unpack(in5, a5_[g], m, 4, 0);
        const uint8_t *restrict a5 = a5_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n6 = (float)a5[i];
          const float n7 = n4 * n6;
          const float n8 = n2 + n7;
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
  uint32_t s14_[GROUP];
  float s15_[GROUP];
  float s17_[GROUP];
  float s18_[GROUP];
  float s19_[GROUP];
  float s20_[GROUP];
  float s22_[GROUP];
  uint32_t s23_[GROUP];
  float s27_[GROUP];
  float s28_[GROUP];
  int s29_[GROUP];
  float s31_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n13 = lowest(least12_[g], most12_[g], top12_[g]);
    s13_[g] = n13;
    const uint32_t n14 = to_bf16_down(n13);
    s14_[g] = n14;
    const float n15 = highest(least12_[g], most12_[g], top12_[g]);
    s15_[g] = n15;
    const float n17 = n15 * 0.5f;
    s17_[g] = n17;
    const float n18 = from_bf16(n14);
    s18_[g] = n18;
    const float n19 = n18 * 0.5f;
    s19_[g] = n19;
    const float n20 = n17 - n19;
    s20_[g] = n20;
    const float n22 = n20 / 15.0f;
    s22_[g] = n22;
    const uint32_t n23 = to_bf16_up(n22);
    s23_[g] = n23;
    const float n27 = from_bf16(n23);
    s27_[g] = n27;
    const float n28 = 1.0f / n27;
    s28_[g] = n28;
    const int n29 = is_finite(n28);
    s29_[g] = n29;
    const float n31 = n29 ? n28 : 0.0f;
    s31_[g] = n31;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n19 = s19_[g];
    const float n31 = s31_[g];
    const float n27 = s27_[g];
    const float n18 = s18_[g];
    const float *restrict a10 = a10_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(values + (GROUP) * BLOCK, m);
    float a33[BLOCK] __attribute__((aligned(64)));
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
#pragma omp simd linear(stream0_weyl : WEYL)
    for (int i = 0; i < m; i++) {
      const float n33 = uniform(drawn(stream0, stream0_weyl));
      a33[i] = drawn(stream0, stream0_weyl);
      stream0_weyl += WEYL;
    }
    uint8_t c35[BLOCK + 8] __attribute__((aligned(64)));
    memset(c35 + m, 0, 8 * sizeof *c35);
    int32_t a35[BLOCK] __attribute__((aligned(64)));
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part35[PART] __attribute__((aligned(64)));
#pragma omp simd
      for (int i = from; i < to; i++) {
        const float n12 = a10[i] * factor;
        const float n24 = n12 * 0.5f;
        const float n25 = n24 - n19;
        const float n32 = n25 * n31;
        const float n34 = plus_uniform(n32, a33[i]);
        const int32_t n35 = to_uint(n34, limit0, limit1);
        CODE(c35, part35) = n35;
        a35[i] = n35;
      }
      NARROW(c35, part35);
    }
    uint8_t *out35 = payload + place->at[2] + b * 64;
    out35 = pack(out35, c35, m, 4, 0, 4);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n36 = (float)a35[i];
      const float n37 = n27 * n36;
      const float n38 = n18 + n37;
      const float n39 = n38 + n37;
      const float n40 = to_fp32(n39);
      values[i] = n40;
    }
  }
  u16 *restrict at0 = (u16 *)(payload + place->at[0]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n14 = s14_[g];
    at0[g] = (u16)n14;
  }
  u16 *restrict at1 = (u16 *)(payload + place->at[1]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n23 = s23_[g];
    at1[g] = (u16)n23;
  }
}

static __attribute__((noinline, noipa)) void reduce_encode_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_group0(call, place, b, count, m);
}

static void reduce_encode_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 32 };
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
  enum { GROUP = 8 };
  uint8_t *restrict payload = place->row->payload;
  const float factor = call->factor;
  const float limit0 = limit(0.0f);
  const float limit1 = limit(15.0f);
  const Stream stream0 = place->streams[0];
  float a12_[GROUP][BLOCK] __attribute__((aligned(64)));
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    for (int i = 0; i < m; i++) a12_[g][i] = -0.0f;
    for (int k = 0; k < call->ranks; k++) {
      if (k == call->rank) {
        float *restrict values = (float *)place->row->values + b * BLOCK;
        float *restrict residual = place->row->residual + b * BLOCK;
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n0 = values[i];
          const float n1 = residual[i];
          const float n2 = n0 + n1;
          a12_[g][i] += n2;
        }
      }
      else {
        const int own_before = 0 <= call->rank && call->rank < k;
        const uint8_t *source = place->row->source + call->distances[k - own_before];
        const uint32_t n3 = ((const u16 *)(source + place->at[0]))[b];
        const float n4 = from_bf16(n3);
        const uint32_t n5 = ((const u16 *)(source + place->at[1]))[b];
        const float n6 = from_bf16(n5);
        uint8_t a7_[GROUP][BLOCK + 64] __attribute__((aligned(64)));
        const uint8_t *in7 = source + place->at[2] + b * 64;
        in7 = unpack(in7, a7_[g], m, 4, 0);
        const uint8_t *restrict a7 = a7_[g];
#pragma omp simd
        for (int i = 0; i < m; i++) {
          const float n8 = (float)a7[i];
          const float n9 = n6 * n8;
          const float n10 = n4 + n9;
          const float n11 = n10 + n9;
          a12_[g][i] += n11;
        }
      }
    }
  }
  int32_t least14_[GROUP];
  int32_t most14_[GROUP];
  uint32_t top14_[GROUP];
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float *restrict a12 = a12_[g];
    int32_t least14 = INT32_MAX;
    int32_t most14 = INT32_MIN;
    uint32_t top14 = 0;
#pragma omp simd reduction(max : most14) reduction(max : top14)
    for (int i = 0; i < m; i++) {
      const float n14 = a12[i] * factor;
      most14 = (int32_t)bits_of(n14) > most14 ? (int32_t)bits_of(n14) : most14;
      top14 = (uint32_t)bits_of(n14) > top14 ? (uint32_t)bits_of(n14) : top14;
    }
    if (has_one_sign(most14, top14)) {
#pragma omp simd reduction(min : least14)
      for (int i = 0; i < m; i++) {
        const float n14 = a12[i] * factor;
        least14 = (int32_t)bits_of(n14) < least14 ? (int32_t)bits_of(n14) : least14;
      }
    }
    least14_[g] = least14;
    most14_[g] = most14;
    top14_[g] = top14;
  }
  float s15_[GROUP];
  uint32_t s16_[GROUP];
  float s17_[GROUP];
  float s19_[GROUP];
  float s20_[GROUP];
  float s21_[GROUP];
  float s22_[GROUP];
  float s24_[GROUP];
  uint32_t s25_[GROUP];
  float s29_[GROUP];
  float s30_[GROUP];
  int s31_[GROUP];
  float s33_[GROUP];
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n15 = lowest(least14_[g], most14_[g], top14_[g]);
    s15_[g] = n15;
    const uint32_t n16 = to_bf16_down(n15);
    s16_[g] = n16;
    const float n17 = highest(least14_[g], most14_[g], top14_[g]);
    s17_[g] = n17;
    const float n19 = n17 * 0.5f;
    s19_[g] = n19;
    const float n20 = from_bf16(n16);
    s20_[g] = n20;
    const float n21 = n20 * 0.5f;
    s21_[g] = n21;
    const float n22 = n19 - n21;
    s22_[g] = n22;
    const float n24 = n22 / 15.0f;
    s24_[g] = n24;
    const uint32_t n25 = to_bf16_up(n24);
    s25_[g] = n25;
    const float n29 = from_bf16(n25);
    s29_[g] = n29;
    const float n30 = 1.0f / n29;
    s30_[g] = n30;
    const int n31 = is_finite(n30);
    s31_[g] = n31;
    const float n33 = n31 ? n30 : 0.0f;
    s33_[g] = n33;
  }
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const float n21 = s21_[g];
    const float n33 = s33_[g];
    const float n29 = s29_[g];
    const float n20 = s20_[g];
    const float *restrict a12 = a12_[g];
    float *restrict values = (float *)place->row->values + b * BLOCK;
    float *restrict residual = place->row->residual + b * BLOCK;
    PREFETCH(residual + (GROUP) * BLOCK, m);
    PREFETCH(values + (GROUP) * BLOCK, m);
    float a35[BLOCK] __attribute__((aligned(64)));
    uint32_t stream0_weyl = (first + stream0.low) * WEYL;
#pragma omp simd linear(stream0_weyl : WEYL)
    for (int i = 0; i < m; i++) {
      const float n35 = uniform(drawn(stream0, stream0_weyl));
      a35[i] = drawn(stream0, stream0_weyl);
      stream0_weyl += WEYL;
    }
    uint8_t c37[BLOCK + 8] __attribute__((aligned(64)));
    memset(c37 + m, 0, 8 * sizeof *c37);
    int32_t a37[BLOCK] __attribute__((aligned(64)));
    for (int from = 0; from < m; from += STEP) {
      const int to = m == BLOCK || m - from > STEP ? from + STEP : m;
      Code part37[PART] __attribute__((aligned(64)));
#pragma omp simd
      for (int i = from; i < to; i++) {
        const float n14 = a12[i] * factor;
        const float n26 = n14 * 0.5f;
        const float n27 = n26 - n21;
        const float n34 = n27 * n33;
        const float n36 = plus_uniform(n34, a35[i]);
        const int32_t n37 = to_uint(n36, limit0, limit1);
        CODE(c37, part37) = n37;
        a37[i] = n37;
      }
      NARROW(c37, part37);
    }
    uint8_t *out37 = payload + place->at[2] + b * 64;
    out37 = pack(out37, c37, m, 4, 0, 4);
#pragma omp simd
    for (int i = 0; i < m; i++) {
      const float n38 = (float)a37[i];
      const float n39 = n29 * n38;
      const float n40 = n20 + n39;
      const float n41 = n40 + n39;
      const float n42 = to_fp32(n41);
      const float n14 = a12[i] * factor;
      const float n43 = n14 - n41;
      const float n44 = n43 / factor;
      const int n45 = is_finite(n44);
      const float n1 = residual[i];
      const float n46 = n45 ? n44 : n1;
      values[i] = n42;
      residual[i] = n46;
    }
  }
  u16 *restrict at0 = (u16 *)(payload + place->at[0]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n16 = s16_[g];
    at0[g] = (u16)n16;
  }
  u16 *restrict at1 = (u16 *)(payload + place->at[1]) + b0;
#pragma omp simd
  for (int g = 0; g < count; g++) {
    const int64_t b = b0 + g;
    const uint32_t first = (uint32_t)(place->row->start + b * BLOCK);
    const uint32_t n25 = s25_[g];
    at1[g] = (u16)n25;
  }
}

static __attribute__((noinline, noipa)) void reduce_encode_ef_rest0(
    const Call *call, const Place *place, int64_t b, int count, int m) {
  reduce_encode_ef_group0(call, place, b, count, m);
}

static void reduce_encode_ef_sweep0(const Call *call, int thread, int threads) {
  enum { GROUP = 8 };
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

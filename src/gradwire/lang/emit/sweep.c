static void ${form}_sweep${number}(const Call *call, int thread, int threads) {
  ${size}
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
$walk    }
    seen += blocks;
    partials += floats_of(row->numel);
  }
}

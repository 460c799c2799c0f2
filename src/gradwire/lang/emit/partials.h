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

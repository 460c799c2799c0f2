static void ${form}_finish(const Call *call, const Place *place, Staging *staged, int n) {
  finish(call, place, staged, n, ${counted}, ${gathered}, $ranked, ${form}_run);
}

static void ${form}_sweep${number}(const Call *call, int thread, int threads) {
  ${size}
  float *partials = call->workspace;
  for (int64_t r = 0; r < call->n; r++) {
    const Row *row = &call->rows[r];
    const int64_t blocks = blocks_of(row->numel, BLOCK), full = row->numel / BLOCK;
    const int alone = row->numel <= SINGLE_THREAD, mine = r % threads == thread;
    if (blocks && (mine || !alone)) {
      Place place = place_of(row, partials);
      Staging *staging = place.staging = &call->staging[thread];
      const int64_t from = alone ? 0 : blocks * thread / threads;
      const int64_t end = alone ? blocks : blocks * (thread + 1) / threads;
      uint32_t floor = ${floor};
      for (int again = 1; again; floor = 0) {
        begin(staging, capacity_of(row->numel), floor);
        int64_t b = from;
$walk        again = floor && fell_short(call, threads);
      }
$stores      if (alone) ${form}_finish(call, &place, staging, 1);
    }
    if (blocks && !alone) {
#pragma omp barrier
      if (mine) {
        const Place place = place_of(row, partials);
        ${form}_finish(call, &place, call->staging, threads);
      }
#pragma omp barrier
    }
    partials += floats_of(row->numel);
  }
}

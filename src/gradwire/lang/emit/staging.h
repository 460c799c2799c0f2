/* Payloads whose length depends on data, and the staged entries of a row: how threads share the
   workspace, from which key on entries are staged, and how a selection is stored. Text that follows
   the codec's struct Place. */

enum { FIELDS = sizeof((Place *)0)->at / sizeof(int64_t) - 1 };

/* Zero the parts of payloads whose length depends on data, before they are written. */
static void clear(const Call *call, int thread, int threads) {
  for (int64_t r = 0; r < call->n; r++) {
    const Row *row = &call->rows[r];
    if (r % threads != thread || row->numel == 0) continue;
    const Place place = place_of(row, 0);
    memset(row->payload + place.at[FIELDS], 0, tails_of(&place));
  }
}

enum { SINGLE_THREAD = 1 << 16 }; /* values of a row that one thread selects from, without a barrier */

/* Divide the workspace among threads, with the sizes of layout.py. */
static void divide(Call *call, Staging *staging, int threads) {
  int64_t floats = 0, largest = 0;
  for (int64_t r = 0; r < call->n; r++) {
    const int64_t numel = call->rows[r].numel;
    floats += floats_of(numel);
    largest = numel > largest ? numel : largest;
  }
  uint32_t *at = (uint32_t *)call->workspace + floats;
  const int64_t room = 2 * capacity_of(largest) + BLOCK + RUN;
  for (int t = 0; t < threads; t++)
    staging[t] = (Staging){.room = room, .numbers = at + t * STAGED * room};
  call->staging = staging;
}

/* A sample has a random element of every window of `every`: an order of the elements misleads it
   only if it is made from these positions. It lies where entries are staged afterwards. */
enum { SAMPLE = 1 << 15 };
INLINE int64_t sample_every(const Place *place) {
  const int64_t room = STAGED * place->staging->room;
  return blocks_of(place->row->numel, room < SAMPLE ? room : SAMPLE);
}
INLINE int64_t sampled_at(const Place *place, int64_t window, int64_t every) {
  const Stream s = stream(0, 0);
  const float u = uniform(drawn(s, ((uint32_t)window + s.low) * WEYL));
  const int64_t at = window * every + (int64_t)(u * (float)every), last = place->row->numel - 1;
  return at < last ? at : last;
}

/* The key below all that should be staged: k and eight standard deviations of a sample's count more
   exceed it. It changes the time that a selection takes, and nothing else: see `fell_short`. */
static uint32_t floor_of(const Place *place, int64_t windows) {
  const double most = capacity_of(place->row->numel);
  const double share = most / (double)place->row->numel * (double)windows;
  const int64_t rank = (int64_t)(share + 8 * sqrt(share) + 8);
  const Keys keys = {place->staging->numbers, windows};
  const uint32_t key = rank < windows ? cut_of(&keys, 1, rank).key : 0;
  return key ? key - 1 : 0;
}

/* Whether all threads together have staged fewer than a selection takes, from a floor: then some that
   lie below it may belong to the selection. All threads agree. */
static int fell_short(const Call *call, int threads) {
  int64_t total = 0;
#pragma omp barrier
  for (int t = 0; t < threads; t++) total += call->staging[t].count;
  const int fell = total < call->staging->most;
#pragma omp barrier
  return fell;
}

/* Store what is selected of the entries that n threads have staged, `gathered` numbers each, run by
   run; `counts` is the number of the field of positions. */
typedef void StoreRun(const Call *, const Place *, const Run *, int64_t, int, int64_t);
INLINE void finish(
    const Call *call, const Place *place, Staging *staged, int n, const int counted,
    const int gathered, const int ranked, StoreRun *store) {
  Run run;
  uint8_t *payload = place->row->payload;
  u16 *counts = (u16 *)(payload + place->at[counted]);
  memset(counts, 0, place->blocks * sizeof *counts);
  memset(payload + place->at[FIELDS], 0, tails_of(place));
  Pick pick = pick_of(staged, n, ranked);
  const int64_t entries = pick.entries;
  int64_t done = 0;
  int m = 0;
  for (int t = 0; t < n; t++)
    for (int64_t e = 0; e < staged[t].count; e++) {
      if (!picked(&pick, column(&staged[t], 1)[e])) continue;
      run.index[m] = column(&staged[t], 0)[e];
      counts[run.index[m] / BLOCK]++;
      for (int c = 0; c < gathered; c++)
        run.gathered[c][m] = float_of(column(&staged[t], 2 + c)[e]);
      if (++m == RUN) store(call, place, &run, done, RUN, entries), done += RUN, m = 0;
    }
  if (m) store(call, place, &run, done, m, entries);
}

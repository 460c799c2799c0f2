/* Progress on the rings of shm_ring.c, and waiting: the functions that Python calls.
 *
 * There is no progress thread. Every thread that sends, receives or waits moves whatever can be
 * moved, on all links. A waiter whose operation has not ended spins for some microseconds and then
 * sleeps on its rank's bell, which peers ring after every change that its threads may wait for, and
 * which the rank's own threads ring when they have ended another thread's operation. So a rank moves
 * bytes while at least one of its threads waits; `shm_drive` provides a thread for ranks whose
 * threads may all wait for something else.
 *
 * After a spin in vain, because the peer is busy or needs our core, the next waits sleep at once. A
 * sleep lasts at most SHM_SLICE_NS; then the waiter checks that its peers are alive.
 */

enum { OK, TIMEOUT, DEAD, FAILED, GONE, CORRUPT, STOPPED, INTERRUPTED }; /* what a wait returns */

#ifndef SHM_SLICE_NS /* tests use a longer one */
#define SHM_SLICE_NS 100000000
#endif

enum {
    TIRED = 8,       /* how many waits do not spin after one that has spun in vain */
    LENT = 1 << 18,  /* least bytes of a message that is copied from the sender's store */
    LINGER_NS = 200000000, /* how long closing waits for loans: the time of some kernels */
    POPULATE_WRITE = 23, /* MADV_POPULATE_WRITE, which older headers lack */
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined __x86_64__
    for (int i = 0; i < 8; i++) __builtin_ia32_pause();
#elif defined __aarch64__
    for (int i = 0; i < 8; i++) __asm__ volatile("yield");
#endif
}

static int enter(struct shm *s) {
    atomic_fetch_add(&s->users, 1);
    if (!s->stopped) return 1;
    atomic_fetch_sub(&s->users, 1);
    return 0;
}

static void leave(struct shm *s) { atomic_fetch_sub(&s->users, 1); }

/* Wake our own threads because operations have ended, if any sleeps but the `counted` caller. */
static void tell_own(struct shm *s, int counted) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&s->sleepers) > counted) ring_bell(s->near);
}

static int has_room(struct shm *s, struct ring *r) {
    return s->ring_bytes - (look(&r->head) - look(&r->tail)) >= UNIT;
}

static int can_announce(struct link *l) {
    return look(&l->in->posted) - look(&l->in->taken) < POSTS;
}

static int can_receive(struct link *l) {
    if (!l->in || l->corrupt) return 0;
    return look(&l->in->head) != look(&l->in->tail) || (l->unannounced && can_announce(l));
}

static int can_transmit(struct shm *s, struct link *l) {
    if (!l->out || l->corrupt) return 0;
    return is_told(l) || (l->sends && has_room(s, l->out));
}

/* Whether one of our operations can progress. Announcements for later sends may wait. */
static int can_move(struct shm *s) {
    for (struct link *l = s->link; l < s->link + s->links; l++)
        if (can_receive(l) || ((l->sends || l->expects) && can_transmit(s, l))) return 1;
    return 0;
}

/* Before a sleep: make the peers ring once what they stop can continue. */
static void raise_flags(struct shm *s) {
    for (struct link *l = s->link; l < s->link + s->links; l++) {
        if (!l->in || l->corrupt) continue;
        if (l->unannounced && !can_announce(l)) atomic_store(&l->in->behind, 1);
        if (l->sends && !has_room(s, l->out)) atomic_store(&l->out->full, 1);
        if (l->expects && !is_told(l)) atomic_store(&l->out->starved, 1);
    }
}

/* Leave what can still be moved to our sleeping threads. And wake peers that wait for room: they may
 * have enough to end their sends, though less than half a ring, for which `receive` wakes them. */
static void hand_over(struct shm *s, int counted) {
    if (can_move(s)) tell_own(s, counted);
    for (struct link *l = s->link; l < s->link + s->links; l++)
        if (l->in && !l->corrupt && has_room(s, l->in)) answer(&l->in->full, l->far);
}

/* Move bytes until nothing can be moved, or `mine` has ended. */
static void progress(struct shm *s, struct op *mine, int counted) {
    int moved, ended = 0;
    do {
        moved = 0;
        for (struct link *l = s->link; l < s->link + s->links; l++) {
            if (can_receive(l)) {
                pthread_mutex_lock(&l->rx);
                ended += receive(s, l, mine);
                pthread_mutex_unlock(&l->rx);
                moved = 1;
            }
            if (can_transmit(s, l)) {
                pthread_mutex_lock(&l->tx);
                ended += transmit(s, l, mine);
                pthread_mutex_unlock(&l->tx);
                moved = 1;
            }
        }
    } while (moved && !(mine && mine->done));
    if (ended) tell_own(s, counted);
    if (moved) hand_over(s, counted);
}

/* Mark the peers whose processes have ended; one thread at a time, at most once per slice. */
static void check_alive(struct shm *s, int64_t now) {
    if (now - s->checked < SHM_SLICE_NS || atomic_exchange(&s->checking, 1)) return;
    s->checked = now;
    for (struct link *l = s->link; l < s->link + s->links; l++) {
        struct pollfd p = {l->alive_fd, POLLIN, 0};
        if (l->out && !l->dead && poll(&p, 1, 0) > 0) l->dead = 1;
    }
    s->checking = 0;
}

static int trouble(struct link *l) {
    if (l->corrupt) return CORRUPT;
    if (l->far->blamed) return FAILED;
    if (l->far->closed) return GONE;
    return l->dead ? DEAD : OK;
}

/* Whether a thread that has slept for its whole slice should have been woken: something can be done,
 * and none of our threads does it. */
static int has_overslept(struct shm *s, struct op *op) {
    return s->users == s->sleepers && ((op && op->done) || can_move(s));
}

/* Wait until `op` has ended, the link failed, `deadline` passed, or we were stopped. */
static int wait_for(struct shm *s, struct op *op, int64_t begun, int64_t deadline) {
    int64_t now = begun;
    /* Do not spin for the end of a loan: it takes as long as a kernel. */
    const int keen = op && (op->borrows || !op->lent);
    const int64_t spin_ns = !keen || s->tired > 0 ? 0 : s->spin_ns;
    if (keen && s->tired > 0) s->tired--;
    for (;;) {
        const int sleeps = now - begun >= spin_ns; /* this time, unless it has ended */
        u32 rings = s->near->rings;
        if (sleeps) {
            atomic_fetch_add(&s->sleepers, 1);
            atomic_store(&s->near->asleep, 1);
            atomic_thread_fence(memory_order_seq_cst);
            delay_in_tests(SLEEP);
            raise_flags(s);
            atomic_thread_fence(memory_order_seq_cst);
        }
        /* First the link's state, then the bytes: what a peer sent before it died still arrives. */
        int result = op ? trouble(op->link) : OK;
        progress(s, op, sleeps);
        now = now_ns();
        int over = 1;
        if (op && op->done)
            result = OK;
        else if (s->stopped || (op && s->near->blamed))
            result = STOPPED;
        else if (!result && now >= deadline)
            result = TIMEOUT;
        else
            over = result != OK;
        if (!sleeps) {
            if (!over) pause_briefly();
        } else {
            if (!over) {
                if (spin_ns) s->tired = TIRED;
                int64_t ns = least(SHM_SLICE_NS, deadline - now);
                struct timespec t = {ns / 1000000000, ns % 1000000000};
                long woken = syscall(SYS_futex, &s->near->rings, FUTEX_WAIT, rings, &t, 0, 0);
                if (woken < 0 && errno == EINTR) over = 1, result = INTERRUPTED;
                if (woken < 0 && errno == ETIMEDOUT && has_overslept(s, op)) s->overslept++;
                now = now_ns();
                check_alive(s, now);
            }
            atomic_fetch_sub(&s->sleepers, 1);
        }
        if (over) return result;
    }
}

static struct op *new_op(struct link *l, char *data, u64 size, u64 tag) {
    struct op *op = calloc(1, sizeof *op);
    if (op) *op = (struct op){.link = l, .data = data, .size = size, .tag = tag};
    return op;
}

/* ---- called from Python ---------------------------------------------------------------------- */

u64 shm_size(int links, u64 ring_bytes) { return PAGE + links * (sizeof(struct ring) + ring_bytes); }

/* Map a segment or a store; 0 and errno on failure. */
void *shm_map(int fd, u64 bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return 0;
    madvise(at, bytes, MADV_DONTFORK); /* else a child that outlives us would keep the memory */
    madvise(at, bytes, MADV_DONTDUMP); /* else a core dump would fill the store's holes */
    return at;
}

void shm_unmap(void *at, u64 bytes) { munmap(at, bytes); }

/* Allocate memory for a hole of our store; 0, or errno. Kernels before 5.14 allocate it on first
 * touch. */
int shm_fill(void *at, u64 bytes) {
    return madvise(at, bytes, POPULATE_WRITE) && errno != EINVAL ? errno : 0;
}

/* Free the memory, leaving a hole. */
void shm_empty(void *at, u64 bytes) { madvise(at, bytes, MADV_REMOVE); }

static struct ring *ring_at(struct segment *s, int slot, u64 ring_bytes) {
    return (void *)((char *)s + PAGE + slot * (sizeof(struct ring) + ring_bytes));
}

/* Create a rank's end; its segment is `fd`, of shm_size(links, ring_bytes). 0: no memory. */
struct shm *shm_begin(int fd, int links, u64 ring_bytes, int64_t spin_ns) {
    struct shm *s = calloc(1, sizeof *s);
    if (!s) return 0;
    *s = (struct shm){.ring_bytes = ring_bytes, .spin_ns = spin_ns, .links = links};
    s->near_bytes = shm_size(links, ring_bytes);
    s->link = calloc(links, sizeof *s->link);
    s->near = s->link ? shm_map(fd, s->near_bytes) : 0;
    if (!s->near) {
        free(s->link);
        free(s);
        return 0;
    }
    s->near->size = s->near_bytes;
    for (int i = 0; i < links; i++) {
        pthread_mutex_init(&s->link[i].tx, 0);
        pthread_mutex_init(&s->link[i].rx, 0);
        s->link[i].alive_fd = -1;
    }
    return s;
}

/* Connect link `near_slot` to the peer whose segment is `fd`, where our ring is `far_slot`; 0, or
 * errno. Takes ownership of `alive_fd`; the caller keeps `fd`. */
int shm_connect(struct shm *s, int near_slot, int fd, int far_slot, int alive_fd) {
    struct link *l = &s->link[near_slot];
    l->far_bytes = s->near_bytes;
    l->far = shm_map(fd, l->far_bytes);
    if (!l->far) return errno;
    if (l->far->size != l->far_bytes) return EINVAL; /* rings of another size */
    l->alive_fd = alive_fd;
    l->in = ring_at(s->near, near_slot, s->ring_bytes);
    l->out = ring_at(l->far, far_slot, s->ring_bytes);
    return 0;
}

/* Set our store, `bytes` at `store`, for lending: once, before the first send. */
void shm_lend(struct shm *s, char *store, u64 bytes) { s->store = store, s->store_bytes = bytes; }

/* Set the mapping of a peer's store: once, before the first receive from it. */
void shm_borrow_from(struct shm *s, int slot, char *store, u64 bytes) {
    s->link[slot].store = store, s->link[slot].store_bytes = bytes;
}

/* Bytes in use of all messages lent to peers so far. */
u64 shm_lent_bytes(struct shm *s) { return s->lent_bytes; }

/* How often a thread has slept for its whole slice though something could move: lost wake-ups, or a
 * change at that moment. */
u64 shm_overslept(struct shm *s) { return s->overslept; }

/* Begin a send, and move what can be moved at once. 0: it has ended already. -1: stopped, or no
 * memory. Else the argument of shm_wait. If the message is lent, `counts` of its bytes are in use. */
struct op *shm_send(struct shm *s, int slot, char *data, u64 size, u64 counts, u64 tag) {
    struct link *l = &s->link[slot];
    struct op *op = enter(s) ? new_op(l, data, size, tag) : (struct op *)-1;
    if (op == (struct op *)-1) return op;
    if (op) {
        op->counts = counts;
        pthread_mutex_lock(&l->tx);
        take_announcements(l); /* earlier sends of this tag come first */
        start_send(l, op);
        int ended = transmit(s, l, op), own = op->done;
        pthread_mutex_unlock(&l->tx);
        /* If a ring's bytes did not end the send, a sleeping thread of ours continues it. */
        if (ended || can_transmit(s, l)) tell_own(s, 0);
        if (own) {
            free(op);
            op = 0;
        }
    } else {
        op = (struct op *)-1;
    }
    leave(s);
    return op;
}

/* Begin a receive; one that borrows has no data. -1: stopped, or no memory. Else the argument of
 * shm_wait and, if it borrows, of shm_message and shm_give_back. */
struct op *shm_receive(struct shm *s, int slot, char *data, u64 size, u64 tag, int borrows) {
    struct link *l = &s->link[slot];
    if (!enter(s)) return (struct op *)-1;
    struct op *op = new_op(l, data, size, tag);
    if (op) {
        op->borrows = borrows;
        op->may_lend = l->store && (borrows || size >= LENT);
        pthread_mutex_lock(&l->rx);
        append(&l->posted, op);
        if (!l->unannounced) l->unannounced = op;
        announce(l);
        pthread_mutex_unlock(&l->rx);
    }
    leave(s);
    return op ? op : (struct op *)-1;
}

/* The address of a borrowed message; 0: there was no memory for it. */
char *shm_message(struct op *op) { return op->data; }

/* Whether the message is a copy, since its sender could not lend it; the caller then owns it, and
 * frees it with shm_free_copy. */
int shm_copy(struct op *op) {
    const int owns = op->owns;
    op->owns = 0;
    return owns;
}

void shm_free_copy(char *message) { free(message); }

/* End a loan: its message is no longer read. */
void shm_give_back(struct shm *s, struct op *op) {
    struct link *l = op->link;
    if (op->lent && enter(s)) {
        pthread_mutex_lock(&l->rx);
        give_back(l, op->loan.number);
        pthread_mutex_unlock(&l->rx);
        leave(s);
    }
    free(op);
}

/* Wait for an operation, once; on OK it is freed, unless it borrows. The lowest 8 bits are the
 * result; above them is the size that the other end gave (OK), or the rank that it blames (FAILED). */
int64_t shm_wait(struct shm *s, struct op *op, int64_t timeout_ns) {
    if (!enter(s)) return STOPPED;
    int64_t begun = now_ns(), detail = 0;
    int result = op->done ? OK : wait_for(s, op, begun, begun + timeout_ns);
    if (result == OK) {
        detail = op->other;
        if (!op->borrows) free(op);
    } else if (result == FAILED) {
        detail = (int64_t)op->link->far->blamed - 1;
    }
    leave(s);
    return detail << 8 | result;
}

/* Move bytes until we are stopped. */
void shm_drive(struct shm *s) {
    if (!enter(s)) return;
    while (wait_for(s, 0, 0, INT64_MAX) != STOPPED) continue;
    leave(s);
}

static void tell_all(struct shm *s) {
    for (int i = 0; i < s->links; i++)
        if (s->link[i].far) ring_bell(s->link[i].far);
    ring_bell(s->near);
}

/* Tell the peers that we have failed because of `blamed`: their waits for us end. */
void shm_fail(struct shm *s, u32 blamed) {
    if (!enter(s)) return;
    s->near->blamed = blamed + 1;
    tell_all(s);
    leave(s);
}

/* Wait, until `end`, for loans of peers that have neither failed nor closed. */
static void await_returns(struct shm *s, int64_t end) {
    int left;
    do {
        left = 0;
        for (struct link *l = s->link; l < s->link + s->links; l++) {
            if (!l->lent.first) continue;
            int failed = trouble(l); /* before take_returns: earlier returns still count */
            take_returns(l, 0);
            left |= l->lent.first && !failed;
        }
        if (left) usleep(200);
    } while (left && now_ns() < end);
}

/* End our waits, and unmap all memory but stores. Sends that the peers are ready for first get
 * `linger_ns` to be written. */
void shm_stop(struct shm *s, int64_t linger_ns) {
    if (!enter(s)) return;
    int64_t end = now_ns() + linger_ns;
    for (int left = 1; left && !s->near->blamed && now_ns() < end;) {
        progress(s, 0, 0);
        check_alive(s, now_ns());
        left = 0;
        for (struct link *l = s->link; l < s->link + s->links; l++)
            left |= l->sends && !trouble(l);
        if (left) usleep(200);
    }
    s->near->closed = 1;
    int first = !atomic_exchange(&s->stopped, 1);
    leave(s);
    if (!first) return;
    for (tell_all(s); s->users; usleep(200)) ring_bell(s->near);
    await_returns(s, now_ns() + least(linger_ns, LINGER_NS));
    for (struct link *l = s->link; l < s->link + s->links; l++) {
        if (l->far) munmap(l->far, l->far_bytes);
        if (l->alive_fd >= 0) close(l->alive_fd);
    }
    munmap(s->near, s->near_bytes);
}

/* Whether a peer may still read this memory, after shm_stop. */
int shm_is_lent(struct shm *s, char *at, u64 bytes) {
    for (struct link *l = s->link; l < s->link + s->links; l++) {
        if (l->dead) continue;
        if (l->leaving && l->leaving->lent && within(l->leaving->data - at, 1, bytes)) return 1;
        for (struct op *op = l->lent.first; op; op = op->next)
            if (within(op->data - at, 1, bytes)) return 1;
    }
    return 0;
}

static void free_all(struct op *op) {
    while (op) {
        struct op *next = op->next;
        if (op->owns) free(op->data);
        free(op);
        op = next;
    }
}

/* Free what is left after shm_stop; no other call may follow. */
void shm_free(struct shm *s) {
    for (struct link *l = s->link; l < s->link + s->links; l++) {
        free_all(l->waiting.first);
        free_all(l->ready.first);
        free_all(l->announced.first);
        free_all(l->posted.first);
        free_all(l->lent.first);
        free(l->leaving);
        if (l->arriving && l->arriving->owns) free(l->arriving->data);
        free(l->arriving);
    }
    free(s->link);
    free(s);
}

/* Rings: the data path between two processes on one machine. Compiled together with shm_wait.c,
 * which describes which threads move the bytes and how threads sleep.
 *
 * A rank owns one segment of memory per group, mapped by it and by its peers on the same machine:
 *
 *   a page       the bell on which the rank's threads sleep, and the rank's status
 *   for each peer a ring of what that peer sends to the rank:
 *     a page     five counters, three flags, announcements, and returned loans
 *     bytes      frames: tag and size (16 bytes), then the message, padded to 16
 *
 * and one store for all of its groups, for messages that it lends: a peer reads such a message in
 * place. Each process maps a store once.
 *
 * A message moves once its receive is posted: the receiver announces (tag, size) in the ring, and
 * the sender writes only what was announced. So everything in a ring has a destination, no message
 * blocks another, there is no unexpected-message queue, and ranks cannot block each other by the
 * order in which they send or receive. Announcements need no storage beyond the ring's either: those
 * that do not fit wait in the receiver's list of posted receives.
 *
 * A message in its sender's store is lent if its receiver has announced that it can reach the store:
 * its frame then contains a loan, which gives its address, instead of its bytes. The receiver reads
 * it there, or copies it from there, and then gives the loan back; only then the send ends. A link
 * has at most LOANS at a time, so there is always room to give one back; further messages are copied.
 *
 * Each counter and each end of a ring has one writer at a time: the thread that holds the link's
 * lock for that direction. The side that a counter stops raises a flag, and then reads the counter
 * again; the other side reads the flag after it has advanced the counter, and if it is raised clears
 * it and rings the bell. Both have a full fence in between, so at least one of them sees the other's
 * write.
 *
 * That is not enough for threads that sleep: a late answer, to a counter that advanced long ago, may
 * clear a flag that has just been raised, and ring before the thread sleeps. So
 *
 *   a sleeper      reads `rings`; sets `asleep`; fence; raises the flags of all that is stopped, by
 *                  whichever thread (raise_flags); fence; reads all counters; waits for `rings` to
 *                  change
 *   an answer      advances a counter; fence; clears the flag; fence; clears `asleep`; advances
 *                  `rings`
 *   another thread that leaves has nothing left to move, and has raised the flags of what is
 *                  stopped, after it recorded that in `sends`, `expects` or `unannounced`; or it
 *                  wakes the sleepers of its rank, which continue (hand_over)
 *
 * Then no sleeper misses a counter. Proof: let a counter advance after the sleeper has read it. If
 * the sleeper has raised the flag, the thread that advances the counter finds it raised, or cleared
 * since: the thread that clears it does so after `asleep` was set, and finds that set, or cleared
 * since; and the thread that clears `asleep` advances `rings` after the sleeper has read it. If the
 * sleeper has not raised the flag, then another thread had not yet recorded what it waits for, or
 * still had room, when the sleeper passed its first fence; that thread raised the flag afterwards,
 * and whoever clears it finds `asleep` set as before. And if an answer has cleared a flag without
 * finding `asleep` set, it did so before the sleeper's first fence: the sleeper finds what was
 * recorded before that flag was raised, and raises it again.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;

enum {
    PAGE = 4096,
    UNIT = 16,       /* alignment of frames, and of all pieces of a message but the last */
    POSTS = 128,     /* the most announcements that the sender has not read */
    LOANS = 128,     /* the most loans of a link at a time */
    PIECE = 1 << 15, /* the other side is notified after so many bytes, and works in parallel */
};

#define LOAN (1ull << 63) /* in a frame's size: a loan follows; in an announcement's: may be lent */

struct frame { u64 tag, size; };

struct loan { u64 at, number; }; /* offset in the sender's store; number among the link's loans */

struct segment {
    _Alignas(64) _Atomic u32 rings; /* the bell: how often it rang; a futex */
    _Atomic u32 asleep;             /* whether a thread waits for it, or is about to */
    _Alignas(64) _Atomic u32 blamed; /* 1 + the rank that the owner blames for its failure */
    _Atomic u32 closed;
    u64 size;
};

struct ring {
    _Alignas(64) _Atomic u64 head;   /* bytes written, by the sender */
    _Alignas(64) _Atomic u64 tail;   /* bytes read, by the receiver */
    _Alignas(64) _Atomic u64 posted; /* announcements written, by the receiver */
    _Alignas(64) _Atomic u64 taken;  /* announcements read, by the sender */
    _Alignas(64) _Atomic u64 returned; /* loans given back, by the receiver */
    _Alignas(64) _Atomic u32 full;   /* the sender waits for room */
    _Atomic u32 starved;             /* the sender waits for an announcement, or a loan's end */
    _Atomic u32 behind;              /* the receiver waits for room for announcements */
    _Alignas(64) struct frame posts[POSTS];
    u64 returns[LOANS]; /* numbers of loans */
    _Alignas(PAGE) char bytes[];
};

struct op { /* a send or a receive in flight */
    struct op *next;
    struct link *link;
    char *data; /* the message; 0: a receive that borrows, before its message has arrived */
    u64 tag, size;
    u64 other; /* the size that the other end has given */
    u64 counts; /* bytes of it in use, for lent_bytes */
    char *bytes; /* what goes through the ring: the message, or the loan */
    u64 count, at;
    struct loan loan;
    int may_lend;       /* the receiver can reach the sender's store */
    _Atomic int lent;   /* a loan goes through the ring */
    int borrows, owns;  /* a receive without memory; it has allocated memory, for want of a loan */
    _Atomic int done;
};

struct queue { struct op *first, **last; };

struct link { /* to one peer; `tx` guards the first half, `rx` the second */
    pthread_mutex_t tx;
    struct ring *out;
    struct queue waiting, ready, announced; /* sends without announcement, with; the reverse */
    struct queue lent;                      /* sends whose loans are not returned */
    u64 loans;                              /* how many were made */
    _Atomic u64 over;                       /* how many are known to be returned */
    _Atomic(struct op *) leaving;           /* the send whose bytes are being written */
    _Atomic int sends;                      /* whether `leaving` or `ready` has any */
    _Atomic int expects;                    /* whether `waiting` or `lent` has any */

    pthread_mutex_t rx;
    struct ring *in;
    struct queue posted;
    struct op *arriving;
    _Atomic(struct op *) unannounced; /* the first of `posted` that is not announced */

    struct segment *far;
    size_t far_bytes;
    char *store; /* the peer's; 0: not mapped */
    u64 store_bytes;
    int alive_fd; /* readable once the peer's process has ended */
    _Atomic int dead, corrupt;
};

struct shm {
    struct segment *near;
    size_t near_bytes;
    u64 ring_bytes;
    char *store; /* ours */
    u64 store_bytes;
    int64_t spin_ns;
    int links;
    struct link *link;
    _Atomic u64 lent_bytes, overslept;
    _Atomic int users, sleepers, stopped, checking, tired;
    _Atomic int64_t checked; /* when the peers were last seen alive */
};

static void append(struct queue *q, struct op *op) {
    if (!q->first) q->last = &q->first;
    op->next = 0;
    *q->last = op;
    q->last = &op->next;
}

static struct op *take_at(struct queue *q, struct op **at) {
    struct op *op = *at;
    if (q->last == &op->next) q->last = at;
    *at = op->next;
    return op;
}

/* Remove the first operation with this tag; 0 if there is none. */
static struct op *take(struct queue *q, u64 tag) {
    for (struct op **at = &q->first; *at; at = &(*at)->next)
        if ((*at)->tag == tag) return take_at(q, at);
    return 0;
}

static u64 round_up(u64 bytes) { return (bytes + UNIT - 1) & ~(u64)(UNIT - 1); }

static u64 least(u64 a, u64 b) { return a < b ? a : b; }

static u64 look(_Atomic u64 *counter) {
    return atomic_load_explicit(counter, memory_order_acquire);
}

static void publish(_Atomic u64 *counter, u64 value) {
    atomic_store_explicit(counter, value, memory_order_release);
}

/* Wake the sleeping threads, if any, of the rank that owns the segment. */
static void ring_bell(struct segment *s) {
    atomic_thread_fence(memory_order_seq_cst);
    /* Once is enough until they sleep again: the system call costs more than a piece's copy. */
    if (atomic_load_explicit(&s->asleep, memory_order_relaxed) && atomic_exchange(&s->asleep, 0)) {
        atomic_fetch_add(&s->rings, 1);
        syscall(SYS_futex, &s->rings, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    }
}

/* A place where another thread may change what was just read. Tests sleep here every other time, in
 * the places that they choose: before an answer, after a flag, before a sleeper's flags, after a
 * piece. */
enum { ANSWER = 1, FLAG = 2, SLEEP = 4, WRITTEN = 8 };

static void delay_in_tests(int place) {
#ifdef SHM_DELAY_NS
    static _Atomic u32 calls;
    if (place & SHM_DELAY_IN && (calls++ * 2654435769u) >> 31)
        nanosleep(&(struct timespec){0, SHM_DELAY_NS}, 0);
#endif
    (void)place;
}

/* Announce that we wait for the flag's counter; the caller then reads the counter again. */
static void raise_flag(_Atomic u32 *flag) {
    atomic_store(flag, 1);
    atomic_thread_fence(memory_order_seq_cst);
    delay_in_tests(FLAG);
}

/* Wake the far side if it has raised this flag. */
static void answer(_Atomic u32 *flag, struct segment *far) {
    delay_in_tests(ANSWER);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(flag, memory_order_relaxed) && atomic_exchange(flag, 0))
        ring_bell(far);
}

static int within(u64 at, u64 size, u64 bytes) { return at <= bytes && size <= bytes - at; }

/* End an operation. Returns whether another thread may wait for it; the caller waits for `mine`. */
static int finish(struct op *op, struct op *mine) {
    atomic_store_explicit(&op->done, 1, memory_order_release);
    return op != mine;
}

/* ---- the sending side; the caller holds `tx` ------------------------------------------------- */

static void announced(struct op *op, u64 size) {
    op->may_lend = (size & LOAN) != 0;
    op->other = size & ~LOAN;
}

/* Remove the send of this loan. */
static struct op *take_lent(struct link *l, u64 number) {
    for (struct op **at = &l->lent.first; *at; at = &(*at)->next)
        if ((*at)->loan.number == number) return take_at(&l->lent, at);
    return 0;
}

static void take_announcements(struct link *l) {
    struct ring *r = l->out;
    u64 taken = r->taken, posted = look(&r->posted);
    if (taken == posted) return;
    for (; taken != posted; taken++) {
        struct frame post = r->posts[taken % POSTS];
        struct op *op = take(&l->waiting, post.tag);
        if (op) {
            announced(op, post.size);
            append(&l->ready, op);
        } else if ((op = calloc(1, sizeof *op))) {
            *op = (struct op){.tag = post.tag, .size = post.size};
            append(&l->announced, op);
        } else {
            l->corrupt = 1;
        }
    }
    publish(&r->taken, taken);
    answer(&r->behind, l->far);
}

/* End the sends whose loans are returned. Returns how many, `mine` not counted. */
static int take_returns(struct link *l, struct op *mine) {
    struct ring *r = l->out;
    int ended = 0;
    for (u64 returned = look(&r->returned); l->over != returned && !l->corrupt; l->over++) {
        struct op *op = take_lent(l, r->returns[l->over % LOANS]);
        if (op) ended += finish(op, mine);
        l->corrupt |= !op;
    }
    return ended;
}

/* Begin a send: it waits for its announcement, unless that has arrived already. */
static void start_send(struct link *l, struct op *op) {
    struct op *early = take(&l->announced, op->tag);
    if (early) announced(op, early->size);
    append(early ? &l->ready : &l->waiting, op);
    free(early);
}

/* Choose what a send writes after its frame: the message, or a loan of it. Where the sizes differ,
 * the receiver gets the frame alone, and fails. */
static struct frame begin_frame(struct shm *s, struct link *l, struct op *op) {
    const u64 at = op->data - s->store;
    op->lent = op->may_lend && op->size == op->other && op->data >= s->store &&
               within(at, op->size, s->store_bytes) && l->loans - l->over < LOANS;
    op->bytes = op->data, op->count = op->size == op->other ? op->size : 0;
    if (op->lent) {
        op->loan = (struct loan){at, l->loans++};
        s->lent_bytes += op->counts;
        op->bytes = (char *)&op->loan, op->count = sizeof op->loan;
    }
    return (struct frame){op->tag, op->size | (op->lent ? LOAN : 0)};
}

/* Write ready messages while there is room, at most a ring's bytes. Returns how many sends have
 * ended, `mine` not counted. */
static int write_ready(struct shm *s, struct link *l, struct op *mine) {
    struct ring *r = l->out;
    const u64 size = s->ring_bytes;
    u64 head = r->head, end = head + size;
    int ended = 0;
    while (l->leaving || l->ready.first) {
        u64 room = size - (head - look(&r->tail));
        if (room < UNIT) {
            l->sends = 1; /* before the flag */
            raise_flag(&r->full);
            if (size - (head - look(&r->tail)) < UNIT) break;
            continue;
        }
        if (head >= end) break; /* after the flag, which must be raised on leaving a full ring */
        struct op *op = l->leaving;
        if (!op) {
            l->leaving = op = take(&l->ready, l->ready.first->tag);
            *(struct frame *)(r->bytes + head % size) = begin_frame(s, l, op);
            head += UNIT, room -= UNIT;
        }
        u64 n = least(least(op->count - op->at, room), least(PIECE, size - head % size));
        memcpy(r->bytes + head % size, op->bytes + op->at, n);
        op->at += n;
        head += round_up(n);
        publish(&r->head, head);
        ring_bell(l->far);
        delay_in_tests(WRITTEN);
        if (op->at == op->count) {
            l->leaving = 0;
            if (op->lent)
                append(&l->lent, op);
            else
                ended += finish(op, mine);
        }
    }
    l->sends = l->leaving || l->ready.first;
    return ended;
}

/* Whether there are announcements or returned loans that we have not read. */
static int is_told(struct link *l) {
    return look(&l->out->posted) != look(&l->out->taken) || look(&l->out->returned) != look(&l->over);
}

static int transmit(struct shm *s, struct link *l, struct op *mine) {
    int ended = 0;
    do {
        take_announcements(l);
        ended += take_returns(l, mine);
        ended += write_ready(s, l, mine);
        l->expects = l->waiting.first || l->lent.first; /* before the flag */
        if (!l->expects) break;
        raise_flag(&l->out->starved);
    } while (is_told(l) && !l->corrupt);
    return ended;
}

/* ---- the receiving side; the caller holds `rx` ----------------------------------------------- */

static void announce(struct link *l) {
    struct ring *r = l->in;
    struct op *op = l->unannounced;
    const u64 before = r->posted;
    u64 posted = before;
    while (op) {
        if (posted - look(&r->taken) >= POSTS) {
            raise_flag(&r->behind); /* `unannounced` is set already */
            if (posted - look(&r->taken) >= POSTS) break;
        }
        r->posts[posted % POSTS] = (struct frame){op->tag, op->size | (op->may_lend ? LOAN : 0)};
        publish(&r->posted, ++posted);
        op = op->next;
    }
    l->unannounced = op;
    if (posted != before) answer(&r->starved, l->far);
}

/* Choose where the bytes after a frame go: to the message, or to the loan. */
static void begin_arrival(struct op *op, u64 size) {
    op->lent = (size & LOAN) != 0;
    op->other = size & ~LOAN;
    op->bytes = op->data, op->count = op->size == op->other ? op->size : 0;
    if (op->lent) {
        op->bytes = (char *)&op->loan, op->count = sizeof op->loan;
    } else if (op->borrows && op->count) {
        op->owns = 1;
        op->data = op->bytes = malloc(op->count);
        if (!op->data) op->count = 0; /* the caller of shm_wait finds no message, and fails */
    }
}

static void give_back(struct link *l, u64 number) {
    struct ring *r = l->in;
    r->returns[r->returned % LOANS] = number;
    publish(&r->returned, r->returned + 1);
    answer(&r->starved, l->far);
}

/* A loan has arrived: a receive with its own memory copies the message at once. */
static void take_loan(struct link *l, struct op *op) {
    char *message = l->store + op->loan.at;
    if (!op->may_lend || op->size != op->other || !within(op->loan.at, op->size, l->store_bytes)) {
        l->corrupt = 1;
    } else if (op->borrows) {
        op->data = message;
    } else {
        memcpy(op->data, message, op->size);
        give_back(l, op->loan.number);
    }
}

/* Read what has arrived, at most a ring's bytes. Returns how many receives have ended, `mine` not
 * counted. */
static int receive(struct shm *s, struct link *l, struct op *mine) {
    struct ring *r = l->in;
    const u64 size = s->ring_bytes;
    u64 tail = r->tail, end = tail + size;
    int ended = 0;
    announce(l);
    while (tail < end) {
        u64 there = look(&r->head) - tail;
        struct op *op = l->arriving;
        if (!there) break;
        if (!op) {
            struct frame f = *(struct frame *)(r->bytes + tail % size);
            l->arriving = op = there <= size ? take(&l->posted, f.tag) : 0;
            if (!op) { /* no such receive was announced: the ring is corrupt */
                l->corrupt = 1;
                break;
            }
            tail += UNIT, there -= UNIT;
            begin_arrival(op, f.size);
        }
        u64 n = least(least(op->count - op->at, there), least(PIECE, size - tail % size));
        memcpy(op->bytes + op->at, r->bytes + tail % size, n);
        op->at += n;
        tail += round_up(n);
        publish(&r->tail, tail);
        if (op->at == op->count) {
            if (op->lent) take_loan(l, op);
            if (l->corrupt) break;
            l->arriving = 0;
            ended += finish(op, mine);
        }
        /* Wake a sender only for half a ring of room. */
        if (size - (look(&r->head) - tail) >= size / 2) answer(&r->full, l->far);
    }
    return ended;
}

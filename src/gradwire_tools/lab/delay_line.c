/* A switch that holds every packet for a fixed time: the lab's latency where the kernel has no netem.
 *
 *   delay_line LATENCY_NS PORT...
 *
 * It writes "ready" once it forwards. A line with a number on standard input sets another latency,
 * which it answers with "ready", too: packets that it holds keep their time, and those after them
 * wait behind them, so none is lost and none overtakes another.
 *
 * PORT i is the switch's end of the link to node i, whose address is 02:00:00:00:HH:LL with
 * HHLL = i + 1, so no routing table is needed; other packets (broadcast) are dropped. Packets are
 * read from a memory-mapped ring per port (AF_PACKET, TPACKET_V2), so a burst waits in the ring
 * while this process is off its core, and the latency counts from the kernel's arrival time.
 * PACKET_VNET_HDR forwards segmentation and checksum requests, so up to 60 kB pass per call and no
 * checksum is computed twice. Only memory bounds the queue of a port: a full link delays this queue
 * and loses no packets. htb at both ends of every link limits the rate. Any lost packet is reported
 * on standard error.
 *
 * Packet sockets, unlike TAP devices, need no device node, so this works in a user namespace.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    SLOT = 1 << 16,          /* one packet; the nodes' gso_max_size keeps packets below this */
    SLOTS = 256,             /* 16 MB per port */
    SEND_BUFFER = 4 << 20,   /* as root; else the system's wmem_max is the limit */
    QUEUE_BYTES = 256 << 20, /* per port; packets beyond this are dropped */
    NAP_NS = 500000,         /* longest sleep without polling the rings */
    MAX_PORTS = 1024,
};

struct packet {
    struct packet *next;
    int64_t due; /* ns, CLOCK_MONOTONIC */
    uint32_t size;
    char bytes[]; /* struct virtio_net_hdr, then the Ethernet frame */
};

struct port {
    const char *name;
    int fd, slot, blocked;
    char *ring;
    struct packet *head, *tail;
    int64_t queued; /* bytes */
};

static struct port ports[MAX_PORTS];
static struct pollfd polls[MAX_PORTS + 1]; /* the last is standard input */
static int port_count;
static int64_t latency;

static void die(const char *what, const char *name) {
    fprintf(stderr, "delay_line: %s %s: %s\n", what, name, strerror(errno));
    exit(1);
}

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void option(struct port *p, int name, const void *value, socklen_t size) {
    if (setsockopt(p->fd, SOL_PACKET, name, value, size)) die("packet socket on", p->name);
}

static void open_port(struct port *p) {
    int one = 1, version = TPACKET_V2, size = SEND_BUFFER;
    p->fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (p->fd < 0) die("packet socket on", p->name);
    option(p, PACKET_VERSION, &version, sizeof version);
    option(p, PACKET_VNET_HDR, &one, sizeof one);
    option(p, PACKET_IGNORE_OUTGOING, &one, sizeof one);
    struct tpacket_req ring = {SLOT, SLOTS, SLOT, SLOTS};
    option(p, PACKET_RX_RING, &ring, sizeof ring);
    p->ring = mmap(0, (size_t)SLOT * SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
    if (p->ring == MAP_FAILED) die("ring of", p->name);
    if (setsockopt(p->fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size))
        setsockopt(p->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    /* Bound last: from here on packets arrive. */
    struct sockaddr_ll address = {.sll_family = AF_PACKET,
                                  .sll_protocol = htons(ETH_P_ALL),
                                  .sll_ifindex = (int)if_nametoindex(p->name)};
    if (!address.sll_ifindex || bind(p->fd, (struct sockaddr *)&address, sizeof address))
        die("cannot bind to", p->name);
}

static void report_loss(struct port *p) {
    struct tpacket_stats stats;
    socklen_t size = sizeof stats;
    if (!getsockopt(p->fd, SOL_PACKET, PACKET_STATISTICS, &stats, &size) && stats.tp_drops)
        fprintf(stderr, "delay_line: %u packets lost at %s: its ring was full\n", stats.tp_drops,
                p->name);
}

static void enqueue(struct port *from, struct tpacket2_hdr *slot, int64_t now, int64_t wall) {
    const unsigned char *frame = (unsigned char *)slot + slot->tp_mac;
    int to = (frame[4] << 8 | frame[5]) - 1;
    if (frame[0] != 2 || to < 0 || to >= port_count) return;
    struct port *p = &ports[to];
    if (slot->tp_snaplen < slot->tp_len || p->queued > QUEUE_BYTES) {
        fprintf(stderr, "delay_line: a packet of %u bytes from %s to %s lost: %s\n", slot->tp_len,
                from->name, p->name, p->queued > QUEUE_BYTES ? "queue full" : "too long");
        return;
    }
    const uint32_t header = sizeof(struct virtio_net_hdr), size = slot->tp_snaplen + header;
    struct packet *k = malloc(sizeof *k + size);
    if (!k) die("out of memory at", p->name);
    /* The kernel's time stamps are of the wall clock, which may be set at any time: only the
     * packet's age is taken from it, and an impossible age counts as 0. */
    int64_t age = wall - (slot->tp_sec * 1000000000LL + slot->tp_nsec);
    if (age < 0 || age > 1000000000LL) age = 0;
    *k = (struct packet){.due = now - age + latency, .size = size};
    memcpy(k->bytes, frame - header, size);
    if (p->head)
        p->tail = p->tail->next = k;
    else
        p->head = p->tail = k;
    p->queued += size;
}

static void receive(struct port *p) {
    int64_t now = now_ns(CLOCK_MONOTONIC), wall = now_ns(CLOCK_REALTIME);
    for (;; p->slot = (p->slot + 1) % SLOTS) {
        struct tpacket2_hdr *slot = (void *)(p->ring + (size_t)p->slot * SLOT);
        uint32_t status = __atomic_load_n(&slot->tp_status, __ATOMIC_ACQUIRE);
        if (!(status & TP_STATUS_USER)) return;
        if (status & TP_STATUS_LOSING) report_loss(p);
        enqueue(p, slot, now, wall);
        __atomic_store_n(&slot->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    }
}

static void send_due(struct port *p, int64_t now) {
    while (p->head && p->head->due <= now) {
        struct packet *k = p->head;
        if (send(p->fd, k->bytes, k->size, 0) < 0) {
            p->blocked = errno == EAGAIN || errno == ENOBUFS;
            if (p->blocked) return;
            /* Packets to a link that is down are lost, as on real hardware. */
            if (errno != ENETDOWN && errno != ENXIO) die("cannot send to", p->name);
        }
        p->head = k->next;
        p->queued -= k->size;
        free(k);
    }
}

static void ready(void) {
    puts("ready");
    fflush(stdout);
}

/* Whole lines only: their writer sends one with one call, and waits for the answer. */
static void read_latency(void) {
    char line[32];
    ssize_t size = read(0, line, sizeof line - 1);
    if (size <= 0) {
        polls[port_count].fd = -1; /* closed: the latency stays */
        return;
    }
    line[size] = 0;
    latency = atoll(line);
    ready();
}

int main(int argc, char **argv) {
    latency = argc > 1 ? atoll(argv[1]) : 0;
    port_count = argc - 2;
    if (latency < 0 || port_count < 1 || port_count > MAX_PORTS) {
        fprintf(stderr, "usage: delay_line LATENCY_NS PORT...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, 9);   /* end with the lab */
    prctl(PR_SET_TIMERSLACK, 1);  /* the default adds up to 50 us to each wake-up */
    /* Root only. The nodes keep all cores busy, and this process needs a tenth of one, on time. A
     * nice value does not help: with autogrouping it applies only within a session. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    for (int i = 0; i < port_count; i++) {
        ports[i].name = argv[i + 2];
        open_port(&ports[i]);
    }
    polls[port_count] = (struct pollfd){0, POLLIN, 0};
    ready();
    for (;;) {
        int64_t now = now_ns(CLOCK_MONOTONIC), next = INT64_MAX;
        for (int i = 0; i < port_count; i++) {
            struct port *p = &ports[i];
            if (!p->blocked) send_due(p, now);
            if (p->head && !p->blocked && p->head->due < next) next = p->head->due;
        }
        int64_t wait = next == INT64_MAX ? 1000000000 : next > now ? next - now : 0;
        /* A packet that arrives before the next departure is due after it: no wake-up needed. */
        int in = wait > NAP_NS ? POLLIN : 0;
        for (int i = 0; i < port_count; i++)
            polls[i] = (struct pollfd){ports[i].fd, in | (ports[i].blocked ? POLLOUT : 0), 0};
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        if (ppoll(polls, port_count + 1, &timeout, 0) < 0 && errno != EINTR) die("poll", "");
        if (polls[port_count].revents) read_latency();
        for (int i = 0; i < port_count; i++) {
            if (polls[i].revents & POLLERR) { /* the link went down: clear the error */
                int error;
                socklen_t size = sizeof error;
                getsockopt(ports[i].fd, SOL_SOCKET, SO_ERROR, &error, &size);
            }
            if (polls[i].revents & (POLLOUT | POLLERR)) ports[i].blocked = 0;
            receive(&ports[i]);
        }
    }
}

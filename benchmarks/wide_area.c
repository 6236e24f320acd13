/* A network of hosts that are far from each other, in one process: what lies between them.
 *
 * Each host is a network namespace with a TUN device, and this process carries packets between the
 * devices. It has what a kernel without `fq` and `netem` lacks: a cap for each flow, a delay, and
 * losses. A packet waits for its flow's turn, and for the link of the host that it is for;
 * whichever queue is full drops it, a flow's after a second. It arrives a delay later.
 *
 *     wide_area MBIT FLOW_MBIT DELAY_MS LOSS QUEUE_MS NAMESPACE...
 *
 * FLOW_MBIT of 0: flows have no cap. LOSS is a probability for each packet. DELAY_MS is one way.
 * Host i has an address that ends in i + 1. It says "ready", and ends with its standard input.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOSTS = 16, FLOWS = 65536, PACKET = 70000, HEADER = 10, BATCH = 64 };

struct waiting {
    double due;
    uint64_t order;
    int to, size, arrives;
    unsigned char *bytes;
};

static struct waiting *heap;
static size_t count, room;
static double flow_free[FLOWS], down_free[MOST_HOSTS];
static struct pollfd hosts[MOST_HOSTS + 1];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int earlier(const struct waiting *a, const struct waiting *b) {
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void push(struct waiting packet) {
    if (count == room && !(heap = realloc(heap, (room = room ? 2 * room : 1024) * sizeof *heap)))
        abort();
    size_t at = count++;
    for (; at && earlier(&packet, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = packet;
}

static struct waiting pop(void) {
    struct waiting first = heap[0], last = heap[--count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < count) {
        if (child + 1 < count && earlier(&heap[child + 1], &heap[child])) child++;
        if (!earlier(&heap[child], &last)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

/* Waits for a queue that serves `bytes` in `takes` seconds; -1: it is full. */
static double through(double *free_at, double at, double takes, double queue) {
    if (*free_at < at) *free_at = at;
    if (*free_at - at > queue) return -1;
    return *free_at += takes;
}

static int device(const char *namespace, int offload) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET)) return -1;
    close(there);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), size = HEADER;
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "eth0");
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETVNETHDRSZ, &size) ||
        ioctl(fd, TUNSETOFFLOAD, offload ? TUN_F_CSUM | TUN_F_TSO4 : 0))
        return -1;
    return fd;
}

int main(int given, char **texts) {
    if (given < 7 || given - 6 > MOST_HOSTS) return 2;
    double byte_s = 8e-6 / atof(texts[1]), cap = atof(texts[2]), flow_s = cap > 0 ? 8e-6 / cap : 0;
    double delay = atof(texts[3]) / 1e3, loss = atof(texts[4]), queue = atof(texts[5]) / 1e3;
    int number = given - 6;
    static unsigned char read_here[PACKET];
    uint64_t order = 0;
    srand48(1);
    for (int each = 0; each < number; each++) {
        hosts[each].events = POLLIN;
        /* Long packets cost less; but a loss must be that of one. */
        if ((hosts[each].fd = device(texts[6 + each], loss == 0)) < 0) {
            perror(texts[6 + each]);
            return 1;
        }
    }
    hosts[number] = (struct pollfd){.fd = 0, .events = POLLIN};
    /* A network waits for no processor. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 10});
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct timespec wait = {1, 0};
        if (count) {
            double left = heap[0].due - now();
            if (left < 0) left = 0;
            if (left < 1) wait = (struct timespec){0, (long)(left * 1e9)};
        }
        if (ppoll(hosts, number + 1, &wait, NULL) < 0 && errno != EINTR) return 1;
        if (hosts[number].revents) return 0;
        for (int from = 0; from < number; from++) {
            if (!(hosts[from].revents & POLLIN)) continue;
            for (int turn = 0; turn < BATCH; turn++) {
                ssize_t size = read(hosts[from].fd, read_here, PACKET);
                if (size < HEADER + 20) break;
                const unsigned char *ip = read_here + HEADER, *ports = ip + 4 * (ip[0] & 15);
                int to = ip[19] - 1;
                if (ip[0] >> 4 != 4 || to < 0 || to >= number || to == from) continue;
                double length = size - HEADER, at = now();
                unsigned flow = (ip[15] * 131 + ip[19]) * 31;
                if (ip[9] == 6) flow += (ports[0] << 8 | ports[1]) * 257 + (ports[2] << 8 | ports[3]);
                if (flow_s) at = through(&flow_free[flow % FLOWS], at, length * flow_s, 1);
                if (at < 0 || (loss && drand48() < loss)) continue;
                unsigned char *bytes = malloc(size);
                if (!bytes) abort();
                memcpy(bytes, read_here, size);
                push((struct waiting){at, order++, to, (int)size, 0, bytes});
            }
        }
        double at = now();
        while (count && heap[0].due <= at) {
            struct waiting packet = pop();
            if (!packet.arrives) {
                /* Only now: packets come to this link in the order in which their flows let them. */
                double takes = (packet.size - HEADER) * byte_s;
                double there = through(&down_free[packet.to], packet.due, takes, queue);
                if (there < 0) {
                    free(packet.bytes);
                    continue;
                }
                packet.arrives = 1;
                packet.due = there + delay;
                push(packet);
                continue;
            }
            if (write(hosts[packet.to].fd, packet.bytes, packet.size) < 0 && errno == EIO) return 1;
            free(packet.bytes);
        }
    }
}

/* Runs work of exactly known duration on a GPU through the driver interface, without a runtime or an interpreter.
 *
 *   work KIND SECONDS [PARAMETER]
 *
 * Kernels spin for a given time, independent of the GPU's clock, so completed kernels give a share of the GPU's time.
 *   tiny     5 us, launched back to back          big      200 us            long     12 ms
 *   deep     60 x 12 ms without a wait            streams  200 us on 4 streams, round robin
 *   threads  200 us from 3 threads                graph    graphs of 20 x 200 us
 *   sync     200 us, a wait after every 10        own      200 us in the per-thread default stream
 *   churn    200 us, each in a new stream that is destroyed at once
 *   train    steps of 52 ms in kernels of 125 us, a wait after each, then 3.3 ms of the host: busy for 94 % of the time alone
 *   infer    the same with steps of 17.5 ms and 1.1 ms of the host
 *   adds     5 us, launched every 20 us, a wait after every 500: busy for 25 % of the time alone
 *   up, down 16 MiB between pinned memory and GPU   page  4 MiB from pageable memory, synchronous
 *   within   256 MiB copied on the GPU            fill     256 MiB set on the GPU
 *            These five count as transfers at 50 GB/s, at 10 GB/s from pageable memory, and at 2,000 GB/s on the GPU.
 *            Only the ratio of two runs is meaningful.
 *   request  1 ms of work every 20 ms: prints the latencies of the requests
 *   return   500 ms of back-to-back work, 500 ms idle: prints the share in each 10 ms after the idle time
 *   launch   nanoseconds per launch of an empty kernel. Alternates between the function that dlsym finds and the driver's
 *            own function. Prints the shortest time of each, and the median of the differences in 60 rounds
 *   alloc    the same for allocation + free of 1 MiB in stream order
 *   graphs   the same for a graph of 20 empty kernels
 *
 * Prints: KIND share PERCENT windows LEAST MOST (percent of the time in kernels, in total and in intervals of 1 s).
 * Build: cc -O2 -o work work.c -ldl -lpthread */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *Handle;
static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuCtxCreate)(Handle *, unsigned, int), (*cuCtxSetCurrent)(Handle);
static int (*cuModuleLoadData)(Handle *, const void *), (*cuModuleGetFunction)(Handle *, Handle, const char *);
static int (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
static int (*cuStreamCreate)(Handle *, unsigned), (*cuStreamSynchronize)(Handle), (*cuCtxSynchronize)(void);
static int (*cuStreamBeginCapture)(Handle, int), (*cuStreamEndCapture)(Handle, Handle *), (*cuGraphInstantiate)(Handle *, Handle, unsigned long long);
static int (*cuLaunchKernel_ptsz)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
static int (*cuStreamDestroy)(Handle), (*cuMemAlloc)(uint64_t *, size_t), (*cuMemAllocHost)(void **, size_t), (*cuMemcpyHtoD)(uint64_t, const void *, size_t);
static int (*cuMemcpyHtoDAsync)(uint64_t, const void *, size_t, Handle), (*cuMemcpyDtoHAsync)(void *, uint64_t, size_t, Handle);
static int (*cuMemcpyDtoDAsync)(uint64_t, uint64_t, size_t, Handle), (*cuMemsetD32Async)(uint64_t, unsigned, size_t, Handle);
static int (*cuGraphLaunch)(Handle, Handle), (*cuMemAllocAsync)(uint64_t *, size_t, Handle), (*cuMemFreeAsync)(uint64_t, Handle);

static const char PTX[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n"
    ".visible .entry spin(.param .u64 length) {\n"
    "  .reg .u64 %t<4>; .reg .pred %p;\n"
    "  ld.param.u64 %t0, [length]; mov.u64 %t1, %globaltimer;\n"
    "again: mov.u64 %t2, %globaltimer; sub.u64 %t3, %t2, %t1; setp.lt.u64 %p, %t3, %t0; @%p bra again;\n"
    "  ret; }\n";

static Handle context, spin, empty, streams[4];

#define CHECK(call)                                                                    \
    do {                                                                               \
        int status = (call);                                                           \
        if (status) { fprintf(stderr, "%s: CUDA error %d\n", #call, status); exit(1); } \
    } while (0)

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void pause_until(uint64_t when) {
    struct timespec t = {when / 1000000000, when % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0);
}

/* Keeps the processor busy, as work of the host does. */
static void spin_until(uint64_t when) {
    while (now() < when);
}

static void *symbol(Handle library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) { fprintf(stderr, "the driver has no %s\n", name); exit(1); }
    return found;
}

/* Finds the driver's own function in the symbol table of its library, so an interposed library cannot intercept it. */
static void *own_symbol(Handle library, const char *name) {
    struct link_map *map = library;
    const ElfW(Sym) *symbols = 0;
    const char *names = 0;
    const uint32_t *hash = 0, *gnu_hash = 0;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        const void *place = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = place;
        if (entry->d_tag == DT_STRTAB) names = place;
        if (entry->d_tag == DT_HASH) hash = place;
        if (entry->d_tag == DT_GNU_HASH) gnu_hash = place;
    }
    /* DT_HASH holds the number of symbols. With DT_GNU_HASH, the end of the last chain gives the number. */
    uint32_t count = hash ? hash[1] : 0;
    if (!hash && gnu_hash) {
        const uint32_t *buckets = gnu_hash + 4 + gnu_hash[2] * 2, *chain = buckets + gnu_hash[0] - gnu_hash[1];
        for (uint32_t bucket = 0; bucket < gnu_hash[0]; bucket++) count = buckets[bucket] > count ? buckets[bucket] : count;
        while (count && !(chain[count++] & 1));
    }
    for (uint32_t place = 0; place < count; place++)
        if (!strcmp(names + symbols[place].st_name, name) && symbols[place].st_value) return (void *)(map->l_addr + symbols[place].st_value);
    return symbol(library, name);
}

static void launch(uint64_t length, Handle stream) {
    void *arguments[] = {&length};
    CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0));
}

/* The copy or fill of this run, and the nanoseconds that one transfer counts. */
static struct { int kind; uint64_t from, to, length; void *pinned, *ordinary; } moved;
enum { NONE, UP, DOWN, PAGE, WITHIN, FILL };

static void move(void) {
    switch (moved.kind) {
    case UP: CHECK(cuMemcpyHtoDAsync(moved.to, moved.pinned, 16 << 20, streams[0])); break;
    case DOWN: CHECK(cuMemcpyDtoHAsync(moved.pinned, moved.from, 16 << 20, streams[0])); break;
    case PAGE: CHECK(cuMemcpyHtoD(moved.to, moved.ordinary, 4 << 20)); break;
    case WITHIN: CHECK(cuMemcpyDtoDAsync(moved.to, moved.from, 256 << 20, streams[0])); break;
    case FILL: CHECK(cuMemsetD32Async(moved.to, 7, 64 << 20, streams[0])); break;
    }
}

static void make_move(const char *kind) {
    const char *kinds[] = {"up", "down", "page", "within", "fill"};
    uint64_t lengths[] = {335000, 335000, 420000, 134000, 134000};
    for (int i = 0; i < 5; i++) if (!strcmp(kind, kinds[i])) moved.kind = i + 1, moved.length = lengths[i];
    if (!moved.kind) return;
    CHECK(cuMemAlloc(&moved.from, 256 << 20)); CHECK(cuMemAlloc(&moved.to, 256 << 20)); CHECK(cuMemAllocHost(&moved.pinned, 16 << 20));
    memset(moved.ordinary = malloc(4 << 20), 1, 4 << 20);
}

/* Runs one batch of work and waits for its end. Returns the nanoseconds of kernels in it. */
static uint64_t batch(const char *kind, Handle graph) {
    uint64_t length = !strcmp(kind, "tiny") ? 5000 : !strcmp(kind, "long") || !strcmp(kind, "deep") ? 12000000 : 200000;
    int count = !strcmp(kind, "tiny") ? 2000 : !strcmp(kind, "deep") ? 60 : !strcmp(kind, "long") ? 4 : !strcmp(kind, "sync") ? 10 : 100;
    if (graph) {
        for (int i = 0; i < 5; i++) CHECK(cuGraphLaunch(graph, streams[0]));
        CHECK(cuStreamSynchronize(streams[0]));
        return 5 * 20 * length;
    }
    if (moved.kind) {
        for (int i = 0; i < 20; i++) move();
        CHECK(cuStreamSynchronize(streams[0]));
        return 20 * moved.length;
    }
    if (!strcmp(kind, "own")) {
        void *arguments[] = {&length};
        for (int i = 0; i < count; i++) CHECK(cuLaunchKernel_ptsz(spin, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0));
        CHECK(cuCtxSynchronize());
        return count * length;
    }
    if (!strcmp(kind, "churn")) {
        for (int i = 0; i < count; i++) {
            Handle stream;
            CHECK(cuStreamCreate(&stream, 1));
            launch(length, stream);
            CHECK(cuStreamDestroy(stream));
        }
        CHECK(cuCtxSynchronize());
        return count * length;
    }
    int is_train = !strcmp(kind, "train");
    if (is_train || !strcmp(kind, "infer")) {
        int kernels = is_train ? 416 : 140;
        for (int i = 0; i < kernels; i++) launch(125000, streams[0]);
        CHECK(cuStreamSynchronize(streams[0]));
        spin_until(now() + (is_train ? 3300000 : 1100000));
        return kernels * 125000ull;
    }
    if (!strcmp(kind, "adds")) {
        for (int i = 0; i < 500; i++) {
            uint64_t next = now() + 20000;
            launch(5000, streams[0]);
            spin_until(next);
        }
        CHECK(cuStreamSynchronize(streams[0]));
        return 500 * 5000ull;
    }
    int turns = !strcmp(kind, "streams") ? 4 : 1;
    for (int i = 0; i < count; i++) launch(length, streams[i % turns]);
    for (int i = 0; i < turns; i++) CHECK(cuStreamSynchronize(streams[i]));
    return count * length;
}

static struct { const char *kind; double seconds; volatile uint64_t done[4]; volatile int stop; } shared;

static void *thread(void *place) {
    CHECK(cuCtxSetCurrent(context));
    int me = (int)(intptr_t)place;
    while (!shared.stop) {
        for (int i = 0; i < 50; i++) launch(200000, streams[me]);
        CHECK(cuStreamSynchronize(streams[me]));
        shared.done[me] += 50 * 200000ull;
    }
    return 0;
}

static Handle capture(Handle function, uint64_t length) {
    Handle graph, ready;
    void *arguments[] = {&length};
    CHECK(cuStreamBeginCapture(streams[0], 0));
    for (int i = 0; i < 20; i++) CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, streams[0], length ? arguments : 0, 0));
    CHECK(cuStreamEndCapture(streams[0], &graph));
    CHECK(cuGraphInstantiate(&ready, graph, 0));
    return ready;
}

static int by_size(const void *a, const void *b) {
    double x = *(double *)a, y = *(double *)b;
    return (x > y) - (x < y);
}

/* Prints the share of time in total and in intervals of 1 s. It exceeds 100 if kernels of several streams or threads overlap. */
static void report_share(const char *kind, double seconds) {
    Handle graph = !strcmp(kind, "graph") ? capture(spin, 200000) : 0;
    int threads = !strcmp(kind, "threads") ? 3 : 0;
    pthread_t made[3];
    for (int i = 0; i < threads; i++) pthread_create(&made[i], 0, thread, (void *)(intptr_t)i);
    uint64_t warm = now() + 2000000000ull, begin = 0, window = 0, done = 0, at_window = 0, at_begin = 0;
    double least = 1e9, most = 0;
    for (;;) {
        if (threads) {
            pause_until(now() + 5000000);
            done = shared.done[0] + shared.done[1] + shared.done[2];
        } else {
            done += batch(kind, graph);
        }
        uint64_t time = now();
        if (!begin) {
            if (time >= warm) begin = window = time, at_begin = at_window = done;
            continue;
        }
        if (time - window >= 1000000000ull) {
            double share = 100.0 * (done - at_window) / (time - window);
            least = share < least ? share : least, most = share > most ? share : most;
            window = time, at_window = done;
        }
        if (time - begin >= seconds * 1e9) {
            printf("%s share %.2f windows %.1f %.1f\n", kind, 100.0 * (done - at_begin) / (time - begin), least, most);
            break;
        }
    }
    shared.stop = 1;
    for (int i = 0; i < threads; i++) pthread_join(made[i], 0);
}

static void report_requests(double seconds) {
    int count = seconds * 50;
    double *took = malloc(count * sizeof *took);
    uint64_t next = now() + 1000000000ull;
    for (int i = -25; i < count; i++, next += 20000000) {
        pause_until(next);
        uint64_t begin = now();
        launch(1000000, streams[0]);
        CHECK(cuStreamSynchronize(streams[0]));
        if (i >= 0) took[i] = (now() - begin) / 1e6;
        if (now() > next + 20000000) next = now();
    }
    qsort(took, count, sizeof *took, by_size);
    printf("request ms p50 %.2f p99 %.2f most %.2f of %d\n", took[count / 2], took[count * 99 / 100], took[count - 1], count);
}

static void report_returns(double seconds) {
    enum { STEPS = 50 };
    double reached[STEPS] = {0}, first = 0, latest = 0;
    int rounds = 0;
    for (uint64_t end = now() + seconds * 1e9; now() < end; rounds++) {
        uint64_t begin = now();
        int is_first = 1;
        while (now() < begin + 500000000) {
            uint64_t from = now();
            for (int i = 0; i < 5; i++) launch(200000, streams[0]);
            CHECK(cuStreamSynchronize(streams[0]));
            uint64_t to = now();
            if (is_first) {
                double took = (to - from) / 1e6;
                first += took, latest = took > latest ? took : latest, is_first = 0;
            }
            int step = (to - begin) / 10000000;
            if (step < STEPS) reached[step] += 1e6;
        }
        pause_until(begin + 1000000000ull);
    }
    printf("return first ms mean %.1f most %.1f; share per 10 ms after return:", first / rounds, latest);
    for (int i = 0; i < 20; i++) printf(" %.0f", reached[i] / rounds / 1e5);
    double later = 0;
    for (int i = 5; i < STEPS; i++) later += reached[i] / rounds / 1e5 / (STEPS - 5);
    printf("; from 50 ms on %.1f\n", later);
}

static void report_cost(const char *kind, Handle library) {
    enum { ROUNDS = 60 };
    int is_alloc = !strcmp(kind, "alloc"), count = !strcmp(kind, "launch") ? 4000 : is_alloc ? 5000 : 1000;
    Handle graph = !strcmp(kind, "graphs") ? capture(empty, 0) : 0;
    __typeof__(cuLaunchKernel) launches[] = {cuLaunchKernel, own_symbol(library, "cuLaunchKernel")};
    __typeof__(cuGraphLaunch) graphs[] = {cuGraphLaunch, own_symbol(library, "cuGraphLaunch")};
    __typeof__(cuMemAllocAsync) allocs[] = {cuMemAllocAsync, own_symbol(library, "cuMemAllocAsync")};
    __typeof__(cuMemFreeAsync) frees[] = {cuMemFreeAsync, own_symbol(library, "cuMemFreeAsync")};
    double least[2] = {1e9, 1e9}, more[ROUNDS];
    for (int round = -4; round < ROUNDS; round++) {
        double cost[2] = {0, 0};
        for (int turn = 0; turn < 4; turn++) {
            /* Alternates in the order A B B A, so that a gradual change of the host's speed affects both variants equally. */
            int way = (turn == 1 || turn == 2) ^ (round & 1);
            uint64_t begin = 0, memory;
            for (int i = -count / 10; i < count; i++) {
                if (!i) { CHECK(cuStreamSynchronize(streams[0])); begin = now(); }
                if (graph) CHECK(graphs[way](graph, streams[0]));
                else if (is_alloc) { CHECK(allocs[way](&memory, 1 << 20, streams[0])); CHECK(frees[way](memory, streams[0])); }
                else CHECK(launches[way](empty, 1, 1, 1, 1, 1, 1, 0, streams[0], 0, 0));
            }
            CHECK(cuStreamSynchronize(streams[0]));
            double each = (now() - begin) / (double)count;
            cost[way] += each / 2, least[way] = each < least[way] ? each : least[way];
        }
        if (round >= 0) more[round] = cost[0] - cost[1];
    }
    qsort(more, ROUNDS, sizeof *more, by_size);
    printf("%s ns least %.0f driver %.0f more %.1f\n", kind, least[0], least[1], more[ROUNDS / 2]);
}

int main(int count, char **words) {
    if (count < 3) { fprintf(stderr, "usage: work KIND SECONDS (see the head of work.c)\n"); return 2; }
    const char *kind = words[1];
    double seconds = atof(words[2]);
    Handle library = dlopen("libcuda.so.1", RTLD_NOW), module;
    if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
#define FIND(function, name) function = symbol(library, name)
    FIND(cuInit, "cuInit"); FIND(cuDeviceGet, "cuDeviceGet"); FIND(cuCtxCreate, "cuCtxCreate_v2"); FIND(cuCtxSetCurrent, "cuCtxSetCurrent");
    FIND(cuModuleLoadData, "cuModuleLoadData"); FIND(cuModuleGetFunction, "cuModuleGetFunction"); FIND(cuLaunchKernel, "cuLaunchKernel");
    FIND(cuStreamCreate, "cuStreamCreate"); FIND(cuStreamSynchronize, "cuStreamSynchronize"); FIND(cuCtxSynchronize, "cuCtxSynchronize");
    FIND(cuStreamBeginCapture, "cuStreamBeginCapture_v2"); FIND(cuStreamEndCapture, "cuStreamEndCapture");
    FIND(cuGraphInstantiate, "cuGraphInstantiateWithFlags"); FIND(cuGraphLaunch, "cuGraphLaunch");
    FIND(cuLaunchKernel_ptsz, "cuLaunchKernel_ptsz"); FIND(cuStreamDestroy, "cuStreamDestroy_v2"); FIND(cuMemAlloc, "cuMemAlloc_v2");
    FIND(cuMemAllocHost, "cuMemAllocHost_v2"); FIND(cuMemcpyHtoD, "cuMemcpyHtoD_v2"); FIND(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    FIND(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2"); FIND(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2"); FIND(cuMemsetD32Async, "cuMemsetD32Async");
    FIND(cuMemAllocAsync, "cuMemAllocAsync"); FIND(cuMemFreeAsync, "cuMemFreeAsync");
    int device;
    CHECK(cuInit(0)); CHECK(cuDeviceGet(&device, 0)); CHECK(cuCtxCreate(&context, 0, device));
    CHECK(cuModuleLoadData(&module, PTX)); CHECK(cuModuleGetFunction(&spin, module, "spin")); CHECK(cuModuleGetFunction(&empty, module, "empty"));
    for (int i = 0; i < 4; i++) CHECK(cuStreamCreate(&streams[i], 1));
    if (!strcmp(kind, "request")) report_requests(seconds);
    else if (!strcmp(kind, "return")) report_returns(seconds);
    else if (!strcmp(kind, "launch") || !strcmp(kind, "alloc") || !strcmp(kind, "graphs")) report_cost(kind, library);
    else {
        make_move(kind);
        report_share(kind, seconds);
    }
    return 0;
}

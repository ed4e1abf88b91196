/* A program that uses a GPU through one of the library's entry points.
 * usage: tenant link|dlsym|proc|default|next
 * Reads commands from stdin, one per line, and answers each with one line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int S;
typedef void *H;
typedef uint64_t P;

/* The IPC handle of another process's memory, in the layout that the simulated driver reads. */
struct ipc { P address; size_t bytes; uint64_t rest[6]; };

#define FUNCTIONS(F)                                                                                                   \
    F(S, cuInit, , 2000, (unsigned))                                                                                   \
    F(S, cuDevicePrimaryCtxRetain, , 7000, (H *, int))                                                                 \
    F(S, cuDevicePrimaryCtxRelease, _v2, 11000, (int))                                                                 \
    F(S, cuCtxSetCurrent, , 4000, (H))                                                                                 \
    F(S, cuCtxCreate, _v2, 3020, (H *, unsigned, int))                                                                 \
    F(S, cuCtxDestroy, _v2, 4000, (H))                                                                                 \
    F(S, cuMemAlloc, _v2, 3020, (P *, size_t))                                                                         \
    F(S, cuMemAllocManaged, , 6000, (P *, size_t, unsigned))                                                           \
    F(S, cuMemAllocPitch, _v2, 3020, (P *, size_t *, size_t, size_t, unsigned))                                        \
    F(S, cuMemFree, _v2, 3020, (P))                                                                                    \
    F(S, cuArray3DCreate, _v2, 3020, (H *, const void *))                                                              \
    F(S, cuMipmappedArrayCreate, , 5000, (H *, const void *, unsigned))                                                \
    F(S, cuMemCreate, , 10020, (P *, size_t, const void *, unsigned long long))                                        \
    F(S, cuMemRelease, , 10020, (P))                                                                                   \
    F(S, cuMemMap, , 10020, (P, size_t, size_t, P, unsigned long long))                                                \
    F(S, cuMemUnmap, , 10020, (P, size_t))                                                                             \
    F(S, cuMemAllocAsync, , 11020, (P *, size_t, H))                                                                   \
    F(S, cuMemFreeAsync, , 11020, (P, H))                                                                              \
    F(S, cuMemPoolCreate, , 11020, (H *, const void *))                                                                \
    F(S, cuMemPoolDestroy, , 11020, (H))                                                                               \
    F(S, cuMemAllocFromPoolAsync, , 11020, (P *, size_t, H, H))                                                        \
    F(S, cuIpcOpenMemHandle, _v2, 11000, (P *, struct ipc, unsigned))                                                  \
    F(S, cuIpcCloseMemHandle, , 4010, (P))                                                                             \
    F(S, cuMemImportFromShareableHandle, , 10020, (P *, void *, int))                                                  \
    F(S, cuMemGetInfo, _v2, 3020, (size_t *, size_t *))                                                                \
    F(S, cuDeviceTotalMem, _v2, 3020, (size_t *, int))                                                                 \
    F(S, cuLaunchKernel, , 4000,                                                                                       \
      (H, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, H, void **, void **))                  \
    F(S, cuCtxSynchronize, , 2000, (void))                                                                             \
    F(S, cuStreamCreate, , 2000, (H *, unsigned))                                                                      \
    F(S, cuStreamDestroy, _v2, 4000, (H))                                                                              \
    F(S, cuStreamSynchronize, , 2000, (H))                                                                             \
    F(S, cuMemcpyHtoD, _v2, 3020, (P, const void *, size_t))                                                           \
    F(S, cuMemcpyDtoH, _v2, 3020, (void *, P, size_t))                                                                 \
    F(S, cuMemcpyDtoD, _v2, 3020, (P, P, size_t))                                                                      \
    F(S, cuMemcpyAsync, , 4000, (P, P, size_t, H))                                                                     \
    F(S, cuMemcpyHtoDAsync, _v2, 3020, (P, const void *, size_t, H))                                                   \
    F(S, cuMemcpyPeerAsync, , 4000, (P, H, P, H, size_t, H))                                                           \
    F(S, cuMemcpy2D, _v2, 3020, (const size_t *))                                                                      \
    F(S, cuMemcpyBatchAsync, _v2, 13000, (P *, P *, size_t *, size_t, void *, size_t *, size_t, H))                    \
    F(S, cuMemcpyAtoA, _v2, 3020, (H, size_t, H, size_t, size_t))                                                      \
    F(S, cuMemsetD32, _v2, 3020, (P, unsigned, size_t))                                                                \
    F(S, cuMemsetD8Async, , 3020, (P, unsigned char, size_t, H))                                                       \
    F(S, cuStreamBeginCapture, _v2, 10010, (H, int))                                                                   \
    F(S, cuStreamEndCapture, , 10000, (H, H *))                                                                        \
    F(S, cuGraphLaunch, , 10000, (H, H))                                                                               \
    F(S, cuGraphCreate, , 10000, (H *, unsigned))                                                                      \
    F(S, cuGraphAddMemAllocNode, , 11040, (H *, H, const H *, size_t, void *))                                         \
    F(S, cuGraphAddNode, _v2, 12030, (H *, H, const H *, const void *, size_t, void *))                                \
    F(S, cuGraphInstantiateWithFlags, , 11040, (H *, H, unsigned long long))                                           \
    F(S, cuGraphDestroy, , 10000, (H))                                                                                 \
    F(S, cuGraphExecDestroy, , 10000, (H))                                                                             \
    F(S, cuGreenCtxCreate, , 12040, (H *, void *, int, unsigned))                                                      \
    F(S, cuGreenCtxDestroy, , 12040, (H))                                                                              \
    F(S, cuDevicePrimaryCtxReset, _v2, 11000, (int))                                                                   \
    F(S, cuCtxSetLimit, , 3010, (int, size_t))

/* The forms of functions that use the per-thread default stream. */
#define PER_THREAD(F)                                                                                                  \
    F(S, cuLaunchKernel, _ptsz, 7000,                                                                                  \
      (H, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, H, void **, void **))                  \
    F(S, cuMemcpyHtoD, _v2_ptds, 7000, (P, const void *, size_t))                                                      \
    F(S, cuMemcpyHtoDAsync, _v2_ptsz, 7000, (P, const void *, size_t, H))

#define DECLARE(R, name, suffix, version, arguments) extern R name##suffix arguments; static R(*p_##name) arguments;
FUNCTIONS(DECLARE)
#define DECLARE_OWN(R, name, suffix, version, arguments) extern R name##suffix arguments; static R(*own_##name) arguments;
PER_THREAD(DECLARE_OWN)
extern S cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

static void by_link(void) {
#define LINK(R, name, suffix, version, arguments) p_##name = name##suffix;
    FUNCTIONS(LINK)
#define LINK_OWN(R, name, suffix, version, arguments) own_##name = name##suffix;
    PER_THREAD(LINK_OWN)
}

static void by_dlsym(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
#define LOOK(R, name, suffix, version, arguments) p_##name = (R(*) arguments)dlsym(driver, #name #suffix);
    FUNCTIONS(LOOK)
#define LOOK_OWN(R, name, suffix, version, arguments) own_##name = (R(*) arguments)dlsym(driver, #name #suffix);
    PER_THREAD(LOOK_OWN)
}

/* Looks up functions with RTLD_DEFAULT or RTLD_NEXT. The result depends on the calling object. */
static void by_order(void *order) {
#define FIND(R, name, suffix, version, arguments) p_##name = (R(*) arguments)dlsym(order, #name #suffix);
    FUNCTIONS(FIND)
#define FIND_OWN(R, name, suffix, version, arguments) own_##name = (R(*) arguments)dlsym(order, #name #suffix);
    PER_THREAD(FIND_OWN)
}

static void by_proc_address(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    S (*find)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int found;
#define ASK(R, name, suffix, version, arguments) find(#name, (void **)&p_##name, version, 0, &found);
    FUNCTIONS(ASK)
#define ASK_OWN(R, name, suffix, version, arguments) find(#name, (void **)&own_##name, version, 2, &found);
    PER_THREAD(ASK_OWN)
}

extern S cuArray3DCreate(H *, const void *);

/* Creates a graph that allocates memory when it runs, and runs it once. `way` selects how the allocation
 * gets into the graph: `graph` by cuGraphAddMemAllocNode, `captured` by a capture, else by cuGraphAddNode. */
static S remember(size_t bytes, const char *way, H *made) {
    H graph, node, stream;
    P p;
    S s;
    uint64_t any[32] = {10}, *allocation = any + 2;
    allocation[0] = 1, allocation[1] = 1, allocation[13] = bytes; /* pinned memory, on device 0 */
    if (!strcmp(way, "captured")) {
        s = p_cuStreamCreate(&stream, 0) | p_cuStreamBeginCapture(stream, 0);
        if (s) return s;
        s = p_cuMemAllocAsync(&p, bytes, stream);
        p_cuStreamEndCapture(stream, &graph);
    } else {
        p_cuGraphCreate(&graph, 0);
        s = !strcmp(way, "graph") ? p_cuGraphAddMemAllocNode(&node, graph, 0, 0, allocation) : p_cuGraphAddNode(&node, graph, 0, 0, 0, any);
    }
    if (s == 0) s = p_cuGraphInstantiateWithFlags(made, graph, 0);
    p_cuGraphDestroy(graph);
    return s ? s : p_cuGraphLaunch(*made, 0);
}

static int device;
static H lingers[2];
static P held[100000];
static int holds;

static S take(const char *way, size_t bytes) {
    P p = 0;
    H h = 0;
    size_t pitch;
    S s = 1;
    struct { int type, handles, location, id; uint64_t rest[16]; } on_gpu = {1, 0, 1, device, {0}}, on_host = {1, 0, 2, 0, {0}};
    struct { size_t width, height, depth; unsigned format, channels, flags; } array = {1024, bytes / 4096, 0, 0x20, 1, 0};
    if (!strcmp(way, "plain")) s = p_cuMemAlloc(&p, bytes);
    if (!strcmp(way, "managed")) s = p_cuMemAllocManaged(&p, bytes, 1);
    if (!strcmp(way, "pitch")) s = p_cuMemAllocPitch(&p, &pitch, 1 << 20, bytes >> 20, 4);
    if (!strcmp(way, "array")) s = p_cuArray3DCreate(&h, &array);
    if (!strcmp(way, "layers")) { /* layers of 4 MiB, each with all mipmap levels */
        array.height = 1024, array.depth = bytes >> 22, array.flags = 1;
        s = p_cuMipmappedArrayCreate(&h, &array, 11);
    }
    if (!strcmp(way, "vmm")) s = p_cuMemCreate(&p, bytes, &on_gpu, 0);
    if (!strcmp(way, "host")) s = p_cuMemCreate(&p, bytes, &on_host, 0);
    if (!strcmp(way, "async")) s = p_cuMemAllocAsync(&p, bytes, 0);
    if (!strcmp(way, "left")) { /* allocates from a pool and destroys the pool at once */
        s = p_cuMemPoolCreate(&h, &on_gpu);
        if (s == 0) s = p_cuMemAllocFromPoolAsync(&p, bytes, h, 0), s |= p_cuMemPoolDestroy(h);
    }
    if (!strcmp(way, "opened")) s = p_cuIpcOpenMemHandle(&p, (struct ipc){0x7000, bytes, {0}}, 1);
    if (!strcmp(way, "context")) s = p_cuCtxCreate(&h, 0, 0);
    if (!strcmp(way, "green")) s = p_cuGreenCtxCreate(&h, 0, 0, 0);
    if (!strcmp(way, "heap")) s = p_cuCtxSetLimit(2, bytes);
    if (!strcmp(way, "graph") || !strcmp(way, "node") || !strcmp(way, "captured")) s = remember(bytes, way, &h);
    if (!strcmp(way, "old-array")) {
        unsigned old[6] = {1024, bytes / 4096, 0, 0x20, 1, 0};
        s = cuArray3DCreate(&h, old);
    }
    if (s == 0 && holds < 100000) held[holds++] = p ? p : (P)h;
    return s;
}

static S give(const char *way, P p) {
    if (!strcmp(way, "vmm") || !strcmp(way, "host")) return p_cuMemRelease(p);
    if (!strcmp(way, "async") || !strcmp(way, "left")) return p_cuMemFreeAsync(p, 0);
    if (!strcmp(way, "opened")) return p_cuIpcCloseMemHandle(p);
    if (!strcmp(way, "context")) return p_cuCtxDestroy((H)p);
    if (!strcmp(way, "green")) return p_cuGreenCtxDestroy((H)p);
    if (!strcmp(way, "graph") || !strcmp(way, "node") || !strcmp(way, "captured")) return p_cuGraphExecDestroy((H)p);
    return p_cuMemFree(p);
}

static struct { size_t us, batches; S status; H context; volatile int has_ended; } together;

static S begin(void) {
    H context;
    S s = p_cuInit(0);
    if (s == 0) s = p_cuDevicePrimaryCtxRetain(&context, device);
    if (s == 0) s = p_cuCtxSetCurrent(context);
    together.context = context;
    return s;
}

/* Does nothing for a while, so that other threads meet this one at different points. No result depends on how long
 * that is. */
static void spin(size_t steps) {
    for (volatile size_t step = 0; step < steps; step++);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Starts work of `us` microseconds. `way` selects a kernel or a transfer, which takes a nanosecond per byte. */
static S start(const char *way, size_t us) {
    static char host[1];
    H stream = 0;
    size_t bytes = us * 1000, copy[16] = {0};
    copy[14] = 1000, copy[15] = us;
    if (!strcmp(way, "up")) return p_cuMemcpyHtoD(1, host, bytes);
    if (!strcmp(way, "own-up")) return own_cuMemcpyHtoD(1, host, bytes);
    if (!strcmp(way, "down")) return p_cuMemcpyDtoH(host, 1, bytes);
    if (!strcmp(way, "within")) return p_cuMemcpyDtoD(1, 2, bytes);
    if (!strcmp(way, "any-later")) return p_cuMemcpyAsync(1, 2, bytes, 0);
    if (!strcmp(way, "up-later")) return p_cuMemcpyHtoDAsync(1, host, bytes, 0);
    if (!strcmp(way, "own-up-later")) return own_cuMemcpyHtoDAsync(1, host, bytes, 0);
    if (!strcmp(way, "peer-later")) return p_cuMemcpyPeerAsync(1, 0, 2, 0, bytes, 0);
    if (!strcmp(way, "2d")) return p_cuMemcpy2D(copy);
    if (!strcmp(way, "batch-later")) return p_cuMemcpyBatchAsync(0, 0, &bytes, 1, 0, 0, 0, 0);
    if (!strcmp(way, "fill")) return p_cuMemsetD32(1, 0, bytes / 4);
    if (!strcmp(way, "fill-later")) return p_cuMemsetD8Async(1, 0, bytes, 0);
    if (!strcmp(way, "own")) return own_cuLaunchKernel((H)bytes, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
    if (!strcmp(way, "churn")) { /* a stream for each kernel, destroyed before the kernel ends */
        S s = p_cuStreamCreate(&stream, 0);
        s |= p_cuLaunchKernel((H)bytes, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
        return s | p_cuStreamDestroy(stream);
    }
    return p_cuLaunchKernel((H)bytes, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
}

/* The body of a thread that launches batches of ten kernels into its own stream until `together.has_ended`. */
static void *beside(void *count) {
    H stream;
    together.status |= p_cuCtxSetCurrent(together.context) | p_cuStreamCreate(&stream, 1);
    for (size_t batch = 0; batch < together.batches && !together.has_ended; batch++) {
        for (int i = 0; i < 10; i++, ++*(size_t *)count)
            together.status |= p_cuLaunchKernel((H)(together.us * 1000), 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
        p_cuStreamSynchronize(stream);
    }
    return 0;
}

/* The body of a thread that waits in the simulated driver for a kernel of another thread. */
static void *depend(void *unused) {
    together.status = p_cuCtxSetCurrent(together.context) | p_cuMemcpyAtoA(0, 0, 0, 0, 1);
    return 0;
}

/* The thread of the commands `depend` and `gpus`. */
static pthread_t waiting;

int main(int argc, char **argv) {
    char line[256], word[64], way[64];
    H stream = (H)0x5000;
    if (argc < 2) return 2;
    if (!strcmp(argv[1], "link")) by_link();
    if (!strcmp(argv[1], "dlsym")) by_dlsym();
    if (!strcmp(argv[1], "proc")) by_proc_address();
    if (!strcmp(argv[1], "default")) by_order(RTLD_DEFAULT);
    if (!strcmp(argv[1], "next")) by_order(RTLD_NEXT);
    setvbuf(stdout, 0, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        size_t mib = 0, rounds = 0;
        way[0] = 0;
        sscanf(line, "%63s %63s %zu %zu", word, way, &mib, &rounds);
        if (!strcmp(word, "begin")) printf("%d\n", begin());
        else if (!strcmp(word, "end")) printf("%d\n", p_cuDevicePrimaryCtxRelease(0));
        else if (!strcmp(word, "reset")) printf("%d\n", p_cuDevicePrimaryCtxReset(0));
        else if (!strcmp(word, "init")) printf("%d\n", p_cuInit(0));
        else if (!strcmp(word, "on")) printf("%d\n", device = atoi(way)); /* the device of the next `begin` */
        else if (!strcmp(word, "take")) printf("%d\n", take(way, mib << 20));
        else if (!strcmp(word, "fill")) { /* allocates until a request fails; answers the count and the last status */
            int count = 0;
            S s;
            while ((s = take(way, mib << 20)) == 0 && count < 90000) count++;
            printf("%d %d\n", count, s);
        } else if (!strcmp(word, "free")) {
            S s = 0;
            while (holds) s |= give(way, held[--holds]);
            printf("%d\n", s);
        } else if (!strcmp(word, "info")) {
            size_t free = 0, total = 0, all = 0;
            p_cuMemGetInfo(&free, &total);
            p_cuDeviceTotalMem(&all, device);
            printf("%zu %zu %zu\n", free >> 20, total >> 20, all >> 20);
        } else if (!strcmp(word, "import")) {
            /* imports memory of another process and maps it twice: `mib` MiB, and twice as much */
            P handle, at = 0x40000000;
            S s = p_cuMemImportFromShareableHandle(&handle, 0, 1) | p_cuMemMap(at, mib << 20, 0, handle, 0);
            s |= p_cuMemMap(2 * at, mib << 21, 0, handle, 0);
            printf("%d\n", s);
            held[0] = handle;
        } else if (!strcmp(word, "unimport")) {
            P at = 0x40000000;
            printf("%d\n", p_cuMemUnmap(at, mib << 20) | p_cuMemUnmap(2 * at, mib << 21) | p_cuMemRelease(held[0]));
        } else if (!strcmp(word, "churn")) { /* allocates and frees until it is killed */
            puts("0");
            for (;;) {
                if (take(way, mib << 20) == 0 && holds % 3 == 0)
                    while (holds) give(way, held[--holds]);
                else if (holds > 50)
                    while (holds) give(way, held[--holds]);
            }
        } else if (!strcmp(word, "race")) {
            /* allocates and frees `rounds` times; answers the number of successes */
            size_t won = 0;
            for (size_t round = 0; round < rounds; round++)
                if (take(way, mib << 20) == 0) { won++; give(way, held[--holds]); } else sched_yield();
            printf("%zu\n", won);
        } else if (!strcmp(word, "fork")) {
            /* a child that uses the GPU, before or after this process uses it */
            int status;
            pid_t child = fork();
            if (child == 0) {
                S s = begin();
                if (s == 0) s = take("plain", mib << 20);
                _exit(s);
            }
            waitpid(child, &status, 0);
            printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        } else if (!strcmp(word, "exec")) { /* becomes a new program, which keeps the process id */
            puts("0");
            execv("/proc/self/exe", argv);
        } else if (!strcmp(word, "run")) {
            /* `rounds` kernels of `mib` us, in tens; answers the status */
            S s = 0;
            for (size_t count = 0; count < rounds && s == 0; count += 10) {
                for (int i = 0; i < 10; i++) s |= start(way, mib);
                if (!strcmp(way, "sync")) p_cuCtxSynchronize();
            }
            printf("%d\n", s | p_cuCtxSynchronize());
        } else if (!strcmp(word, "cost")) {
            /* `mib` batches of `rounds` calls; answers the ns per call of the fastest batch */
            double least = 1e9;
            for (size_t i = 0; i < mib; i++) {
                double before = now();
                P p;
                for (size_t j = 0; j < rounds; j++)
                    if (!strcmp(way, "cold")) { /* fills the CPU cache, as the calls of a real driver do */
                        static volatile char used[128 << 10];
                        for (size_t k = 0; k < sizeof used; k += 64) used[k]++;
                        p_cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
                    } else if (!strcmp(way, "alloc")) { p_cuMemAllocAsync(&p, 1 << 20, 0); p_cuMemFreeAsync(p, 0); }
                    else p_cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
                double took = (now() - before) / rounds * 1e9;
                if (took < least) least = took;
            }
            printf("%.1f\n", least);
        } else if (!strcmp(word, "contexts")) {
            /* work in the default streams of `rounds` short-lived contexts and of a lasting one */
            S s = 0;
            for (size_t round = 0; round < rounds && s == 0; round++) {
                H other;
                s |= p_cuCtxCreate(&other, 0, device);
                for (int i = 0; i < 5; i++) {
                    s |= start("kernel", mib) | p_cuCtxSetCurrent(together.context);
                    s |= start("kernel", mib) | p_cuCtxSetCurrent(other);
                }
                if (round % 2) s |= p_cuCtxSynchronize();
                s |= p_cuCtxDestroy(other) | p_cuCtxSetCurrent(together.context);
            }
            printf("%d\n", s | p_cuCtxSynchronize());
        } else if (!strcmp(word, "beside")) {
            /* `rounds` captures while other threads launch; answers the number of invalidated captures */
            pthread_t threads[3];
            size_t counts[3] = {0}, ruined = 0;
            together.us = mib, together.batches = -1, together.has_ended = 0;
            for (int i = 0; i < 3; i++) pthread_create(&threads[i], 0, beside, &counts[i]);
            for (size_t round = 0; round < rounds; round++) {
                H stream, graph;
                p_cuStreamCreate(&stream, 1);
                p_cuStreamBeginCapture(stream, 0);
                for (int i = 0; i < 10; i++) p_cuLaunchKernel((H)1000, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0), spin(100000);
                ruined += p_cuStreamEndCapture(stream, &graph) != 0;
                p_cuStreamDestroy(stream);
            }
            together.has_ended = 1;
            for (int i = 0; i < 3; i++) pthread_join(threads[i], 0);
            printf("%zu %d\n", ruined, together.status);
        } else if (!strcmp(word, "regraph")) {
            /* a short graph, then one of `mib` us at the same address, each launched `rounds` times */
            H stream, graph;
            S s = p_cuStreamCreate(&stream, 0);
            for (size_t us = 10;; us = mib) {
                s |= p_cuStreamBeginCapture(stream, 0) | p_cuLaunchKernel((H)(us * 1000), 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
                s |= p_cuStreamEndCapture(stream, &graph);
                for (size_t i = 0; i < rounds; i++) s |= p_cuGraphLaunch(graph, stream);
                s |= p_cuStreamSynchronize(stream) | p_cuGraphDestroy(graph);
                if (us == mib) break;
            }
            printf("%d\n", s);
        } else if (!strcmp(word, "spoil")) { /* a capture that allocates memory and is invalidated */
            H stream, graph;
            P p;
            S s = p_cuStreamCreate(&stream, 0) | p_cuStreamBeginCapture(stream, 0) | p_cuMemAllocAsync(&p, mib << 20, stream);
            p_cuCtxSynchronize();
            printf("%d %d\n", s, p_cuStreamEndCapture(stream, &graph));
        } else if (!strcmp(word, "linger")) {
            /* a capture that begins while other work runs, and does not end */
            S s = p_cuStreamCreate(&lingers[0], 1) | p_cuStreamCreate(&lingers[1], 1);
            for (int i = 0; i < 10; i++) s |= p_cuLaunchKernel((H)(mib * 1000), 1, 1, 1, 1, 1, 1, 0, lingers[0], 0, 0);
            printf("%d\n", s | p_cuStreamBeginCapture(lingers[1], 0));
        } else if (!strcmp(word, "hurry")) { /* ends the capture of `linger` and launches work at once */
            H graph;
            S s = p_cuStreamEndCapture(lingers[1], &graph);
            for (int i = 0; i < 10; i++) s |= p_cuLaunchKernel((H)(mib * 1000), 1, 1, 1, 1, 1, 1, 0, lingers[0], 0, 0);
            printf("%d\n", s);
        } else if (!strcmp(word, "recapture")) {
            /* `mib` captures in a stream right after work; answers the number of invalidated captures */
            H stream, graph;
            size_t ruined = 0;
            p_cuStreamCreate(&stream, 1);
            for (size_t i = 0; i < mib; i++) {
                p_cuLaunchKernel((H)1000, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
                spin(i * 7919 % 500 * 1000); /* the monitor thread polls for the end of the work at some point */
                p_cuStreamBeginCapture(stream, 0);
                p_cuLaunchKernel((H)1000, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
                spin(200000);
                ruined += p_cuStreamEndCapture(stream, &graph) != 0;
            }
            printf("%zu\n", ruined);
        } else if (!strcmp(word, "depend")) { /* starts a thread that waits for the kernel of `release` */
            printf("%d\n", pthread_create(&waiting, 0, depend, 0));
        } else if (!strcmp(word, "release")) {
            S s = start("kernel", 100);
            pthread_join(waiting, 0);
            printf("%d\n", s | together.status);
        } else if (!strcmp(word, "threads")) {
            /* `rounds` batches of ten kernels of `mib` us from each of `way` threads with a stream of its own */
            pthread_t threads[64];
            size_t counts[64] = {0}, all = 0, count = atoi(way);
            together.us = mib, together.batches = rounds, together.has_ended = 0;
            for (int i = 0; i < count; i++) pthread_create(&threads[i], 0, beside, &counts[i]);
            for (int i = 0; i < count; i++) pthread_join(threads[i], 0), all += counts[i];
            printf("%zu %d\n", all, together.status);
        } else if (!strcmp(word, "gpus")) {
            /* a thread with ten kernels on the first GPU; answers when `rounds` copies to the second GPU have ended */
            static size_t unused;
            S s = begin();
            together.us = mib, together.batches = 1, together.has_ended = 0;
            pthread_create(&waiting, 0, beside, &unused);
            H context;
            s |= p_cuDevicePrimaryCtxRetain(&context, 1) | p_cuCtxSetCurrent(context);
            for (size_t round = 0; round < rounds; round++) s |= start("up", mib);
            printf("%d\n", s);
        } else if (!strcmp(word, "join")) { /* waits for the thread of `gpus` */
            pthread_join(waiting, 0);
            printf("%d\n", together.status);
        } else if (!strcmp(word, "abandon")) { /* a capture that ends because its stream is destroyed */
            H stream;
            S s = p_cuStreamCreate(&stream, 0) | p_cuStreamBeginCapture(stream, 0);
            printf("%d\n", s | p_cuStreamDestroy(stream));
        } else if (!strcmp(word, "capture")) { /* a graph of ten kernels of `mib` microseconds */
            H stream, graph;
            S s = p_cuStreamCreate(&stream, 0);
            s |= p_cuStreamBeginCapture(stream, 0);
            for (int i = 0; i < 10; i++) s |= p_cuLaunchKernel((H)(mib * 1000), 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
            s |= p_cuStreamEndCapture(stream, &graph);
            s |= p_cuGraphLaunch(graph, stream);
            printf("%d\n", s | p_cuCtxSynchronize());
        } else puts("?");
    }
    return 0;
}

/* A shared object that is linked with the driver, for escape.c. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#define FUNCTIONS(F)                                                                                                   \
    F(cuInit) F(cuDevicePrimaryCtxRetain) F(cuCtxSetCurrent) F(cuMemAlloc_v2) F(cuLaunchKernel) F(cuVDPAUCtxCreate_v2)

#define DECLARE(name) extern int name();
FUNCTIONS(DECLARE)

/* Returns the function of this name that the loader has bound to this object. */
void *linked(const char *name) {
#define BOUND(function) if (!strcmp(name, #function)) return (void *)function;
    FUNCTIONS(BOUND)
    return 0;
}

/* Returns the function of this name by the `dlsym` that the loader has bound to this object. */
void *looked_up(const char *name) {
    return dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name);
}

/* Returns the next function of this name behind this object. */
void *next(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

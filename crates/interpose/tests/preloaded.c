/* Another preloaded library, which wraps `malloc` and `dlsym` and looks functions up before `main`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

void *malloc(size_t size) {
    static void *(*real)(size_t);
    if (!real) real = dlsym(RTLD_NEXT, "malloc");
    return real(size);
}

void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    for (const char **version = (const char *[]){"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", 0}; !real && *version; version++)
        real = dlvsym(RTLD_NEXT, "dlsym", *version);
    return real(handle, name);
}

__attribute__((constructor)) static void early(void) {
    dlsym(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), "free");
}

/* A program that tries to reach the driver without the library.
 * usage: escape WAY [FILE]     FILE: plugin.so, or a copy of the driver
 * Reads commands from stdin, one per line, and answers each with the driver's status. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*lookup)(const char *);
typedef void *(*dlsym_t)(void *, const char *);

static const char *way, *file;
/* Functions of the object behind the library in the program's own scope. */
extern void *linked(const char *), *next(const char *);

static void *need(void *found) {
    if (!found) {
        fprintf(stderr, "%s: %s\n", way, dlerror());
        exit(3);
    }
    return found;
}

/* Returns the address of a function in a loaded object by its symbol table, without the loader's help. */
static void *walk(void *object, const char *name) {
    struct link_map *map;
    const Elf64_Sym *symbols = 0;
    const char *strings = 0;
    dlinfo(object, RTLD_DI_LINKMAP, &map);
    for (const Elf64_Dyn *entry = map->l_ld; entry->d_tag; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) strings = (void *)entry->d_un.d_ptr;
    }
    /* The strings follow the symbols. */
    for (const Elf64_Sym *symbol = symbols; (const char *)symbol < strings; symbol++)
        if (symbol->st_shndx && !strcmp(strings + symbol->st_name, name)) return (void *)(map->l_addr + symbol->st_value);
    return 0;
}

static void *by_libc(const char *name, void *dlsym_of_libc) {
    return ((dlsym_t)dlsym_of_libc)(dlopen("libcuda.so.1", RTLD_LAZY), name);
}

static void *versioned(void *where) {
    void *found = dlvsym(where, "dlsym", "GLIBC_2.34");
    if (!found) found = dlvsym(where, "dlsym", "GLIBC_2.2.5");
    return need(found ? found : dlvsym(where, "dlsym", "GLIBC_2.17"));
}

static void *find(const char *name) {
    static void *object, *libc;
    if (!libc) libc = dlopen("libc.so.6", RTLD_LAZY);
    if (!strcmp(way, "deepbind-linked") || !strcmp(way, "deepbind-dlsym")) {
        if (!object) object = need(dlopen(file, RTLD_NOW | RTLD_DEEPBIND));
        return ((lookup)need(dlsym(object, strcmp(way, "deepbind-dlsym") ? "linked" : "looked_up")))(name);
    }
    if (!strcmp(way, "dlsym-of-libc")) return by_libc(name, need(dlsym(libc, "dlsym")));
    if (!strcmp(way, "dlsym-behind")) return by_libc(name, need(next("dlsym")));
    if (!strcmp(way, "next-behind")) return next(name);
    if (!strcmp(way, "dlvsym-of-libc")) return by_libc(name, versioned(libc));
    if (!strcmp(way, "dlvsym-default")) return by_libc(name, versioned(RTLD_DEFAULT));
    if (!strcmp(way, "dlvsym-next")) return by_libc(name, versioned(RTLD_NEXT));
    if (!strcmp(way, "dlopen-of-libc")) {
        void *(*open)(const char *, int) = need(dlsym(libc, "dlopen"));
        if (!object) object = need(open(file, RTLD_NOW | RTLD_DEEPBIND));
        return ((lookup)need(dlsym(object, "linked")))(name);
    }
    if (!strcmp(way, "dlmopen-driver")) {
        if (!object) object = need(dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW));
        return dlsym(object, name);
    }
    if (!strcmp(way, "dlmopen-plugin") || !strcmp(way, "dlmopen-dlsym")) {
        if (!object) object = need(dlmopen(LM_ID_NEWLM, file, RTLD_NOW | RTLD_DEEPBIND));
        return ((lookup)need(dlsym(object, strcmp(way, "dlmopen-dlsym") ? "linked" : "looked_up")))(name);
    }
    if (!strcmp(way, "driver-copy")) {
        if (!object) object = need(dlopen(file, RTLD_NOW));
        return dlsym(object, name);
    }
    if (!strcmp(way, "run-path")) { /* no escape: only the run path of this program leads to the object */
        if (!object) object = need(dlopen("plugin.so", RTLD_NOW));
        return ((lookup)need(dlsym(object, "looked_up")))(name);
    }
    if (!strcmp(way, "symbol-table")) return walk(need(dlopen("libcuda.so.1", RTLD_NOW)), name);
    /* As any program does. */
    return linked(name);
}

int main(int argc, char **argv) {
    char line[256], word[64];
    if (argc < 2) return 2;
    way = argv[1], file = argc > 2 ? argv[2] : 0;
    int (*init)(unsigned) = need(find("cuInit"));
    int (*retain)(void **, int) = need(find("cuDevicePrimaryCtxRetain"));
    int (*set)(void *) = need(find("cuCtxSetCurrent"));
    int (*take)(uint64_t *, size_t) = need(find("cuMemAlloc_v2"));
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        need(find("cuLaunchKernel"));
    int (*display)(void **, unsigned, int, unsigned, void *) = need(find("cuVDPAUCtxCreate_v2"));
    setvbuf(stdout, 0, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        size_t amount = 0;
        void *context;
        uint64_t pointer;
        sscanf(line, "%63s %zu", word, &amount);
        if (!strcmp(word, "begin")) {
            int status = init(0);
            if (!status) status = retain(&context, 0);
            printf("%d\n", status ? status : set(context));
        } else if (!strcmp(word, "take")) printf("%d\n", take(&pointer, amount << 20));
        else if (!strcmp(word, "contexts")) { /* creates `amount` more contexts; answers the last status */
            int status = 0;
            while (amount-- && !status) status = display(&context, 0, 0, 0, 0);
            printf("%d\n", status);
        } else if (!strcmp(word, "launch")) /* a kernel of `amount` microseconds */
            printf("%d\n", launch((void *)(amount * 1000), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0));
        else puts("?");
    }
    return 0;
}

/* A program that only monitors a GPU, as nvidia-smi does. Prints the total, free and used MiB that both
 * versions of the NVML function return, and whether libcuda is loaded into the process. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Returns how often the library's monitor thread has gone to sleep. It does so once after each round. */
static long sleeps(void) {
    long count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], line[100];
        int is_monitor = 0;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(path, "r");
        while (status && fgets(line, sizeof line, status)) {
            is_monitor |= !strcmp(line, "Name:\ttessera\n");
            if (is_monitor) sscanf(line, "voluntary_ctxt_switches: %ld", &count);
        }
        if (status) fclose(status);
    }
    closedir(tasks);
    return count;
}

int main(void) {
    void *device, *nvml = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    uint64_t old[3], new[5] = {2};
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*find)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, uint64_t *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    int (*info_v2)(void *, uint64_t *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    int status = init() | find(0, &device) | info(device, old) | info_v2(device, new);
    /* After two more sleeps the monitor thread has run a whole round. */
    for (long before = sleeps(); sleeps() < before + 2;) sched_yield();
    printf("%d: %lu %lu %lu, %lu %lu %lu, %s\n", status, old[0] >> 20, old[1] >> 20, old[2] >> 20, new[1] >> 20, new[3] >> 20,
           new[4] >> 20, dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) ? "driver" : "no driver");
    return 0;
}

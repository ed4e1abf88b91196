/* A program that only monitors a GPU, as nvidia-smi does. Prints the total, free and used MiB that both
 * versions of the NVML function return, and whether libcuda is loaded into the process. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

int main(void) {
    void *device, *nvml = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    uint64_t old[3], new[5] = {2};
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*find)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, uint64_t *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    int (*info_v2)(void *, uint64_t *) = dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    int status = init() | find(0, &device) | info(device, old) | info_v2(device, new);
    usleep(300000); /* the monitor thread has run a round by then */
    printf("%d: %lu %lu %lu, %lu %lu %lu, %s\n", status, old[0] >> 20, old[1] >> 20, old[2] >> 20, new[1] >> 20, new[3] >> 20,
           new[4] >> 20, dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) ? "driver" : "no driver");
    return 0;
}

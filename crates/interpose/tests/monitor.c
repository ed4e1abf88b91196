/* A program that only watches a GPU, as nvidia-smi does. Writes total, free and used MiB as both forms of NVML tell them, and whether
 * libcuda has come into the process. */
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
    usleep(300000); /* our own thread has looked about by then */
    printf("%d: %lu %lu %lu, %lu %lu %lu, %s\n", status, old[0] >> 20, old[1] >> 20, old[2] >> 20, new[1] >> 20, new[3] >> 20,
           new[4] >> 20, dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD) ? "driver" : "no driver");
    return 0;
}

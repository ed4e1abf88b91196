"""Calls the CUDA driver through ctypes: each way to allocate device memory, by the name that programs use."""
import ctypes, ctypes.util
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

cu = ctypes.CDLL("libcuda.so.1")


def ck(status, what):
    if status:
        raise SystemExit(f"{what}: CUDA error {status}")


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("rest", c_uint64 * 12)]


class Array3d(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_uint), ("channels", c_uint), ("flags", c_uint)]


def context():
    ck(cu.cuInit(0), "cuInit")
    ctx = c_void_p()
    ck(cu.cuDevicePrimaryCtxRetain(byref(ctx), 0), "cuDevicePrimaryCtxRetain")
    ck(cu.cuCtxSetCurrent(ctx), "cuCtxSetCurrent")


def info():
    free, total = c_size_t(), c_size_t()
    ck(cu.cuMemGetInfo_v2(byref(free), byref(total)), "cuMemGetInfo")
    return free.value, total.value


def plain(n):
    p = c_uint64()
    return cu.cuMemAlloc_v2(byref(p), c_size_t(n)), p.value


def free(p):
    return cu.cuMemFree_v2(c_uint64(p))


def pitch(n):
    p, out = c_uint64(), c_size_t()
    return cu.cuMemAllocPitch_v2(byref(p), byref(out), c_size_t(1 << 20), c_size_t(n >> 20), c_uint(4)), p.value


def managed(n):
    p = c_uint64()
    status = cu.cuMemAllocManaged(byref(p), c_size_t(n), c_uint(1))
    if not status:
        cu.cuMemsetD8_v2(p, ctypes.c_ubyte(1), c_size_t(n))
        cu.cuCtxSynchronize()
    return status, p.value


def array(n):
    h, d = c_void_p(), Array3d(1 << 14, (n >> 14) // 16, 0, 0x20, 4, 0)
    return cu.cuArray3DCreate_v2(byref(h), byref(d)), h.value


def mipmap(n):
    h, d = c_void_p(), Array3d(1 << 14, (n >> 14) // 16, 0, 0x20, 4, 0)
    return cu.cuMipmappedArrayCreate(byref(h), byref(d), c_uint(4)), h.value


def vmm(n):
    h, p = c_uint64(), AllocationProp(1, 0, Location(1, 0))
    return cu.cuMemCreate(byref(h), c_size_t(n), byref(p), c_uint64(0)), h.value


def asynchronous(n):
    p = c_uint64()
    return cu.cuMemAllocAsync(byref(p), c_size_t(n), c_void_p(0)), p.value


_pool = None


def pool(n):
    global _pool
    if _pool is None:
        _pool, props = c_void_p(), AllocationProp(1, 0, Location(1, 0))
        ck(cu.cuMemPoolCreate(byref(_pool), byref(props)), "cuMemPoolCreate")
    p = c_uint64()
    return cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(n), _pool, c_void_p(0)), p.value


def context_again(n):
    """Creates one more context per call and ignores `n`."""
    ctx = c_void_p()
    return cu.cuCtxCreate_v2(byref(ctx), c_uint(0), 0), ctx.value


WAYS = {"plain": plain, "pitch": pitch, "managed": managed, "array": array, "mipmap": mipmap, "vmm": vmm, "async": asynchronous, "pool": pool, "contexts": context_again}

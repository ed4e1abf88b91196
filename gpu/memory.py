"""Measures memory limits on a real GPU.

Prints one row per way to allocate: the memory granted under the limit, and the highest usage by NVML, read without the
library."""
import ctypes, os, subprocess, sys, threading, time
from bench import Arbiter, arbiter, folder, library, uuid

here = os.path.dirname(os.path.abspath(__file__))
LIMIT = 8192  # MiB


class Info(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("total", ctypes.c_uint64), ("reserved", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()
device = ctypes.c_void_p()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))


def used():
    info = Info(version=40 | 2 << 24)
    status = nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(info))
    assert status == 0, status
    return info.used >> 20


class Watch:
    """Records the highest memory usage of the GPU while it runs."""

    def __enter__(self):
        self.base, self.most, self.on = used(), 0, True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self):
        while self.on:
            self.most = max(self.most, used() - self.base)
            time.sleep(0.002)

    def __exit__(self, *_):
        self.on = False
        self.thread.join()


grants = 0


def grant(memory, cores=100, name=None):
    global grants
    grants += 1
    path = os.path.join(folder, name or f"grant{grants}")
    subprocess.check_call([arbiter, "grant", path, uuid, str(memory), str(cores)])
    return path


def start(path, *command, **more):
    env = dict(os.environ, LD_PRELOAD=library, TESSERA_GRANT=path)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def settle():
    for _ in range(200):
        if used() < 700:
            return
        time.sleep(0.02)


def run(path, *command):
    process = start(path, *command)
    out, err = process.communicate(timeout=120)
    return out.strip(), err.strip()


def ways():
    print(f"{'way':18} {'got':>6} {'status':>6} {'free/total shown':>17} {'free after':>10} {'NVML most':>9}  limit {LIMIT}, all MiB")
    for way in ["plain", "pitch", "managed", "array", "mipmap", "vmm", "async", "pool", "contexts", "torch", "torch-expandable", "torch-async"]:
        path = grant(LIMIT)
        settle()
        service = Arbiter(path)
        with Watch() as watch:
            out, err = run(path, sys.executable, os.path.join(here, "take.py"), way, "64", "20000")
        service.process.kill()
        try:
            got, status, free, total, after = out.split()
            verdict = "OVER" if watch.most > LIMIT else "ok"
            print(f"{way:18} {got:>6} {status:>6} {free + '/' + total:>17} {after:>10} {watch.most:>9}  {verdict}")
        except ValueError:
            print(f"{way:18} FAILED {out!r} {err[-300:]!r}")
        if err:
            print("   stderr:", err[-200:])


def small():
    """Allocates many pieces that are smaller than a block."""
    path = grant(2048)
    settle()
    code = f"""
import sys; sys.path.insert(0, {here!r})
import cuda, time
cuda.context(); n = 0
while n < 1 << 20:
    status, p = cuda.plain(10000)
    if status: break
    n += 1
time.sleep(0.2); print(n, status, cuda.info())"""
    with Watch() as watch:
        out, err = run(path, sys.executable, "-c", code)
    print(f"10 kB pieces under 2048 MiB: pieces, status, info: {out}; NVML most {watch.most} {err}")


def race(rounds):
    path = grant(2 * 528 + 1000)
    settle()
    flags = os.path.join(folder, "flags")
    open(flags, "wb").write(bytes(4096))
    with Watch() as watch:
        racers = [start(path, sys.executable, os.path.join(here, "race.py"), str(me), flags, str(rounds), str(600 << 20)) for me in (0, 1)]
        rows = [racer.communicate(timeout=200) for racer in racers]
    print(f"race of two for 600 of 1000 MiB, {rounds} rounds each (won refused both-held other-errors): {[out.strip() for out, _ in rows]}; NVML most {watch.most} of {2 * 528 + 1000}", *[err[-200:] for _, err in rows if err])


def kills(count):
    path = grant(LIMIT)
    settle()
    survivor = start(path, sys.executable, "-c", f"""
import sys; sys.path.insert(0, {here!r})
import cuda, time
cuda.context(); end = time.time() + {count} * 0.9; ok = no = bad = 0
while time.time() < end:
    s, p = cuda.plain(512 << 20)
    if s == 0: ok += 1; cuda.free(p)
    elif s == 2: no += 1
    else: bad += 1
    time.sleep(0.002)
print(ok, no, bad)""")
    with Watch() as watch:
        for i in range(count):
            victim = start(path, sys.executable, os.path.join(here, "take.py"), "plain", "64", "20000")
            time.sleep(0.25 + 0.05 * (i % 10))
            victim.kill()
            victim.wait()
        out, err = survivor.communicate(timeout=100)
    rest, err2 = run(path, sys.executable, os.path.join(here, "take.py"), "plain", "64", "20000")
    print(f"{count} kills beside a survivor (got refused errors): {out.strip()} {err[-200:]}; NVML most {watch.most} of {LIMIT}; afterwards one process gets: {rest} {err2[-200:]}")


def shown():
    path = grant(4096)
    out, err = run(path, "nvidia-smi", "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader")
    print("nvidia-smi under 4096 MiB:", out, err)
    out, err = run(os.path.join(folder, "absent"), sys.executable, os.path.join(here, "take.py"), "plain", "64", "200")
    print("no grant:", out, "|", err.replace("\n", " | "))


def deaths():
    """Kills a process that holds memory, and asks for free memory once, at once and after some seconds."""
    holder = f"""
import sys; sys.path.insert(0, {here!r})
import cuda, time
cuda.context(); cuda.plain(3000 << 20); print("held", flush=True); time.sleep(100)"""
    asker = f"""
import sys; sys.path.insert(0, {here!r})
import cuda
cuda.context(); print(*[n >> 20 for n in cuda.info()], cuda.plain(3200 << 20)[0])"""
    for wait in (0, 0.05, 3):
        path = grant(4096)
        settle()
        victim = start(path, sys.executable, "-c", holder)
        victim.stdout.readline()
        victim.kill(); victim.wait()
        time.sleep(wait)
        shown, _ = run(path, "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
        begin = time.time()
        out, err = run(path, sys.executable, "-c", asker)
        print(f"{wait} s after a process with 3000 MiB was killed under 4096 MiB: nvidia-smi shows {shown} MiB used; a new process sees free, total, and the status of 3200 MiB: {out} {err[-200:]} ({time.time() - begin:.1f} s)")


def grow():
    path = grant(1024, name="live")
    process = start(path, sys.executable, "-c", f"""
import sys; sys.path.insert(0, {here!r})
import cuda
cuda.context(); got = []
for line in sys.stdin:
    n = 0
    while True:
        s, p = cuda.plain(64 << 20)
        if s: break
        n += 64
    print(n, cuda.info()[1] >> 20, flush=True)""", stdin=subprocess.PIPE)
    answers = []
    for memory in (1024, 2048, 1024, 4096):
        grant(memory, name="live")
        process.stdin.write("\n"); process.stdin.flush()
        answers.append((memory, process.stdout.readline().strip()))
    process.stdin.close(); process.wait()
    print("limit changed live (limit, then MiB got more and total shown):", answers)


if __name__ == "__main__":
    begin = time.time()
    shown(); deaths(); ways(); small(); grow(); race(int(os.environ.get("ROUNDS", "2000"))); kills(int(os.environ.get("KILLS", "20")))
    print(f"memory: {time.time() - begin:.0f} s")

"""Measures whether work can be held back on the GPU itself, behind a wait for a word of memory (cuStreamWaitValue32), instead
of blocking the thread that launches it. usage: gates.py [SECONDS]

Prints what streams that wait in one process cost a second process: the throughput of its kernels, and the latency of its
requests of 1 ms. Then the time from the write of the word to the end of an empty operation behind the wait, and how soon the
driver removes a process that is killed while its streams wait. WORK is the built work.c. Needs an NVIDIA GPU without other
users."""
import ctypes, os, signal, subprocess, sys, time
from ctypes import byref, c_uint, c_uint64, c_void_p

import cuda
from cuda import ck, cu

GREATER_OR_EQUAL = 0
PORTABLE_AND_MAPPED = 3
NON_BLOCKING = 1


class Words:
    """Two words of memory that host and GPU see: the gate, and what the GPU writes behind it."""

    def __init__(self):
        cuda.context()
        host, device = c_void_p(), c_uint64()
        ck(cu.cuMemHostAlloc(byref(host), 4096, PORTABLE_AND_MAPPED), "cuMemHostAlloc")
        ck(cu.cuMemHostGetDevicePointer_v2(byref(device), host, 0), "cuMemHostGetDevicePointer")
        self.gate, self.answer = ((c_uint * 1).from_address(host.value + offset) for offset in (0, 128))
        self.gate[0] = self.answer[0] = 0
        self.device = device.value

    def stream(self):
        stream = c_void_p()
        ck(cu.cuStreamCreate(byref(stream), NON_BLOCKING), "cuStreamCreate")
        return stream

    def wait(self, stream, value):
        ck(cu.cuStreamWaitValue32_v2(stream, c_uint64(self.device), c_uint(value), GREATER_OR_EQUAL), "cuStreamWaitValue32")

    def write(self, stream, value):
        ck(cu.cuStreamWriteValue32_v2(stream, c_uint64(self.device + 128), c_uint(value), 0), "cuStreamWriteValue32")


def hold(streams):
    """Lets streams wait until the input ends."""
    words = Words()
    for stream in [words.stream() for _ in range(streams)]:
        words.wait(stream, 1)
        words.write(stream, 1)
    print("waiting", flush=True)
    sys.stdin.read()
    words.gate[0] = 1
    ck(cu.cuCtxSynchronize(), "cuCtxSynchronize")


def delays(count=2000):
    """Returns the microseconds from the write of the gate to the GPU's answer, in order."""
    words, found = Words(), []
    stream = words.stream()
    for value in range(1, count + 1):
        words.wait(stream, value)
        words.write(stream, value)
        # Without a pause, the wait might not have reached the GPU yet.
        time.sleep(0.0005)
        begin = time.perf_counter()
        words.gate[0] = value
        while words.answer[0] != value:
            if time.perf_counter() > begin + 5:
                raise SystemExit("the GPU does not answer")
        found.append(1e6 * (time.perf_counter() - begin))
    return sorted(found)


def waiting(streams):
    process = subprocess.Popen([sys.executable, __file__, "hold", str(streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdout.readline().strip() != "waiting":
        raise SystemExit("the process with waiting streams ended")
    return process


def measure(seconds):
    """Returns what the second process reaches."""
    run = lambda kind: subprocess.run([os.environ["WORK"], kind, seconds], capture_output=True, text=True, timeout=60).stdout.strip()
    return f"{run('big')}; {run('request')}"


def main(seconds):
    print("no stream waits:", measure(seconds), flush=True)
    for streams in (1, 8, 32):
        process = waiting(streams)
        print(f"{streams} streams wait:", measure(seconds), flush=True)
        process.stdin.close()
        process.wait(timeout=30)
    print("no stream waits:", measure(seconds), flush=True)
    found = delays()
    print("from the write to the answer, us: " + ", ".join(f"p{part} {found[len(found) * part // 100]:.1f}" for part in (50, 99)) + f", most {found[-1]:.1f}", flush=True)
    process, begin = waiting(8), time.time()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    print(f"killed while 8 streams wait: gone after {1000 * (time.time() - begin):.0f} ms", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        hold(int(sys.argv[2]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "4")

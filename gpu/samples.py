"""Records the driver's own samples of a GPU, one JSON object per line. usage: samples.py FILE [SECONDS]

The file allows to compare rules that turn samples into busy time without a GPU. Times are microseconds since 1970. Rows:
  {"process": [pid, time, sm%]}           nvmlDeviceGetProcessUtilization, polled so often that each call returns one sample
  {"gpu": [time, %]}                      nvmlDeviceGetSamples(GPU_UTILIZATION) of the whole GPU
  {"chip": [from, to, %]}                 the hardware counter of graphics engine time (GPM), from Hopper on
  {"look": [since, now, [[pid, time, sm%], ..]]}     like "process", polled once a second since the newest sample, as the exporter does
  {"account": [time, pid, %, ms]}         accounting mode, if it is enabled
"""
import ctypes, json, sys, threading, time
from ctypes import byref, c_char_p, c_double, c_int, c_uint, c_ulonglong, c_void_p

GPU_UTILIZATION = 1
GRAPHICS_UTIL = 1
OFTEN, SELDOM = 0.01, 1.0


class ProcessSample(ctypes.Structure):
    _fields_ = [("pid", c_uint), ("at", c_ulonglong), ("sm", c_uint), ("mem", c_uint), ("enc", c_uint), ("dec", c_uint)]


class Value(ctypes.Union):
    _fields_ = [("d", c_double), ("ui", c_uint), ("ull", c_ulonglong)]


class Sample(ctypes.Structure):
    _fields_ = [("at", c_ulonglong), ("value", Value)]


class Metric(ctypes.Structure):
    _fields_ = [("id", c_uint), ("status", c_uint), ("value", c_double), ("names", c_char_p * 3)]


class Metrics(ctypes.Structure):
    _fields_ = [("version", c_uint), ("count", c_uint), ("first", c_void_p), ("second", c_void_p), ("all", Metric * 512)]


class Account(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint), ("most", c_ulonglong), ("ms", c_ulonglong), ("start", c_ulonglong), ("running", c_uint), ("rest", c_uint * 5)]


def micros():
    return time.time_ns() // 1000


class Gpu:
    """One GPU, read through NVML."""

    def __init__(self, index=0):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if self.nvml.nvmlInit_v2():
            raise SystemExit("no NVIDIA driver answers")
        self.device = c_void_p()
        if self.nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(self.device)):
            raise SystemExit(f"no GPU {index}")
        self.gpm = None

    def processes(self, since):
        """Returns one row per process with its mean since `since`, an empty list without processes, or None on an error."""
        room = 512
        found, count = (ProcessSample * room)(), c_uint(room)
        status = self.nvml.nvmlDeviceGetProcessUtilization(self.device, found, byref(count), c_ulonglong(since))
        if status not in (0, 6):
            return None
        return [] if status else [[one.pid, one.at, one.sm] for one in found[: count.value] if one.at]

    def samples(self, since):
        room = 1024
        found, count, kind = (Sample * room)(), c_uint(room), c_int()
        status = self.nvml.nvmlDeviceGetSamples(
            self.device, c_int(GPU_UTILIZATION), c_ulonglong(since), byref(kind), byref(count), found
        )
        if status:
            return []
        value = {0: lambda v: v.d, 1: lambda v: v.ui}.get(kind.value, lambda v: v.ull)
        return [[one.at, value(one.value)] for one in found[: count.value]]

    def chip(self):
        """Returns begin, end and percent since the last call, or None if the hardware has no counter."""
        sample, at = c_void_p(), micros()
        if self.nvml.nvmlGpmSampleAlloc(byref(sample)) or self.nvml.nvmlGpmSampleGet(self.device, sample):
            return None
        before, self.gpm = self.gpm, (sample, at)
        if before is None:
            return None
        asked = Metrics(version=1, count=1, first=before[0], second=sample)
        asked.all[0].id = GRAPHICS_UTIL
        status = self.nvml.nvmlGpmMetricsGet(byref(asked)) or asked.all[0].status
        self.nvml.nvmlGpmSampleFree(before[0])
        return None if status else [before[1], at, round(asked.all[0].value, 2)]

    def set_accounting(self, on):
        return self.nvml.nvmlDeviceSetAccountingMode(self.device, c_int(on))

    def account(self, pid):
        found = Account()
        if self.nvml.nvmlDeviceGetAccountingStats(self.device, c_uint(pid), byref(found)):
            return None
        return [micros(), pid, found.gpu, found.ms]


class Recorder(threading.Thread):
    """Writes rows to a file until `stop` is called."""

    def __init__(self, path, gpu=None):
        super().__init__(daemon=True)
        self.file, self.gpu, self.ended, self.pids = open(path, "w"), gpu or Gpu(), threading.Event(), []
        self.writing = threading.Lock()

    def write(self, **row):
        with self.writing:
            self.file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def run(self):
        begin = micros()
        newest = {"process": begin, "gpu": begin, "look": begin}
        next_look = time.monotonic() + SELDOM
        while not self.ended.wait(OFTEN):
            for pid, at, used in self.gpu.processes(newest["process"]) or []:
                self.write(process=[pid, at, used])
                newest["process"] = max(newest["process"], at)
            for at, used in self.gpu.samples(newest["gpu"]):
                self.write(gpu=[at, used])
                newest["gpu"] = max(newest["gpu"], at)
            if time.monotonic() < next_look:
                continue
            next_look += SELDOM
            now = micros()
            all_ = self.gpu.processes(newest["look"])
            self.write(look=[newest["look"], now, all_])
            newest["look"] = max([newest["look"]] + [at for _, at, _ in all_ or []])
            chip = self.gpu.chip()
            if chip:
                self.write(chip=chip)
            for pid in self.pids:
                account = self.gpu.account(pid)
                if account:
                    self.write(account=account)

    def stop(self):
        self.ended.set()
        self.join()
        self.file.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    recorder = Recorder(sys.argv[1])
    recorder.start()
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
    recorder.stop()

"""Helpers of the other scripts: grants, an arbiter for them, and programs that run with the library.

Paths come from the environment: LIBRARY, ARBITER, WORK (the built work.c), and SHARE_BENCH (a PyTorch program that takes
SECONDS KIND and prints "KIND RATE /s windows min A med B max C"). GPU is the UUID of the GPU if `nvidia-smi` is missing."""
import os, subprocess, sys, tempfile, time

library, arbiter, work, share_bench = (os.environ[name] for name in ("LIBRARY", "ARBITER", "WORK", "SHARE_BENCH"))
meaning = os.environ.get("MEANING", "throughput")
seconds = os.environ.get("SECONDS_EACH", "10")
uuid = os.environ.get("GPU") or subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], text=True).split()[0]
folder = tempfile.mkdtemp(prefix="tessera-gpu-")
TORCH = ("big", "long", "graph", "sync", "small")


def grant(cores, ceiling=None, memory=30720, name=None):
    path = name or tempfile.mkdtemp(dir=folder)
    subprocess.check_call([arbiter, "grant", path, uuid, str(memory), str(cores), str(ceiling or cores), meaning])
    return path


def threads(process):
    """Yields (name, CPU seconds) of each thread, by the scheduler's count. Tick-based counts miss threads that sleep often."""
    for task in os.listdir(f"/proc/{process.pid}/task"):
        with open(f"/proc/{process.pid}/task/{task}/comm") as name, open(f"/proc/{process.pid}/task/{task}/schedstat") as used:
            yield name.read().strip(), int(used.read().split()[0]) / 1e9


def looks(process):
    """Returns how often the library's monitor thread has slept and woken."""
    for task in os.listdir(f"/proc/{process.pid}/task"):
        with open(f"/proc/{process.pid}/task/{task}/status") as told:
            fields = dict(line.split(":", 1) for line in told)
        if fields["Name"].strip() == "tessera":
            return int(fields["voluntary_ctxt_switches"])
    return 0


def cpu(process):
    return sum(used for _, used in threads(process))


def controller(process):
    """Returns the CPU seconds of the library's monitor thread in a process."""
    return sum(used for name, used in threads(process) if name == "tessera")


class Arbiter:
    """An arbiter process. Reports its CPU usage in percent of a core, and each grant's percentage of the GPU's time."""

    def __init__(self, *paths):
        self.log = tempfile.TemporaryFile(mode="w+", dir=folder)
        self.process = subprocess.Popen([arbiter, "run", "600", uuid, *paths], stdout=self.log)
        self.settle(0)

    def settle(self, seconds):
        """Starts the measurement after `seconds`, because the programs and the arbiter need time to start."""
        time.sleep(seconds)
        self.marked, self.cpu = time.time(), cpu(self.process)
        self.skip = sum(1 for _ in open(f"/proc/{self.process.pid}/fd/1")) if seconds else 0

    def used(self):
        """Returns the milliseconds of the GPU's time that the first grant has used, as of the last second."""
        with open(f"/proc/{self.process.pid}/fd/1") as log:
            lines = log.read().splitlines()
        return int(lines[-1].split()[0]) if lines else 0

    def end(self):
        used = 100 * (cpu(self.process) - self.cpu) / (time.time() - self.marked)
        self.process.kill()
        self.log.seek(0)
        lines = [[int(word) for word in line.split()] for line in self.log][self.skip:-1]
        return used, [(last - first) / 10 / (len(lines) - 1) for first, last in zip(lines[0], lines[-1])] if len(lines) > 1 else []


def start(command, path=None, **environment):
    env = dict(os.environ, **environment)
    if path:
        env.update(LD_PRELOAD=library, TESSERA_GRANT=path)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def program(kind, length=seconds):
    """Returns the command for a kind of work. The prefix "c-" selects work.c, other kinds are PyTorch programs."""
    return [work, kind[2:], length] if kind.startswith("c-") else [sys.executable, share_bench, length, kind]


def answer(process):
    """Returns (rate, lowest, highest) of a finished program, by intervals of 1 s."""
    out, err = process.communicate(timeout=120)
    words = out.split()
    if err.strip() or len(words) < 6:
        print("   ", out[-200:], err[-400:])
        return 0.0, 0.0, 0.0
    return (float(words[2]), float(words[4]), float(words[5])) if words[1] == "share" else (float(words[1]), float(words[5]), float(words[9]))


bares = {}


def bare(kind):
    if kind not in bares:
        bares[kind] = answer(start(program(kind, "4")))[0] or 1.0
    return bares[kind]

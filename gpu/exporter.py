"""Compares the exporter's values on a real GPU with known values. usage: exporter.py TESSERA [OUT] [SECONDS]

Two processes allocate memory of known size and compute for a known part of the time, alone and together, while
`tessera metrics --listen` runs. Needs an NVIDIA GPU without other users, and PyTorch. Takes about two minutes.

Memory: The growth that the exporter reports may differ by 1 % from the allocated size.
Busy:   The reported time may differ by 5 points from the work done. For one process alone, the work done is the time
        between CUDA events. For both together, it is the number of pieces times the duration of a piece alone, because
        kernels of the two processes alternate and events last longer.

Each of the driver's samples names one process, the one that ran last. For processes that alternate without windows, the
samples give the parts only roughly, so this script prints them without a check. The agent's test `real_gpu` compares
them with windows. OUT/samples.jsonl holds all samples of the driver.
"""
import json, os, re, subprocess, sys, time, urllib.request

from samples import Recorder

PORT = int(os.environ.get("PORT", "5699"))
URL = f"http://127.0.0.1:{PORT}/metrics"
WORKER = r"""
import json, random, sys, time, torch
torch.backends.cuda.matmul.allow_tf32 = False
a = torch.randn(4096, 4096, device="cuda"); b = torch.randn(4096, 4096, device="cuda")
held = []
def piece():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(8):
        torch.mm(a, b)
    end.record(); end.synchronize()
    return start.elapsed_time(end) / 1e3
for _ in range(5): piece()
def say(**what): print(json.dumps(what), flush=True)
say(ready=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "take":
        size = int(words[1]); before = torch.cuda.memory_reserved()
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda")); torch.cuda.synchronize()
        say(took=torch.cuda.memory_reserved() - before)
    elif words[0] == "run":
        seconds, part = float(words[1]), float(words[2])
        begin = time.monotonic(); busy = 0.0; pieces = 0; own = 0.0
        while time.monotonic() - begin < seconds:
            t = time.monotonic(); took = piece(); busy += took; pieces += 1
            # Sleeps for the rest of the period, so that the piece, by its duration alone, is the requested part of the
            # time. Random periods keep the processes out of step.
            alone = float(words[3]) if len(words) > 3 else took
            period = alone / part * random.uniform(0.5, 1.5)
            time.sleep(max(0.0, period - (time.monotonic() - t)))
        wall = time.monotonic() - begin
        say(wall=wall, event_seconds=busy, pieces=pieces)
    else:
        break
"""


class Worker:
    def __init__(self, name):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"process {self.name} ended: is PyTorch installed and the GPU free?")
        return json.loads(line)

    def tell(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


def scrape():
    with urllib.request.urlopen(URL, timeout=10) as answer:
        return answer.read().decode()


def samples(text, name):
    """Returns the labels and the value of each sample of a metric family."""
    found = []
    for line in text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line[len(name) + 1 :].rsplit("} ", 1)
            found.append((dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)))
    return found


def one(text, name, **wanted):
    values = [v for labels, v in samples(text, name) if all(labels.get(k) == x for k, x in wanted.items())]
    return values[0] if values else None


def memory_of(text, worker):
    return one(text, "tessera_process_memory_used_bytes", pid=str(worker.pid))


def smi_memory():
    out = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True, text=True,
    ).stdout
    return {int(p): int(m) << 20 for p, m in re.findall(r"(\d+), *(\d+)", out)}


def newer_look(after):
    """Returns a scrape whose sample of the GPU is newer than `after`."""
    for _ in range(200):
        text = scrape()
        at = one(text, "tessera_gpu_sample_timestamp_seconds")
        if at is not None and at > after and one(text, "tessera_gpu_sample_success") == 1:
            return text
        time.sleep(0.1)
    sys.exit("the exporter does not sample the GPU any more:\n" + scrape())


def watch(workers, seconds):
    """Scrapes for `seconds`. Returns means over the samples that are more than 2.5 s after the start."""
    begin = time.time()
    first, looks = None, {}
    while time.time() - begin < seconds:
        text = scrape()
        at = one(text, "tessera_gpu_sample_timestamp_seconds")
        if at is not None and at > begin + 2.5:
            first = first or (at, text)
            looks[at] = (
                [one(text, "tessera_process_busy_ratio", pid=str(w.pid)) or 0.0 for w in workers],
                one(text, "tessera_gpu_busy_ratio") or 0.0,
            )
            last = (at, text)
        time.sleep(0.2)
    if len(looks) < 3:
        sys.exit(f"too few samples in {seconds} s: {looks}")
    count = len(looks)
    each = [100 * sum(l[0][i] for l in looks.values()) / count for i in range(len(workers))]
    gpu = 100 * sum(l[1] for l in looks.values()) / count
    span = last[0] - first[0]
    counted = {
        name: (one(last[1], name) or 0.0) - (one(first[1], name) or 0.0)
        for name in ("tessera_gpu_busy_seconds_total", "tessera_gpu_energy_joules_total")
    }
    raw = [(round(at, 2), l[0], l[1]) for at, l in sorted(looks.items())]
    return each, gpu, 100 * counted["tessera_gpu_busy_seconds_total"] / span, counted["tessera_gpu_energy_joules_total"] / span, raw


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tessera = os.path.realpath(sys.argv[1])
    out = sys.argv[2] if len(sys.argv) > 2 else "gpu-results"
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 20.0
    os.makedirs(out, exist_ok=True)
    bad = []

    def row(what, known, found, unit, limit=None):
        off = found - known
        fine = limit is None or abs(off) <= limit
        if not fine:
            bad.append(what)
        judged = "" if limit is None else f" (allowed {limit:.2f}) {'ok' if fine else 'OUTSIDE'}"
        print(f"{what:48} known {known:10.2f} {unit:4} exporter {found:10.2f} {unit:4} off {off:+8.2f}{judged}", flush=True)

    subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    print(time.strftime("%F", time.gmtime()), flush=True)
    exporter = subprocess.Popen(
        [tessera, "metrics", "--listen", f"127.0.0.1:{PORT}", "--sample-every", "1", "--process-series",
         "--metrics", "native,pod-memory,dcgm", "--node-name", "gpu-test"],
    )
    workers = []
    recorder = Recorder(os.path.join(out, "samples.jsonl"))
    try:
        for _ in range(100):
            try:
                scrape()
                break
            except OSError:
                if exporter.poll() is not None:
                    sys.exit(f"tessera metrics ended with {exporter.returncode}")
                time.sleep(0.1)
        workers = [Worker("A"), Worker("B")]
        for worker in workers:
            worker.answer()
        a, b = workers
        time.sleep(1)
        text = newer_look(time.time())
        listed = samples(text, "tessera_process_memory_used_bytes")
        print("processes as the exporter lists them:", [(l["pid"], l["command"], v) for l, v in listed])
        print("processes as nvidia-smi lists them:  ", smi_memory(), "ours:", a.pid, b.pid)
        print("sources:", samples(text, "tessera_exporter_source_up"))
        before = [memory_of(text, worker) for worker in workers]
        if None in before:
            sys.exit("the GPU's process list has other process IDs than this script: run the script in the PID namespace of the host")

        print("\n-- memory", flush=True)
        for worker, size in ((a, 8 << 30), (b, 3 << 30)):
            worker.tell(f"take {size}")
        took = [worker.answer()["took"] for worker in workers]
        text = newer_look(time.time() + 1.0)
        for worker, known, base in zip(workers, took, before):
            found = memory_of(text, worker) - base
            row(f"{worker.name}: memory taken", known / 2**20, found / 2**20, "MiB", known / 2**20 / 100)
        smi = smi_memory()
        for worker in workers:
            if worker.pid in smi:
                found = memory_of(text, worker)
                row(f"{worker.name}: all its memory, beside nvidia-smi", smi[worker.pid] / 2**20, found / 2**20, "MiB", max(1.0, smi[worker.pid] / 2**20 / 100))
        used = one(text, "tessera_gpu_memory_used_bytes")
        parts = sum(v for _, v in samples(text, "tessera_gpu_memory_remainder_bytes"))
        parts += sum(v for _, v in samples(text, "tessera_container_memory_used_bytes"))
        row("GPU: parts add up", used / 2**20, parts / 2**20, "MiB", 0.0)
        print("   remainder:", samples(text, "tessera_gpu_memory_remainder_bytes"))

        print("\n-- busy", flush=True)
        alone = {}
        for worker, part in ((a, 0.6), (b, 0.25)):
            worker.tell(f"run {seconds} {part}")
            each, gpu, counted, watts, raw = watch(workers, seconds - 1)
            done = worker.answer()
            alone[worker.name] = done["event_seconds"] / done["pieces"]
            known = 100 * done["event_seconds"] / done["wall"]
            mine, other = (each[0], each[1]) if worker is a else (each[1], each[0])
            row(f"{worker.name} alone at {part:.0%}: its process", known, mine, "%", 5)
            row(f"{worker.name} alone: the other, idle", 0.0, other, "%", 5)
            row(f"{worker.name} alone: GPU by gauge", known, gpu, "%", 5)
            row(f"{worker.name} alone: GPU by counter", known, counted, "%", 5)
            print(f"   {watts:.0f} W; raw (time, processes, GPU): {raw}")
        recorder.start()
        for worker, part in ((a, 0.4), (b, 0.2)):
            worker.tell(f"run {seconds} {part} {alone[worker.name]}")
        each, gpu, counted, watts, raw = watch(workers, seconds - 1)
        recorder.stop()
        total = 0.0
        for worker, found in zip(workers, each):
            done = worker.answer()
            known = 100 * done["pieces"] * alone[worker.name] / done["wall"]
            total += known
            row(f"{worker.name} beside the other, no windows: its process", known, found, "%")
            print(f"   by events {100 * done['event_seconds'] / done['wall']:.1f} %, {done['pieces']} pieces of {alone[worker.name]*1e3:.2f} ms alone")
        row("both: GPU by gauge", total, gpu, "%", 5)
        row("both: GPU by counter", total, counted, "%", 5)
        print(f"   {watts:.0f} W; raw: {raw}")
        each, gpu, counted, watts, raw = watch(workers, 6)
        row("idle: GPU by counter", 0.0, counted, "%", 5)
        print(f"   {watts:.0f} W")

        text = scrape()
        with open(os.path.join(out, "exporter.prom"), "w") as file:
            file.write(text)
        print("\n-- as scraped, in part (all of it in exporter.prom)")
        shown = ("_energy", "_power", "_temperature", "_clock_hertz", "_active", "sample_", "TENSOR", "remapped", "nvlink", "samples")
        for line in text.splitlines():
            if not line.startswith("#") and any(word in line.split("{")[0] for word in shown):
                print(line)
        print("scrape of", len(text), "bytes; a sample takes", one(text, "tessera_gpu_sample_duration_seconds"), "s")
        times = []
        for _ in range(200):
            start = time.perf_counter()
            scrape()
            times.append((time.perf_counter() - start) * 1e3)
        times.sort()
        looks_before = one(text, "tessera_gpu_samples_total")
        print(f"200 scrapes: median {times[100]:.2f} ms, p99 {times[197]:.2f} ms; samples of the GPU meanwhile: {one(scrape(), 'tessera_gpu_samples_total') - looks_before:.0f}")
    finally:
        for worker in workers:
            worker.process.kill()
        exporter.kill()
    print("\nall within what is allowed" if not bad else "\nOUTSIDE: " + ", ".join(bad))
    sys.exit(1 if bad else 0)


main()

"""Records the driver's samples of processes that share a GPU in known ways. usage: mixtures.py OUT [SECONDS]

Writes OUT/mixtures.jsonl: the rows of samples.py, and after each mixture the row
  {"mixture": name, "begin": time, "end": time, "known": {pid: part of the time}, "pieces": {pid: [[begin, end], ..]}}
A process's part is the number of its pieces times the duration of a piece alone. Needs an NVIDIA GPU without other users,
and PyTorch.
"""
import json, os, subprocess, sys, time

from samples import Gpu, Recorder, micros

WORKER = r"""
import json, random, sys, time, torch
torch.backends.cuda.matmul.allow_tf32 = False
a = torch.randn(4096, 4096, device="cuda"); b = torch.randn(4096, 4096, device="cuda")
def piece(length):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(length): torch.mm(a, b)
    end.record(); end.synchronize()
    return start.elapsed_time(end) / 1e3
for _ in range(5): piece(8)
print(json.dumps({"alone": min(piece(40) for _ in range(5)) / 40}), flush=True)
for line in sys.stdin:
    seconds, length, part, jitter, alone = (float(word) for word in line.split())
    length = int(length)
    begin = time.monotonic(); pieces = []
    while time.monotonic() - begin < seconds:
        at = time.monotonic(); wall = time.time_ns() // 1000
        piece(length)
        pieces.append([wall, time.time_ns() // 1000])
        period = alone * length / part * random.uniform(1 - jitter, 1 + jitter)
        time.sleep(max(0.0, period - (time.monotonic() - at)))
    print(json.dumps({"wall": time.monotonic() - begin, "pieces": pieces}), flush=True)
"""

# The name, and for each process: matmuls per piece, requested part of the time, random variation of the period.
MIXTURES = [
    ("alone", [(8, 0.6, 0.0)]),
    ("in step", [(8, 0.4, 0.0), (8, 0.2, 0.0)]),
    ("irregular", [(8, 0.4, 0.5), (8, 0.2, 0.5)]),
    ("long beside short", [(75, 0.4, 0.3), (1, 0.2, 0.3)]),
    ("short beside long", [(1, 0.4, 0.3), (75, 0.2, 0.3)]),
    ("one always", [(8, 1.0, 0.0), (8, 0.2, 0.3)]),
    ("both always", [(8, 1.0, 0.0), (8, 1.0, 0.0)]),
    ("three", [(8, 0.3, 0.5), (4, 0.2, 0.5), (2, 0.1, 0.5)]),
]


class Worker:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.alone = self.answer()["alone"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a process ended: is PyTorch installed and the GPU free?")
        return json.loads(line)

    def tell(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    out, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 12.0
    os.makedirs(out, exist_ok=True)
    gpu = Gpu()
    print("accounting mode:", gpu.set_accounting(1), "(0: on)", flush=True)
    # Workers start one after the other, because each one measures the duration of a matmul alone.
    workers = [Worker() for _ in range(max(len(parts) for _, parts in MIXTURES))]
    print("pids", [w.pid for w in workers], "a matmul alone, ms:", [round(w.alone * 1e3, 3) for w in workers], flush=True)
    recorder = Recorder(os.path.join(out, "mixtures.jsonl"), gpu)
    recorder.pids = [w.pid for w in workers]
    recorder.start()
    for name, parts in MIXTURES:
        begin = micros()
        busy = workers[: len(parts)]
        for worker, (length, part, jitter) in zip(busy, parts):
            worker.tell(seconds, length, part, jitter, worker.alone)
        answers = [worker.answer() for worker in busy]
        end = micros()
        known = {
            w.pid: len(a["pieces"]) * length * w.alone / a["wall"] for w, a, (length, _, _) in zip(busy, answers, parts)
        }
        recorder.write(mixture=name, begin=begin, end=end, known=known, pieces={w.pid: a["pieces"] for w, a in zip(busy, answers)})
        print(f"{name:20} known", {pid: round(100 * part, 1) for pid, part in known.items()}, flush=True)
        time.sleep(2)
    recorder.stop()
    for worker in workers:
        worker.process.kill()
    gpu.set_accounting(0)


main()

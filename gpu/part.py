"""Computes for a known part of the time. usage: part.py SECONDS PART [ALONE]

Prints the mean duration of a piece of work in seconds, and the percentage of the time that all pieces take at ALONE
seconds each. Without ALONE, the percentage uses the mean duration. Periods vary at random by half, so that several
processes do not run in step. Needs PyTorch.
"""
import random, sys, time

import torch

torch.backends.cuda.matmul.allow_tf32 = False
seconds, part = float(sys.argv[1]), float(sys.argv[2])
alone = float(sys.argv[3]) if len(sys.argv) > 3 else None
a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))


def piece():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(8):
        torch.mm(a, b)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


for _ in range(5):
    piece()
begin, took = time.monotonic(), []
while time.monotonic() - begin < seconds:
    at = time.monotonic()
    took.append(piece())
    period = (alone or took[-1]) / part * random.uniform(0.5, 1.5)
    time.sleep(max(0.0, period - (time.monotonic() - at)))
wall, mean = time.monotonic() - begin, sum(took) / len(took)
print(mean, 100 * len(took) * (alone or mean) / wall, flush=True)

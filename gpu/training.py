"""Real programs that do work of their own between launches. usage: training.py KIND

Each line of the input is a number of seconds: the program runs for so long and prints its iterations per second. The
line "need" prints the seconds of the GPU that an iteration needs, by the profiler. Kinds:
  overlap    20 ms of matrix products, then 8 ms of work of the host, without waiting for the GPU
  large      a step of training of a convolution network, batch 256        small    the same, batch 64
  inference  the same network, batch 256, without training
  decode     one token after the other through a transformer of 24 layers, batch 1, each operation launched on its own
  matmul     matrix products of 0.2 ms                                     adds     additions of 5 us
  copies     copies of 16 MiB between host and GPU, and matrix products
Needs PyTorch and an NVIDIA GPU.
"""
import sys, time

import torch
from torch import nn

torch.backends.cudnn.benchmark = True


def bottleneck(inner, wide, stride):
    layers = [(wide if stride == 1 else wide // 2, inner, 1, 1), (inner, inner, 3, stride), (inner, wide, 1, 1)]
    return [part for i, o, size, step in layers for part in (nn.Conv2d(i, o, size, step, size // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU())]


def network():
    """Four stages of three bottlenecks each, about half the work of a ResNet-50."""
    parts = [nn.Conv2d(3, 256, 7, 4, 3), nn.ReLU()]
    for wide, blocks in ((256, 3), (512, 3), (1024, 4), (2048, 3)):
        for block in range(blocks):
            parts += bottleneck(wide // 4, wide, 2 if block == 0 and wide > 256 else 1)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).cuda().to(memory_format=torch.channels_last)


def pictures(batch):
    return torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)


def training(batch):
    net, images = network(), pictures(batch)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, foreach=False)
    labels = torch.randint(1000, (batch,), device="cuda")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def inference():
    net, images = network().train(False), pictures(256)

    def step():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            net(images).argmax(1).cpu()

    return step


def decode():
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).cuda().half().train(False)
    token = torch.randn(1, 1, 1024, device="cuda", dtype=torch.half)
    torch.backends.mha.set_fastpath_enabled(False)

    def step():
        with torch.no_grad():
            net(token).sum().item()

    return step


def overlap():
    a, b, c = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ready = [torch.cuda.Event() for _ in range(3)]
    at = [0]

    def step():
        # The program is at most two steps ahead, as a loader of data is.
        ready[at[0] % 3].synchronize()
        for _ in range(100):
            torch.mm(a, b, out=c)
        ready[at[0] % 3].record()
        at[0] += 1
        end = time.perf_counter() + 0.008
        while time.perf_counter() < end:
            pass

    return step


def matmul():
    a, b, c = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def step():
        for _ in range(20):
            torch.mm(a, b, out=c)
        torch.cuda.synchronize()

    return step


def adds():
    a = torch.randn(1 << 20, device="cuda")

    def step():
        for _ in range(500):
            a.add_(1.0)
        torch.cuda.synchronize()

    return step


def copies():
    a, b, c = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    pinned, there = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True), torch.empty(16 << 20, dtype=torch.uint8, device="cuda")

    def step():
        for _ in range(5):
            there.copy_(pinned, non_blocking=True)
            torch.mm(a, b, out=c)
            pinned.copy_(there, non_blocking=True)
        torch.cuda.synchronize()

    return step


KINDS = {"overlap": overlap, "large": lambda: training(256), "small": lambda: training(64), "inference": inference, "decode": decode, "matmul": matmul, "adds": adds, "copies": copies}


def need(step):
    """Returns the seconds for which the GPU is busy in a step, overlapping work counted once. The profiler slows the host
    down, but not the GPU."""
    from torch.profiler import ProfilerActivity, profile

    steps = 0
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        begin = time.time()
        while time.time() - begin < 1:
            step()
            steps += 1
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, until = 0, 0
    for start, end in spans:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6 / steps


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    step = KINDS[sys.argv[1]]()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "need":
            print(need(step), flush=True)
            continue
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < float(line):
            step()
            count += 1
        torch.cuda.synchronize()
        print(count / (time.perf_counter() - begin), flush=True)


main()

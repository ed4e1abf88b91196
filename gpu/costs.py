"""Measures the library's cost per call, alternating in one process between calls through the library and direct calls. Then
measures PyTorch with and without the library."""
from bench import *

ROUNDS = int(os.environ.get("COST_ROUNDS", "5"))
# With a soft share of half of the GPU, the window of a single container never closes.
shares = {"bare": None, "no limit of time": grant(100), "window open": grant(50, 100)}
for kind in os.environ.get("COST_KINDS", "launch alloc graphs").split():
    for name, path in shares.items():
        rows = []
        for _ in range(ROUNDS):
            service = Arbiter(path) if name == "window open" else None
            out, err = start([work, kind, "1"], path).communicate(timeout=60)
            if service:
                service.process.kill()
            words = out.split()
            if err.strip() or len(words) < 8:
                print("   ", out, err[-300:])
                continue
            rows.append([float(words[place]) for place in (3, 5, 7)])
        if rows:
            least, driver = min(row[0] for row in rows), min(row[1] for row in rows)
            more = sorted(row[2] for row in rows)
            print(f"{kind:8} {name:17} least {least:6.0f} ns, the driver alone {driver:6.0f}; more by {more[len(more) // 2]:5.0f} ns in the median [{more[0]:.0f}..{more[-1]:.0f}]", flush=True)

TRAIN = """
import time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]).cuda()
x, best = torch.randn(256, 2048, device="cuda"), torch.optim.SGD(net.parameters(), lr=1e-3)
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16); c = torch.empty_like(a)
def step():
    best.zero_grad(); loss = net(x).square().mean(); loss.backward(); best.step(); return loss.item()
def mm():
    for _ in range(20): torch.mm(a, a, out=c)
    torch.cuda.synchronize()
for name, act in (("train", step), ("matmul", mm)):
    for _ in range(30): act()
    counts = []
    for _ in range(6):
        end, n = time.time() + 0.5, 0
        while time.time() < end: act(); n += 1
        counts.append(n / 0.5)
    print(name, max(counts), sorted(counts)[3])
"""
found = {}
for turn in range(int(os.environ.get("TRAIN_ROUNDS", "3"))):
    for name in ("bare", "window open"):
        service = Arbiter(shares[name]) if shares[name] else None
        out, err = start([sys.executable, "-c", TRAIN], shares[name]).communicate(timeout=90)
        if service:
            service.process.kill()
        words = out.split()
        if len(words) < 6:
            print("   ", out, err[-300:])
            continue
        for kind, best, median in (words[:3], words[3:6]):
            found.setdefault((kind, name), []).append(float(best))
for kind in dict.fromkeys(kind for kind, _ in found):
    plain, hooked = max(found[kind, "bare"]), max(found[kind, "window open"])
    print(f"PyTorch {kind}: best of {len(found[kind, 'bare'])} runs, bare {plain:.1f}/s, through an open window {hooked:.1f}/s = {100 * hooked / plain:.2f} %")

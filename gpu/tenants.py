"""Measures several containers on one GPU under an arbiter: the throughput of each in percent of a run without the library and
its percentage of the GPU's time, short requests beside a greedy container, and a container that comes and goes."""
from bench import *

SETS = [
    [("big", 30, 30), ("big", 60, 60)],
    [("big", 25, 25), ("big", 25, 25), ("big", 50, 50)],
    [("big", 30, 100), ("big", 60, 100)],
    [("c-big", 30, 30), ("c-big", 60, 60)],
    [("c-big", 30, 100), ("c-big", 60, 100)],
    [("c-long", 30, 30), ("c-tiny", 60, 60)],
    [("long", 30, 30), ("small", 60, 60)],
    [("c-train", 60, 60), ("c-infer", 30, 30)],
    [("c-train", 80, 100), ("c-big", 10, 100)],
    [("c-adds", 30, 100), ("c-train", 60, 100)],
]


def together(*programs):
    """Starts programs under one arbiter, each given by a command and its share."""
    paths = [grant(cores, ceiling) for _, cores, ceiling in programs]
    service = Arbiter(*paths)
    return service, [start(command, path) for (command, _, _), path in zip(programs, paths)]


if "SETS" in os.environ:
    SETS = [SETS[int(place)] for place in os.environ["SETS"].split()]
for kind in dict.fromkeys(kind for tenants in SETS for kind, _, _ in tenants):
    print(f"bare {kind}: {bare(kind):.1f}")
for tenants in SETS:
    service, running = together(*[(program(kind), cores, ceiling) for kind, cores, ceiling in tenants])
    service.settle(2.5 if tenants[0][0].startswith("c-") else 5)
    # The measurement ends with the first program, because its share of the GPU is free afterwards.
    answers = [answer(process) for process in running]
    rows = [[100 * rate / bare(kind) for rate in rates] for (kind, _, _), rates in zip(tenants, answers)]
    used, shares = service.end()
    cells = [f"{kind} {cores}/{ceiling} -> {got:6.2f} [{least:.1f}..{most:.1f}]" for (kind, cores, ceiling), (got, least, most) in zip(tenants, rows)]
    print("  ".join(cells), f"  sum {sum(row[0] for row in rows):.1f}; % of the GPU's time:", *[f"{share:.1f}" for share in shares], f"; arbiter {used:.2f} % of a core", flush=True)
    if all(kind.startswith("c-") for kind, _, _ in tenants):
        print("  % of the time in kernels:", *[f"{rates[0]:.1f}" for rates in answers], flush=True)

for ceiling in (60, 100):
    service, (asker, greedy) = together(([work, "request", "8"], 30, 30 if ceiling == 60 else 100), ([work, "big", "9"], 60, ceiling))
    rows = [part.strip() for part in asker.communicate(timeout=60)], answer(greedy)[0]
    print(f"request every 20 ms beside a greedy container of {ceiling}:", *rows[0], "greedy:", rows[1], "; % of the GPU's time:", *[f"{share:.1f}" for share in service.end()[1]], flush=True)
service, (comer, stayer) = together(([work, "return", "8"], 66, 100), ([work, "big", "9"], 33, 100))
print(*[part.strip() for part in comer.communicate(timeout=60)], "other:", answer(stayer)[0])
service.end()

# Two processes of one container share its limit, with and without an arbiter. Without the library, the driver switches
# between two processes, and some time is lost.
kind = "big" if os.path.exists(share_bench) else "c-big"
for name, path, service_of in (("bare", None, None), ("at 50 without an arbiter", grant(50), None), ("at 50 with an arbiter", grant(50), Arbiter)):
    service = service_of(path) if service_of else None
    rows = [100 * rate / bare(kind) for rate, _, _ in map(answer, [start(program(kind), path) for _ in range(2)])]
    print(f"two processes of {kind} in one container, {name}: {rows[0]:.1f} + {rows[1]:.1f} = {sum(rows):.1f}", flush=True)
    if service:
        service.end()

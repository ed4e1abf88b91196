"""Several containers on one card, under an arbiter. usage: tenants.py LIBRARY ARBITER FOLDER SHARE_BENCH SECONDS
Prints what each gets as percent of bare, run at the same time."""
import os, resource, subprocess, sys, time

library, arbiter, folder, bench, seconds = sys.argv[1:6]
uuid = subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], text=True).split()[0]
meaning = os.environ.get("MEANING", "throughput")
SETS = [[("big", 30, 30), ("big", 60, 60)], [("big", 25, 25), ("big", 25, 25), ("big", 50, 50)], [("long", 30, 30), ("small", 60, 60)], [("big", 30, 100), ("big", 60, 100)], [("big", 50, 50)]]


def start(kind, env=None):
    return subprocess.Popen([sys.executable, bench, seconds, kind], env=dict(os.environ, **(env or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rate(process):
    out, err = process.communicate(timeout=90)
    words = out.split()
    if len(words) < 10:
        print("   ", out[-200:], err[-300:])
        return 0.0, 0.0, 0.0
    if err.strip():
        print("   stderr:", err[-300:])
    return float(words[1]), float(words[5]), float(words[9])


bare = {kind: rate(start(kind))[0] or 1.0 for kind in ("big", "long", "small")}
print("bare:", bare)
for number, tenants in enumerate(SETS):
    paths = []
    for place, (_, cores, ceiling) in enumerate(tenants):
        paths.append(os.path.join(folder, f"tenants-{number}-{place}"))
        subprocess.check_call([arbiter, "grant", paths[-1], uuid, "30720", str(cores), str(ceiling), meaning])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    service = subprocess.Popen([arbiter, "run", "600", uuid, *paths])
    time.sleep(0.1)
    running = [start(kind, {"LD_PRELOAD": library, "TESSERA_GRANT": path}) for (kind, _, _), path in zip(tenants, paths)]
    cells, total = [], 0.0
    for (kind, cores, ceiling), process in zip(tenants, running):
        got, least, most = (100 * r / bare[kind] for r in rate(process))
        total += got
        cells.append(f"{kind} {cores}/{ceiling} -> {got:6.2f} [{least:.1f}..{most:.1f}]")
    with open(f"/proc/{service.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    service.kill(); service.wait()
    print("  ".join(cells), f"  sum {total:.1f}  arbiter {ticks / 100:.2f} s CPU", flush=True)

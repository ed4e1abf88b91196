"""Shares of time on a real card. usage: shares.py LIBRARY ARBITER FOLDER SHARE_BENCH SECONDS
Per kind of work: iterations/s bare and under limits, as percent of bare, with the spread of 1 s windows."""
import os, subprocess, sys

library, arbiter, folder, bench, seconds = sys.argv[1:6]
kinds = os.environ.get("KINDS", "big long graph sync small").split()
limits = [int(l) for l in os.environ.get("LIMITS", "25 50 75").split()]
# "time": the process holds itself; "throughput": under an arbiter, which knows the card's power.
meaning = os.environ.get("MEANING", "throughput")
uuid = subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], text=True).split()[0]


def rate(kind, limit=None):
    env = dict(os.environ)
    if limit is not None:
        path = os.path.join(folder, f"share-{kind}-{limit}")
        subprocess.check_call([arbiter, "grant", path, uuid, "40960", str(limit), str(limit), meaning])
        env.update(LD_PRELOAD=library, TESSERA_GRANT=path)
        if meaning == "throughput":
            service = subprocess.Popen([arbiter, "run", "100", uuid, path])
    done = subprocess.run([sys.executable, bench, seconds, kind], env=env, capture_output=True, text=True, timeout=90)
    if limit is not None and meaning == "throughput":
        service.kill(); service.wait()
    words = done.stdout.split()
    if len(words) < 9 or done.stderr.strip():
        print("  ", kind, limit, done.stdout[-200:], done.stderr[-400:])
    return [float(words[i]) for i in (1, 5, 9)] if len(words) > 9 else [0.0] * 3


print(f"{'kind':6} {'bare/s':>9}  " + "  ".join(f"{'limit ' + str(l):^24}" for l in limits) + "   % of bare [1 s windows]")
for kind in kinds:
    bare = rate(kind)[0] or 1.0
    cells = []
    for limit in limits:
        got, least, most = (100 * r / bare for r in rate(kind, limit))
        cells.append(f"{got:7.2f} [{least:6.1f}..{most:6.1f}]")
    print(f"{kind:6} {bare:9.1f}  " + "  ".join(cells), flush=True)

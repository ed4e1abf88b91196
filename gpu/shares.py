"""Measures one container at a time: its throughput in percent of the same work without the library, and the spread over
intervals of 1 s."""
import os, time
from bench import *

kinds = os.environ.get("KINDS", "big long graph sync small c-tiny c-big c-long c-deep c-streams c-threads c-graph c-sync").split()
limits = [int(limit) for limit in os.environ.get("LIMITS", "10 25 50 75 90").split()]

print(f"{'kind':10} {'bare':>9}  " + "  ".join(f"{'limit ' + str(limit):^22}" for limit in limits) + "   % of bare [1 s windows]; most of a core, %: arbiter, monitor thread (its wake-ups per second)")
for kind in kinds:
    cells, costs, own, often = [], [], [], []
    for limit in limits:
        path = grant(limit)
        service = Arbiter(path)
        process = start(program(kind), path)
        service.settle(2.5 if kind.startswith("c-") else 5)
        before, looked, span = controller(process), looks(process), min(3, float(seconds) / 3)
        time.sleep(span)
        own.append(100 * (controller(process) - before) / span)
        often.append((looks(process) - looked) / span)
        rates = answer(process)
        costs.append(service.end()[0])
        got, least, most = (100 * rate / bare(kind) for rate in rates)
        cells.append(f"{got:6.2f} [{least:5.1f}..{most:5.1f}]")
    print(f"{kind:10} {bare(kind):9.1f}  " + "  ".join(f"{cell:^22}" for cell in cells) + f"   {max(costs):.2f} {max(own):.2f} ({max(often):.0f})", flush=True)

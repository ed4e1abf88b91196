"""Compares the driver's samples of known mixtures with the known work. usage: rules.py MIXTURES.JSONL

Reads the file that mixtures.py wrote and needs no GPU. Prints for each mixture the percentage of the time by process:
  known                      the work done
  samples                    the sum of the samples; each sample charges all work of the GPU to the one process it names
  while a process computed   the same, only with samples taken while a process was computing
At the end, prints which process the samples name: for those taken while one process computed, and while none did.
"""
import bisect, collections, json, sys


def state(pieces, moment):
    """Returns the processes that compute at `moment`, and the process that was the last to compute."""
    computing, last = [], (0, None)
    for pid, own in pieces.items():
        place = bisect.bisect_right(own, [moment, float("inf")]) - 1
        if place >= 0 and own[place][1] >= moment:
            computing.append(pid)
        elif place >= 0:
            last = max(last, (own[place][1], pid))
    return computing, last[1]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = [json.loads(line) for line in open(sys.argv[1])]
    all_of = lambda kind: [row[kind] for row in rows if kind in row]
    named = collections.Counter()
    for mixture in (row for row in rows if "mixture" in row):
        begin, end, pieces = mixture["begin"] + 500_000, mixture["end"], mixture["pieces"]
        gpu = [used for at, used in all_of("gpu") if begin < at <= end]
        chip = [(to - since, used) for since, to, used in all_of("chip") if begin < since and to <= end]
        samples, busy = collections.Counter(), collections.Counter()
        for pid, at, used in all_of("process"):
            if not begin < at <= end:
                continue
            computing, last = state(pieces, at)
            samples[str(pid)] += used / len(gpu)
            if computing:
                busy[str(pid)] += 1
            if len(pieces) > 1 and len(computing) < 2:
                right = str(pid) == (computing[0] if computing else last)
                named["one computes" if computing else "none computes", "the one that did last" if right else "another"] += 1
        mean = sum(gpu) / len(gpu)
        chip = sum(time * used for time, used in chip) / sum(time for time, _ in chip) if chip else float("nan")
        print(f"{mixture['mixture']:18} GPU:  known {100 * sum(mixture['known'].values()):5.1f}  samples {mean:5.1f}  chip {chip:5.1f}")
        for pid, known in mixture["known"].items():
            gated = mean * busy[pid] / max(1, sum(busy.values()))
            print(f"{'process ' + pid:>18} known {100 * known:5.1f}  samples {samples[pid]:5.1f}  while a process computed {gated:5.1f}")
    for (when, whom), count in sorted(named.items()):
        print(f"while {when}, samples name {whom}: {count}")


main()

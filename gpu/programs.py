"""Measures real programs, which do work of their own between launches (see training.py): each alone at several limits, and
several beside each other. A limit is a percentage of the GPU's time, so a program should reach min(limit / need, 1) of its
speed without the library, which is measured in the same run. PROGRAMS, LIMITS, PAIRS and SECONDS_EACH select a part."""
import signal

from bench import *

SOFT = (50, 100)
MEMORY = 45000
TURNS = 3
limits = [int(limit) for limit in os.environ.get("LIMITS", "10 25 50 75 90").split()]
programs = os.environ.get("PROGRAMS", "overlap large small decode copies").split()
PAIRS = [
    [("adds", 30, 100), ("large", 60, 100)],
    [("adds", 30, 30), ("large", 60, 60)],
    [("decode", 30, 30), ("large", 60, 60)],
    [("decode", 25, 25), ("overlap", 25, 25), ("large", 50, 50)],
    [("small", 10, 10), ("matmul", 80, 80)],
    [("large", 60, 60), ("inference", 30, 30)],
    [("large", 80, 100), ("matmul", 10, 100)],
]
pairs = [PAIRS[int(place)] for place in os.environ["PAIRS"].split()] if "PAIRS" in os.environ else PAIRS


class Program:
    """A running program, with a grant or without the library."""

    def __init__(self, kind, path=None):
        self.path = path
        env = dict(os.environ, **({"LD_PRELOAD": library, "TESSERA_GRANT": path} if path else {}))
        command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "training.py"), kind]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self):
        if self.process.stdout.readline().strip() != "ready":
            sys.exit("a program ended: is PyTorch installed and the GPU free?")
        return self

    def ask(self, words):
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def answer(self):
        return float(self.process.stdout.readline())

    def rate(self, seconds):
        self.ask(seconds)
        return self.answer()

    def end(self):
        self.process.kill()
        self.process.wait()


def wanted(limit, need):
    return min(100.0, 100.0 * limit / need) if need else 0.0


known = {}


def bare(kind):
    """Returns (rate, percentage of the GPU's time that the program needs) without the library."""
    if kind not in known:
        program = Program(kind).ready()
        program.rate(2)
        rate = program.rate(seconds)
        program.ask("need")
        known[kind] = rate, 100 * rate * program.answer()
        program.end()
    return known[kind]


def alone(kind):
    """Runs the program with and without the library by turns, because the speed of the host varies."""
    need = bare(kind)[1]
    path = grant(100, 100, MEMORY)
    service = Arbiter(path)
    without, limited = Program(kind).ready(), Program(kind, path).ready()
    cells = []
    for share, ceiling in [(limit, limit) for limit in limits] + [SOFT]:
        grant(share, ceiling, MEMORY, path)
        limited.rate(1)
        got = charged = 0
        for _ in range(TURNS):
            without_rate = without.rate(float(seconds) / TURNS / 2)
            begin, before = time.time(), service.used()
            got += 100 * limited.rate(float(seconds) / TURNS) / without_rate / TURNS
            charged += (service.used() - before) / 10 / (time.time() - begin) / TURNS
        cells.append(f"{share}/{ceiling} {got:6.2f} ({wanted(ceiling, need):5.1f})")
    for program in (without, limited):
        program.end()
    cost = service.end()[0]
    print(f"{kind:8} bare {without_rate:8.2f}/s; needs {need:5.1f} %, by our count {charged:5.1f} at {SOFT[0]}/{SOFT[1]}; share/ceiling got (wanted): " + "; ".join(cells) + f"; arbiter {cost:.2f} % of a core", flush=True)


def together(tenants):
    bares = [bare(kind) for kind, _, _ in tenants]

    def run(programs, service=None):
        for program in programs:
            program.ready()
        rows = []
        for length in (2, seconds):
            if service:
                service.settle(0.1)
            for program in programs:
                program.ask(length)
            rows = [program.answer() for program in programs]
        for program in programs:
            program.end()
        return [100 * row / rate for row, (rate, _) in zip(rows, bares)]

    sliced = run([Program(kind) for kind, _, _ in tenants])
    paths = [grant(share, ceiling, MEMORY) for _, share, ceiling in tenants]
    service = Arbiter(*paths)
    got = run([Program(kind, path) for (kind, _, _), path in zip(tenants, paths)], service)
    counted = service.end()[1]
    cells = [f"{kind} {share}/{ceiling} {own:6.2f} (wanted {wanted(ceiling, need):5.1f}; of the GPU {own * need / 100:5.1f})" for (kind, share, ceiling), own, (_, need) in zip(tenants, got, bares)]
    # If the arbiter counts more than the programs used, it charges time that was not theirs; if less, windows are missing.
    print("; ".join(cells), "; by the arbiter's count", *[f"{share:.1f}" for share in counted], f"; sum {sum(got):.1f}; by the driver alone:", *[f"{own:.1f}" for own in sliced], f"sum {sum(sliced):.1f}", flush=True)


def several_processes(kind, count):
    """Several processes of one container share its limit."""

    def run(path):
        programs = [Program(kind, path) for _ in range(count)]
        for program in programs:
            program.ready()
        for length in (2, seconds):
            for program in programs:
                program.ask(length)
            rates = [program.answer() for program in programs]
        for program in programs:
            program.end()
        return sum(rates)

    without = run(None)
    for limit in (50, 75):
        path = grant(limit)
        service = Arbiter(path)
        print(f"{count} processes of {kind} in one container at {limit}: {100 * run(path) / without:.1f} of {without:.1f}/s", flush=True)
        service.end()


def stopped(share):
    """A process that was stopped for 3 s, beside one that always computes."""
    paths = [grant(share, 100), grant(90 - share, 100)]
    service = Arbiter(*paths)
    victim, other = Program("matmul", paths[0]).ready(), Program("matmul", paths[1]).ready()
    other.ask(12)
    before = victim.rate(2)
    victim.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    victim.process.send_signal(signal.SIGCONT)
    after = [victim.rate(0.5) for _ in range(4)]
    print(f"share {share}, stopped for 3 s: {before:.1f}/s before, in each half second afterwards:", *[f"{rate:.1f}" for rate in after], flush=True)
    for program in (victim, other):
        program.end()
    service.end()


for kind in programs:
    alone(kind)
for tenants in pairs:
    together(tenants)
if "PROGRAMS" not in os.environ:
    several_processes("matmul", 4)
    stopped(10)

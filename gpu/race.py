"""One of two processes that race for memory that only one of them can get. usage: race.py ME(0|1) FLAGS-FILE ROUNDS BYTES
Each process sets its flag while it holds the memory. Seeing the other flag at that time is a violation."""
import mmap, sys, time
import cuda

me, path, rounds, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
file = open(path, "r+b")
flags = mmap.mmap(file.fileno(), 4096)
cuda.context()
flags[8 + me] = 1
while flags[8] + flags[9] < 2:
    time.sleep(0.001)
won = refused = both = other = 0
for _ in range(rounds):
    status, p = cuda.plain(size)
    if status == 0:
        flags[me] = 1
        both += flags[1 - me]
        won += 1
        flags[me] = 0
        cuda.free(p)
    elif status == 2:
        refused += 1
    else:
        other += 1
print(won, refused, both, other, flush=True)

"""Allocates device memory in one way until a request is rejected. usage: take.py WAY PIECE-MIB MOST-MIB [SECONDS]
Prints the allocated MiB, the status of the rejection, and the result of cuMemGetInfo before and after. Then it holds the
memory for SECONDS."""
import os, sys

way, piece, most = sys.argv[1], int(sys.argv[2]) << 20, int(sys.argv[3]) << 20
got, status = 0, 0
if way.startswith("torch"):
    if way == "torch-expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if way == "torch-async":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch
    torch.cuda.init()
    before, kept = torch.cuda.mem_get_info(), []
    a = torch.randn(1024, 1024, device="cuda"); (a @ a).sum().item(); del a
    try:
        while got < most:
            kept.append(torch.empty(piece, dtype=torch.uint8, device="cuda")); got += piece
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        status = 2
    after = torch.cuda.mem_get_info()
else:
    import cuda
    cuda.context()
    before = cuda.info()
    while got < most:
        status, what = cuda.WAYS[way](piece)
        if status:
            break
        got += piece
    cuda.cu.cuCtxSynchronize()
    after = cuda.info()
import time
time.sleep(0.3)
print(got >> 20, status, before[0] >> 20, before[1] >> 20, after[0] >> 20, flush=True)
time.sleep(float(sys.argv[4]) if len(sys.argv) > 4 else 0)

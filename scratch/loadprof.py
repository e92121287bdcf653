import cProfile, pstats, sys, time, torch, tempfile
from qerl.model.random_checkpoint import *
import qerl.bench.startup as st, inspect
from pathlib import Path
from qerl.model.loader import load
f = sys.argv[1]
torch.zeros(1, device="cuda")
t = time.time()
p = cProfile.Profile(); p.enable()
load(f, base="nvfp4", device="cuda"); torch.cuda.synchronize()
p.disable(); print("load", time.time() - t)
pstats.Stats(p).sort_stats("tottime").print_stats(14)

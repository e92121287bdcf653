import sys, time, torch
from collections import defaultdict
from torch.profiler import ProfilerActivity, profile
from qerl.bench.decode import random_model, step_seconds
from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
shape = sys.argv[1]; batches = [int(b) for b in sys.argv[2].split(",")]
t0 = time.time()
m = random_model(shape, sys.argv[3] if len(sys.argv) > 3 else "nvfp4", 32, torch.device("cuda"))
print("built", round(time.time() - t0, 1), flush=True)
blocks = blocks_that_fit(m, 16, [600] * max(batches))
e = Engine(m, blocks, 16, max_running=max(batches))
for b in batches:
    s = step_seconds(e, b, 384)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        step_seconds(e, b, 384)
    d = defaultdict(lambda: [0, 0.0])
    evs = [ev for ev in p.events() if ev.device_type == torch.autograd.DeviceType.CUDA]
    for ev in evs:
        d[ev.name[:60]][0] += 1; d[ev.name[:60]][1] += ev.device_time
    n = (4 + 1) * e.lookahead
    print(f"batch {b}: step {s*1e3:.3f} ms, {b/s:.0f} tokens/s", flush=True)
    for k, (c, t) in sorted(d.items(), key=lambda i: -i[1][1])[:16]:
        print(f"   {k:60s} {c/n:7.1f} a step {t/n:9.1f} us a step {t/c:8.1f} us each", flush=True)

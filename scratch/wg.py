import multiprocessing, sys, time
from dataclasses import astuple
from pathlib import Path
import torch
from qerl.kernels.fp4_tiles import Tiles, tile
from qerl.kernels.gpu import fp4_wgmma as fw
from qerl.kernels.gpu.cuda import _compiled
from qerl.kernels.gpu.fp4_wgmma import WgmmaPlan as P, wgmma_linear
from qerl.kernels.gpu.fp4_tiled import dequantize_tiles, plan_for, tiled_linear
from qerl.kernels.gpu.fp4_linear import dense_linear
from qerl.kernels.gpu.fp4_skinny import skinny_linear, skinny_plan
from qerl.kernels.low_rank import low_rank_buffers, low_rank_reference
from qerl.quant import nvfp4
SH = {"gate_up": (37888, 3584), "down": (3584, 18944), "qkv": (4608, 3584), "o": (3584, 3584)}
BIG = {"32gate_up": (55296, 5120), "32down": (5120, 27648), "32qkv": (7168, 5120), "32o": (5120, 5120)}
p128, p256 = P(128,3,4,144,64), P(256,2,3,208,88)
PLANS = {
 16: [P(16,3,8), P(16,2,9)],
 64: [P(64,3,6), P(64,2,8)],
 128: [P(128,2,5)],
 192: [P(192,2,3,208,88)],
 256: [p256, p128],
 1000: [p256, p128],
}
def defs(pl, rank): return {"BM": pl.bm, "CW": pl.cw, "STAGES": pl.stages, "RANK": rank, "REGISTERS": pl.registers, "OTHERS": pl.others}
SRC = Path(fw.__file__).with_name("fp4_wgmma.cu")
def comp(job):
    pl, rank = job
    try: _compiled(fw._instruction(pl.bm) + SRC.read_text(), SRC.name, defs(pl, rank), "sm_90a")
    except Exception as e: print("COMPILE", job, str(e)[:1500])
def micro(calls, repeats=8):
    for c in (calls[0], calls[-1]): c()
    torch.cuda.synchronize()
    st, g = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(st):
        g.capture_begin()
        for c in calls: c()
        g.capture_end()
    g.replay()
    ev = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for a, b in ev:
        a.record(); g.replay(); b.record()
    torch.cuda.synchronize()
    t = sorted(a.elapsed_time(b) * 1e3 / len(calls) for a, b in ev)
    return t[len(t) // 2]
def lora(n, k, parts, r=32):
    low = low_rank_buffers(parts, k, r, 0.5, torch.bfloat16, torch.device("cuda"))
    low.a.normal_(0, 0.02); low.b.normal_(0, 0.02)
    return low
def check():
    torch.manual_seed(0)
    for (n, k, parts, rank) in ((256, 18944, (256,), 32), (512, 256, (256, 256), 32), (4608, 3584, (3584, 512, 512), 32), (1216, 1088, (640, 576), 16), (4608, 896, (3584, 512, 512), 128), (37888, 512, (18944, 18944), 64)):
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        t = tile([nvfp4.quantize(w)]); W = dequantize_tiles(t)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        low = lora(n, k, parts, rank)
        for bm, plans in PLANS.items():
            for pl in plans:
                for m in {bm, bm - 3}:
                    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                    for lo in (None, low):
                        ref = x.float() @ W.float().t() + bias.float()
                        if lo is not None: ref = ref + low_rank_reference(x.float(), type(low)(low.a.float(), low.b.float(), low.column, low.scale, low.sizes))
                        ys = [wgmma_linear(x, t, bias, lo, pl) for _ in range(3)]
                        torch.cuda.synchronize()
                        e = ((ys[0].float() - ref).abs().max() / ref.abs().max()).item()
                        same = all(torch.equal(ys[0], y) for y in ys)
                        if e > 8e-3 or not same or e != e: print("BAD", (n, k), m, astuple(pl), "lora", lo is not None, f"{e:.4f}", same, flush=True)
        print("checked", n, k, flush=True)
def main():
    t0 = time.time()
    jobs = [(pl, r) for pl in {pl for ps in PLANS.values() for pl in ps} for r in (0, 16, 32, 64, 128)]
    with multiprocessing.get_context("fork").Pool(15) as pool: pool.map(comp, jobs, chunksize=1)
    print("compiled", time.time() - t0, flush=True)
    check()
    print("check", time.time() - t0, flush=True)
    for name, (n, k) in {**SH, **({} if len(sys.argv) < 2 else BIG)}.items():
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16); t = tile([nvfp4.quantize(w)])
        copies = max(2, -(-300_000_000 // (n * k * 9 // 16)))
        ts = [Tiles(t.words.clone(), t.scales.clone(), t.divisor_N, t.shape) for _ in range(copies)]
        low = lora(n, k, {"gate_up": (n // 2, n // 2), "qkv": (n - 1024, 512, 512)}.get(name.replace("32", ""), (n,)))
        for bm, plans in PLANS.items():
            x = torch.randn(bm, k, device="cuda", dtype=torch.bfloat16)
            out = []
            if bm == 8: out.append("skinny " + " ".join(f"{micro([lambda b=b: skinny_linear(x, b, None, lo, False, skinny_plan(b, 8, lo, False, 132)) for b in ts]):.1f}" for lo in (None, low)))
            elif bm < 0: out.append("triton " + " ".join(f"{micro([lambda b=b: tiled_linear(x, b, None, lo, plan_for(bm, b, low.sizes)) for b in ts]):.1f}" for lo in (None, low)))
            if bm < 0: out.append("dense " + " ".join(f"{micro([lambda b=b: dense_linear(x, dequantize_tiles(b), None, lo, False) for b in ts[:3]]):.1f}" for lo in (None, low)))
            for pl in plans:
                out.append(f"{astuple(pl)[:3]} " + " ".join(f"{micro([lambda b=b: wgmma_linear(x, b, None, lo, pl) for b in ts]):.1f}" for lo in (None, low)))
            print(f"{name:9s} M={bm:3d} " + " | ".join(out), flush=True)
    print("done", time.time() - t0)
main()

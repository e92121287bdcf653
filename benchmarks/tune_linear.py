"""Time every cut of the 4-bit linear kernels for the shapes of public models, and print the best as a table.

python3 benchmarks/tune_linear.py --seconds 300 --out plans.json
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict, astuple

import torch

from qerl.kernels.fp4_tiles import Tiles, tile
from qerl.kernels.gpu.fp4_skinny import SkinnyPlan, skinny_linear
from qerl.kernels.gpu.fp4_tiled import Plan, dequantize_tiles, tiled_linear
from qerl.kernels.low_rank import low_rank_buffers, low_rank_reference
from qerl.quant import nvfp4

SHAPES = {
    "7b.gate_up": (37888, 3584), "7b.down": (3584, 18944), "7b.qkv": (4608, 3584), "7b.o": (3584, 3584),
    "32b.gate_up": (55296, 5120), "32b.down": (5120, 27648), "32b.qkv": (7168, 5120), "32b.o": (5120, 5120),
}  # fmt: skip
MARLIN = {  # anchors: vLLM's Marlin, us
    "7b.qkv": (11.4, 11.5, 12.2, 13.6, 19, 27.4, 35.4, 62.3), "7b.o": (10, 10, 10.4, 12, 16.9, 22.9, 30.7, 47.8),
    "7b.gate_up": (37.3, 37.5, 41, 45, 63.3, 115, 220, 430), "7b.down": (25.8, 25.8, 27.8, 31.1, 47.3, 79.9, 112, 213),
    "32b.qkv": (14.9, 14.7, 15.8, 20, 29.3, 40.1, 64.8, 120), "32b.o": (13.5, 13.6, 14.8, 17, 24.3, 34.4, 49.7, 89.4),
    "32b.gate_up": (71, 71.2, 78.2, 87, 122, 232, 446, 936), "32b.down": (38.7, 38.6, 42.3, 55.4, 84.2, 121, 217, 426),
}  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TRITON = {  # nr, kr, warps, stages by bm
    16: ((1, 2, 4, 4), (1, 4, 4, 4), (2, 2, 4, 4), (1, 2, 4, 6), (2, 1, 4, 5)),
    32: ((1, 2, 4, 4), (2, 2, 4, 4), (2, 1, 4, 5), (1, 4, 4, 3), (2, 2, 8, 4)),
    64: ((1, 2, 4, 4), (2, 1, 4, 4), (2, 2, 4, 3), (2, 1, 8, 4), (4, 1, 8, 4), (2, 2, 8, 3)),
    128: ((1, 1, 4, 4), (2, 1, 4, 4), (2, 1, 8, 4), (2, 2, 8, 3), (4, 1, 8, 4), (1, 2, 4, 3)),
    256: ((1, 1, 4, 4), (2, 1, 8, 4), (2, 1, 8, 3), (1, 2, 4, 3), (2, 2, 8, 3)),
}


def random_tiles(outputs: int, inputs: int, copies: int) -> list[Tiles]:
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    one = tile([nvfp4.quantize(weight)])
    assert one is not None
    return [one] + [Tiles(one.words.clone(), one.scales.clone(), one.divisor_N, one.shape) for _ in range(copies - 1)]


def microseconds(calls, repeats: int = 8) -> float:
    """The median of graph replays, a call."""
    for call in (calls[0], calls[-1]):
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / len(calls) for start, end in events)
    return times[len(times) // 2]


def compile_share(index: int, count: int) -> None:
    """Fill Triton's cache: this process's share of all cuts."""
    tiles = random_tiles(1024, 1024, 1)[0]
    cuts = [(bm, *cut) for bm, cut_list in TRITON.items() for cut in cut_list]
    for number, (bm, nr, kr, warps, stages) in enumerate(cuts):
        if number % count == index:
            x = torch.zeros(bm, 1024, device="cuda", dtype=torch.bfloat16)
            try:
                tiled_linear(x, tiles, None, None, Plan(nr, kr, bm, warps, stages, 1))
            except Exception as error:  # noqa: BLE001
                print("compile", bm, nr, kr, warps, stages, repr(error)[:200], flush=True)


def check() -> None:
    """Errors against float32, of each kernel and of torch in bf16."""
    for sizes, inputs, rank in (((3584, 512, 512), 3584, 32), ((1152, 1152), 1536, 16), ((320,), 208, 64)):
        parts = [nvfp4.quantize(torch.randn(n, inputs, device="cuda")) for n in sizes]
        tiles = tile(parts)
        assert tiles is not None
        exact = torch.cat([nvfp4.dequantize(part) for part in parts])
        low = low_rank_buffers(sizes, inputs, rank, 2.0, torch.bfloat16, exact.device)
        low.a.normal_(0, inputs**-0.5), low.b.normal_(0, 0.1)
        bias = torch.randn(sum(sizes), device="cuda").bfloat16()
        same = torch.equal(dequantize_tiles(tiles), exact.bfloat16())
        print(f"check {sizes} x {inputs}: dequantized equal {same}", flush=True)
        for rows in (1, 5, 8, 13, 16, 33, 64, 100, 300):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            wide = type(low)(low.a.float(), low.b.float(), low.column, low.scale, low.sizes)
            want = x.float() @ exact.t() + bias.float() + low_rank_reference(x.float(), wide)
            plain = torch.nn.functional.linear(x, exact.bfloat16(), bias) + low_rank_reference(x, low)
            found = {"torch": plain}
            try:
                bm = next(b for b in TRITON if rows <= b or b == 256)
                found["triton"] = tiled_linear(x, tiles, bias, low, Plan(1, 1 if inputs % 128 else 2, bm, 4, 3, 2))
                if rows <= 16:
                    for k_parts in (1, 3):
                        plan = SkinnyPlan(k_parts, 132 // k_parts)
                        found[f"skinny{k_parts}"] = skinny_linear(x, tiles, bias, low, False, plan)
                        again = skinny_linear(x, tiles, bias, low, False, plan)
                        assert torch.equal(again, found[f"skinny{k_parts}"]), "not deterministic"
                    if len(sizes) == 2:
                        pair = skinny_linear(x, tiles, bias, low, True, SkinnyPlan(2, 66))
                        gate, up = want.chunk(2, -1)
                        goal = torch.nn.functional.silu(gate) * up
                        print("   paired", float((pair.float() - goal).norm() / goal.norm()), flush=True)
            except Exception as error:  # noqa: BLE001
                print("   failed", repr(error)[:300], flush=True)
            errors = {k: f"{float((v.float() - want).norm() / want.norm()):.2e}" for k, v in found.items()}
            print(f"   rows {rows}: {errors}", flush=True)


def cuts(rows: int, outputs: int, inputs: int, skinny: bool):
    strips, k_tiles = outputs // 16, inputs // 64
    if skinny and rows <= 16:
        for k_parts in (1, 2, 4, 8):
            for per, warps, stages, chunk in (
                (1, 16, 3, 2), (1, 16, 4, 2), (1, 16, 2, 4), (1, 16, 6, 1), (1, 8, 4, 4), (1, 8, 6, 2), (1, 12, 4, 2),
                (2, 8, 3, 2), (2, 8, 4, 2), (2, 8, 2, 4), (2, 8, 4, 1), (3, 4, 4, 2), (3, 4, 3, 4), (3, 8, 3, 1),
            ):  # fmt: skip
                yield SkinnyPlan(k_parts, 132 * per // k_parts, warps, stages, chunk, per)
    for bm in [b for b in TRITON if b >= min(rows, 256)][:2]:
        for nr, kr, warps, stages in TRITON[bm]:
            if strips % (4 * nr) == 0 and k_tiles % kr == 0:
                for programs in (0, 1, 2, 3, 4) if bm <= 64 else (0, 1, 2):
                    yield Plan(nr, kr, bm, warps, stages, programs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", default="plans.json")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    args = parser.parse_args()
    begun = time.time()
    workers = [multiprocessing.Process(target=compile_share, args=(i, 12)) for i in range(12)]
    for worker in workers:
        worker.start()
    if not args.no_check:
        check()
    for worker in workers:
        worker.join()
    print(f"checked and compiled after {time.time() - begun:.0f} s", flush=True)
    results, names, all_rows = [], args.shapes.split(","), [int(r) for r in args.rows.split(",")]
    left = len(names) * len(all_rows)
    for name in names:
        outputs, inputs = SHAPES[name]
        copies = random_tiles(outputs, inputs, max(2, -(-(256 << 20) // (outputs * inputs * 9 // 16))))
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        start = microseconds([lambda t=t: dequantize_tiles(t) for t in copies])
        print(f"{name} dequantize {start:.1f} us, {outputs * inputs * 2.5625 / start / 1e6:.2f} TB/s", flush=True)
        for rows in all_rows:
            deadline = time.time() + (args.seconds - (time.time() - begun)) / left
            left -= 1
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            bf16 = microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in weights * 3])
            found = []
            for plan in cuts(rows, outputs, inputs, True):
                if time.time() > deadline and found:
                    break
                run = skinny_linear if isinstance(plan, SkinnyPlan) else tiled_linear
                extra = (None, None, False, plan) if isinstance(plan, SkinnyPlan) else (None, None, plan)
                try:
                    found.append((microseconds([lambda t=t: run(x, t, *extra) for t in copies], 4), plan))
                except Exception as error:  # noqa: BLE001
                    print("   failed", plan, repr(error)[:160], flush=True)
                    if "illegal" in repr(error) or "launch" in repr(error):
                        raise
            found.sort(key=lambda pair: pair[0])
            best = {type(plan).__name__: (us, plan) for us, plan in reversed(found)}
            lows = [low_rank_buffers((outputs,), inputs, 32, 2.0, torch.bfloat16, x.device) for _ in copies]
            with_lora = {}
            for kind, (_, plan) in best.items():
                pairs = list(zip(copies, lows, strict=True))
                if kind == "SkinnyPlan":
                    calls = [lambda t=t, w=w, p=plan: skinny_linear(x, t, None, w, False, p) for t, w in pairs]
                else:
                    calls = [lambda t=t, w=w, p=plan: tiled_linear(x, t, None, w, p) for t, w in pairs]
                try:
                    with_lora[kind] = round(microseconds(calls, 4), 1)
                except Exception as error:  # noqa: BLE001
                    print("   failed with LoRA", plan, repr(error)[:160], flush=True)
            marlin = MARLIN[name][ROWS.index(rows)] if rows in ROWS else float("nan")
            us = found[0][0]
            floor = outputs * inputs * 0.5625 / 4.0e6
            line = {"shape": name, "rows": rows, "us": round(us, 1), "floor": round(floor, 1), "bf16": round(bf16, 1),
                    "of_marlin": round(us / marlin, 2), "x_bf16": round(bf16 / us, 2), "tried": len(found), "lora": with_lora,
                    **{kind: (round(t, 1), astuple(p)) for kind, (t, p) in best.items()},
                    "next": [(round(t, 1), type(p).__name__[0], *astuple(p)) for t, p in found[1:4]]}  # fmt: skip
            print(json.dumps(line), flush=True)
            results.append(line | {"plans": {kind: asdict(p) for kind, (_, p) in best.items()}})
            with open(args.out, "w") as file:
                json.dump(results, file)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()

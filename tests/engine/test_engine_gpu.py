"""The engine on a GPU, bf16, LoRA, noise: eager and graph decode, judged by the packed forward in float32."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qerl.engine.drawing import Drawing
from qerl.engine.engine import Engine
from qerl.engine.scheduler import Scheduler
from qerl.engine.sequence import Sequence
from qerl.kernels.draw import draw
from qerl.model.adapter import LoraSettings, add_lora, load_adapter, save_adapter
from qerl.model.decoder import Decoder
from qerl.model.layers import Lora
from qerl.model.loader import load
from qerl.model.noise import set_noise
from qerl.model.packing import next_tokens, pack
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES
from qerl.records import Completion, Request, Sampling
from tests.model.test_adapter import shake
from tests.quant.test_convert import run as quantize

pytestmark = pytest.mark.gpu


def packed_log_probs(model, prompts: list[tuple[int, ...]], done: list[Completion]) -> torch.Tensor:
    packed = pack([[*prompts[c.request], *c.token_ids] for c in done], "cuda")
    places, targets = next_tokens(packed)
    with torch.no_grad():
        logp, _ = model.logprobs(model(packed, noise=True)[places], targets, 0.9)
    parts = logp.split([length - 1 for length in packed.lengths])
    return torch.cat([part[len(prompts[c.request]) - 1 :] for part, c in zip(parts, done, strict=True)]).cpu()


def models(tmp_path: Path, base: str) -> tuple[Decoder, Decoder]:
    """The same adapter and noise in bf16 and in float32."""
    write_random_checkpoint(SHAPES["toy"], tmp_path / "bf16")
    if base != "bf16":
        quantize(tmp_path / "bf16", tmp_path / base, base)
    model = load(str(tmp_path / base), base=base, device="cuda")
    exact = load(str(tmp_path / base), base=base, device="cuda", dtype=torch.float32)
    add_lora(model, LoraSettings(r=8, train_norms=True))
    shake(model)
    save_adapter(model, tmp_path / "adapter")
    load_adapter(exact, tmp_path / "adapter")
    for one in (model, exact):
        set_noise(one, 0.02, torch.Generator().manual_seed(3))
    return model, exact


def load_of_work() -> list[Request]:
    random.seed(0)
    system = tuple(random.randrange(4096) for _ in range(40))
    prompts = [tuple(random.randrange(4096) for _ in range(random.randrange(1, 110))) for _ in range(8)]
    return [Request(i, (*system, *p) if i % 2 else p, 4) for i, p in enumerate(prompts)]


REQUESTS = load_of_work()
PROMPTS = [request.prompt_ids for request in REQUESTS]
SAMPLING = Sampling(max_tokens=60, temperature=0.9, stop_ids=tuple(range(40)), noise=True)


@pytest.mark.parametrize("base", ["bf16", "nvfp4", "nf4"])
@pytest.mark.parametrize(
    ("blocks", "running", "overlap"),  # 30 blocks: preemption; 10 running: others take the places of those that ended
    [(30, 256, False), (30, 256, True), (2000, 256, True), (2000, 10, True)],
)
def test_the_chain_of_parity(tmp_path: Path, base: str, blocks: int, running: int, overlap: bool) -> None:
    """Packed forward = prefill and eager decode (by habit: errors at most twice the packed ones); graphs = eager."""
    model, exact = models(tmp_path, base)
    options = {"num_blocks": blocks, "token_budget": 300, "lookahead": 4, "max_running": running, "overlap": overlap}
    eager = Engine(model, graphs=False, **options).generate(REQUESTS, SAMPLING)
    engine = Engine(model, graphs=True, **options)
    for _ in range(2):  # with captures, and without
        assert engine.generate(REQUESTS, SAMPLING) == eager  # tokens and log-probs, bit for bit
    assert engine.graphs is not None
    assert engine.graphs.captured > 0
    assert {c.finish_reason for c in eager} == {"stop", "length"}
    behaviour = torch.tensor([p for c in eager for p in c.policy_logprobs])
    truth, packed = packed_log_probs(exact, PROMPTS, eager), packed_log_probs(model, PROMPTS, eager)
    assert (behaviour - truth).abs().max() <= 2 * (packed - truth).abs().max()
    assert (behaviour - truth).square().mean() <= 4 * (packed - truth).square().mean()


def test_overlap_changes_nothing_where_all_go_on_together(tmp_path: Path) -> None:
    """The same rows in every step: bit for bit. (Otherwise steps have other rows, and other rounding.)"""
    model, _ = models(tmp_path, "nvfp4")
    for rules in ({}, {"repetition_penalty": 1.3, "top_p": 0.9}):
        sampling = replace(SAMPLING, stop_ids=(), **rules)
        done = Engine(model, 2000, overlap=False).generate(REQUESTS, sampling)
        engine = Engine(model, 2000)
        assert engine.overlap
        for _ in range(2):  # with captures, and without
            assert engine.generate(REQUESTS, sampling) == done
        assert engine.pool.available == 2000


def test_a_further_look_is_begun_without_waiting_for_the_device(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "nvfp4")
    engine, drawing = Engine(model, 300), Drawing(SAMPLING, model.arch.vocab, model.device)
    scheduler = Scheduler(engine.pool, 8192, 256, "root", engine.lookahead)
    sequences = [Sequence(i, i, 0, (5, 6, 7 + i), 100, key=i) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    look = engine.begin(scheduler.schedule(), drawing)
    scheduler.advance(look.step, {q: tokens for q, (tokens, _, _) in look.drawn().items()})
    look = engine.begin(scheduler.schedule(), drawing)  # with a capture
    for _ in range(5):
        further = scheduler.further(look.step)
        assert further is not None
        torch.cuda.set_sync_debug_mode("error")
        try:
            ahead = engine.begin(further, drawing)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scheduler.advance(look.step, {q: tokens for q, (tokens, _, _) in look.drawn().items()})
        look = ahead
    look.wait()
    assert [len(sequence.output) for sequence in sequences] == [1 + 5 * engine.lookahead] * 4


def test_a_stream_left_with_a_look_on_its_way_leaves_a_usable_engine(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "bf16")
    engine = Engine(model, 300)
    before = engine.generate(REQUESTS, SAMPLING)
    looks = []

    def interrupt(request: int, sample: int, new: list[int]) -> None:
        looks.append(request)
        if len(looks) == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(REQUESTS, SAMPLING, interrupt))
    assert engine.pool.available == 300
    assert engine.generate(REQUESTS, SAMPLING) == before
    stream = engine.stream(REQUESTS, SAMPLING)
    next(stream)
    stream.close()
    engine.sleep()
    engine.wake()
    assert engine.generate(REQUESTS, SAMPLING) == before


def test_an_fp8_cache_errs_as_its_reference_does(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Graphs = eager; log-probs differ from float32's at most twice as much as those of the same cache in float32
    arithmetic, which shows what FP8 alone costs; and rounding to bf16, as everywhere."""
    model, exact = models(tmp_path, "nvfp4")
    options = {"num_blocks": 2000, "block_size": 16, "kv_cache_dtype": "fp8"}
    done = Engine(model, graphs=False, lookahead=8, overlap=True, **options).generate(REQUESTS, SAMPLING)
    assert Engine(model, **options).generate(REQUESTS, SAMPLING) == done
    truth, packed = packed_log_probs(exact, PROMPTS, done), packed_log_probs(model, PROMPTS, done)
    alone = Engine(exact, **options).generate(REQUESTS, SAMPLING)
    cost = (torch.tensor([p for c in alone for p in c.policy_logprobs]) - packed_log_probs(exact, PROMPTS, alone)).abs()
    error = (torch.tensor([p for c in done for p in c.policy_logprobs]) - truth).abs()
    record_property("mean and max, FP8 cache; mean, FP8 alone", (error.mean(), error.max(), cost.mean()))
    assert error.mean() <= 2 * (cost.mean() + (packed - truth).abs().mean())
    assert error.max() <= 2 * (cost.max() + (packed - truth).abs().max())


@pytest.mark.parametrize("base", ["mxfp4", "nf4"])
def test_every_base_can_be_captured(tmp_path: Path, base: str) -> None:
    model, _ = models(tmp_path, base)
    eager = Engine(model, 300, graphs=False, lookahead=8, overlap=True).generate(REQUESTS[:2], SAMPLING)
    assert Engine(model, 300).generate(REQUESTS[:2], SAMPLING) == eager


def test_every_way_to_draw_can_be_captured(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "bf16")
    eager, graphs = Engine(model, 300, graphs=False, lookahead=8, overlap=True), Engine(model, 300)
    for options in (
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "min_tokens": 20},
    ):
        sampling = replace(SAMPLING, **options)
        judge = eager.generate(REQUESTS, sampling)
        assert graphs.generate(REQUESTS, sampling) == judge
        assert all(len(c.token_ids) >= sampling.min_tokens for c in judge)
        captured = graphs.graphs.captured
        assert graphs.generate(REQUESTS, sampling) == judge
        assert graphs.graphs.captured == captured


def test_one_graph_serves_every_context(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "bf16")
    engine, sampling = Engine(model, 2000), replace(SAMPLING, stop_ids=())
    engine.generate([Request(i, (5, 6, 7 + i)) for i in range(4)], sampling)
    captured = engine.graphs.captured
    done = engine.generate([Request(i, (*range(100 * i + 1),)) for i in range(4)], sampling)
    assert engine.graphs.captured == captured
    assert done == Engine(model, 2000, graphs=False, lookahead=8, overlap=True).generate(
        [Request(i, (*range(100 * i + 1),)) for i in range(4)], sampling
    )


def test_a_single_row_is_drawn_the_same_every_time() -> None:
    logits = torch.randn(1, 151_936, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    one = torch.ones(1, dtype=torch.int64, device="cuda")
    first = draw(logits, one, one, 1.0, 0, 0.95, 0.0)
    for _ in range(300):
        assert all(torch.equal(a, b) for a, b in zip(first, draw(logits, one, one, 1.0, 0, 0.95, 0.0), strict=True))


def test_updates_in_place_reach_captured_graphs_and_moved_tensors_are_refused(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "nvfp4")
    engine = Engine(model, 300)
    before = engine.generate(REQUESTS, SAMPLING)
    captured = engine.graphs.captured
    shake(model, seed=5)
    set_noise(model, 0.05, torch.Generator().manual_seed(9))
    engine.on_policy_update()
    after = engine.generate(REQUESTS, SAMPLING)
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert Engine(model, 300, graphs=False, lookahead=8, overlap=True).generate(REQUESTS, SAMPLING) == [
        replace(c, policy_version=0) for c in after
    ]
    captured = engine.graphs.captured  # other lengths may have met other buckets
    assert engine.generate(REQUESTS, SAMPLING) == after
    assert engine.graphs.captured == captured
    norm = model.blocks[0].input_norm
    kept = norm.noise_D
    norm.noise_D = kept.clone()
    with pytest.raises(ValueError, match=r"1 tensors of the model moved.*blocks\.0\.input_norm\.noise_D"):
        engine.generate(REQUESTS, SAMPLING)
    norm.noise_D = kept
    lora = next(m for m in model.modules() if isinstance(m, Lora))
    lora.a.copy = lora.a.copy.clone()
    with pytest.raises(ValueError, match="moved"):
        engine.generate(REQUESTS, SAMPLING)


def test_sleep_gives_memory_away_and_graphs_survive_it(tmp_path: Path) -> None:
    model, _ = models(tmp_path, "bf16")
    engine = Engine(model, 40_000)
    before = engine.generate(REQUESTS, SAMPLING)
    captured, address = engine.graphs.captured, engine.cache.keys.data_ptr()
    size = engine.cache.both.numel() * 2
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free >= size
    with pytest.raises(ValueError, match="sleeps"):
        engine.generate(REQUESTS, SAMPLING)
    other = torch.full((size,), 255, dtype=torch.uint8, device="cuda")  # somebody uses the memory meanwhile
    del other
    engine.wake()
    assert engine.cache.keys.data_ptr() == address
    assert engine.generate(REQUESTS, SAMPLING) == before
    assert engine.graphs.captured == captured
    free = torch.cuda.mem_get_info()[0]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= size

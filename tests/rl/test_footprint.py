"""The arithmetic of memory against what torch really holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl.engine.cache import room_beside
from qerl.model.adapter import add_lora, trained_parameters
from qerl.model.layers import LoraSettings
from qerl.model.loader import load
from qerl.model.packing import Continued, Packed, pack, pack_shared
from qerl.model.shapes import SHAPES, shape_of
from qerl.rl.footprint import Footprint, Workload, fewest_recomputed, footprint, trained_weights

GB = 10**9
TOKENS = 64


def workload(**changes: object) -> Workload:
    settings = {
        "base": "nvfp4",
        "lora": LoraSettings(),
        "optimizer_bytes": 8,
        "micro_batch": 16384,
        "recompute": 100,
        "sequences": 128,
        "longest": 4416,
    }
    return Workload(**(settings | changes))


def loaded(folder: Path, base: str, lora: LoraSettings) -> torch.nn.Module:
    model = load(str(folder), "bf16" if base == "full" else base, "cpu", "bfloat16", cache_dir=folder / "cache")
    if base == "full":
        model.train_in_full()
    else:
        add_lora(model, lora)
    return model


def bytes_autograd_keeps(folder: Path, base: str, lora: LoraSettings, packed: Packed | None = None) -> int:
    """Of a forward pass, by default over a row of TOKENS tokens, beside the model's own tensors."""
    model = loaded(folder, base, lora)
    own = {tensor.untyped_storage().data_ptr() for _, tensor in model.tensors()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(packed or pack([list(range(TOKENS))]))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("base", "norms"), [("bf16", False), ("nvfp4", True), ("full", False)])
def test_activations_of_a_block_are_what_autograd_keeps(
    family: str, base: str, norms: bool, make_checkpoint: Callable[..., Path]
) -> None:
    lora = LoraSettings(r=8, lora_alpha=16, train_norms=norms)
    one, two = (make_checkpoint(family, num_hidden_layers=layers) for layers in (1, 2))
    measured = bytes_autograd_keeps(two, base, lora) - bytes_autograd_keeps(one, base, lora)
    work = workload(base=base, lora=lora, micro_batch=TOKENS, recompute=0)
    ours = footprint(shape_of(str(two)), work).kept - footprint(shape_of(str(one)), work).kept
    shape = shape_of(str(one))
    joined = TOKENS * shape.heads * shape.head_dim * 2  # on a CPU attention goes by segments, which are then joined
    assert ours + joined == measured


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("base", "prompt", "completion"), [("bf16", 16, 8), ("nvfp4", 64, 4), ("full", 64, 4)])
def test_shared_prompts_keep_copies_of_keys_and_values(
    family: str, base: str, prompt: int, completion: int, make_checkpoint: Callable[..., Path]
) -> None:
    lora = LoraSettings(r=8, lora_alpha=16)
    one, two = (make_checkpoint(family, num_hidden_layers=layers) for layers in (1, 2))
    packed, _, _ = pack_shared([Continued([1] * prompt, [[2] * completion] * 6)])
    measured = bytes_autograd_keeps(two, base, lora, packed) - bytes_autograd_keeps(one, base, lora, packed)
    keys, tokens = 6 * (prompt + completion), prompt + 6 * completion
    work = workload(base=base, lora=lora, micro_batch=tokens, recompute=0, keys=keys)
    ours = footprint(shape_of(str(two)), work).kept - footprint(shape_of(str(one)), work).kept
    shape = shape_of(str(one))
    on_a_cpu = 2 * tokens * shape.heads * shape.head_dim + 2 * 5 * completion * (prompt + completion)  # joined; masks
    assert ours + on_a_cpu == measured


@pytest.mark.parametrize(("base", "norms"), [("nvfp4", False), ("nf4", True), ("full", False)])
def test_what_is_trained_is_counted_exactly(base: str, norms: bool, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("qwen3")
    lora = LoraSettings(r=8, target_modules=("q_proj", "down_proj"), train_norms=norms)
    there = sum(p.numel() for p in trained_parameters(loaded(folder, base, lora)).values())
    work = workload(base=base, lora=lora)
    assert sum(trained_weights(shape_of(str(folder)), work)) == there
    assert footprint(shape_of(str(folder)), work).masters == 4 * there


@pytest.mark.parametrize("base", ["bf16", "nvfp4", "mxfp4", "nf4", "full"])
def test_weights_and_what_is_trained_lie_in_memory_as_counted(base: str, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("llama", hidden_size=256, intermediate_size=768)  # large beside a file's metadata
    lora = LoraSettings(r=8)
    model = loaded(folder, base, lora)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for name, tensor in model.tensors()
        if not name.endswith((".kept", "rope_frequencies"))  # a CPU's dequantized copies
    }
    parts = footprint(shape_of(str(folder)), workload(base=base, lora=lora))
    assert parts.weights + parts.masters + parts.copies == pytest.approx(sum(held.values()), rel=0.01)


def planned(shape: str, base: str, **changes: object) -> Footprint:
    return footprint(SHAPES[shape], workload(base=base, **changes))


def test_a_32b_model_fits_80_gb_in_4_bits_and_not_in_16() -> None:
    assert planned("qwen2.5-32b", "nvfp4", longest=9216).fits(80 * GB)
    assert not planned("qwen2.5-32b", "bf16", longest=9216).fits(80 * GB)
    assert not planned("qwen2.5-7b", "full").fits(80 * GB)
    assert planned("qwen2.5-7b", "full").fits(200 * GB)


def test_an_fp8_cache_counts_half() -> None:
    plain, small = (footprint(SHAPES["qwen2.5-7b"], workload(kv_cache_dtype=kind)) for kind in ("auto", "fp8"))
    assert small.cache_wanted / plain.cache_wanted == (128 + 4) / 256  # codes, and a scale for each head
    assert small.cache_each * 128 == small.cache_wanted
    assert small.weights == plain.weights


def test_as_few_blocks_are_recomputed_as_memory_asks_for() -> None:
    shape = SHAPES["qwen2.5-7b"]
    counts = [fewest_recomputed(shape, workload(), gpu * GB) for gpu in (11, 24, 40, 60, 139)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == shape.layers
    assert counts[-1] == 0
    for gpu, count in zip((24, 40, 60), counts[1:], strict=False):
        assert 0 < count <= shape.layers
        assert planned("qwen2.5-7b", "nvfp4", recompute=count).updating <= gpu * GB
        assert planned("qwen2.5-7b", "nvfp4", recompute=count - 1).updating > 0.9 * gpu * GB


def test_each_knob_moves_its_own_part() -> None:
    plain = planned("qwen2.5-7b", "nvfp4")
    eight = planned("qwen2.5-7b", "nvfp4", optimizer_bytes=2)
    assert 4 * eight.optimizer == plain.optimizer
    assert planned("qwen2.5-7b", "nvfp4", recompute=0).update_peak > plain.update_peak
    half = planned("qwen2.5-7b", "nvfp4", micro_batch=8192)
    assert 2 * half.kept == plain.kept
    assert half.cache_wanted == plain.cache_wanted
    assert planned("qwen2.5-7b", "nvfp4", sequences=64).cache_wanted * 2 == plain.cache_wanted
    assert plain.cache(24 * GB) < plain.cache_wanted == plain.cache(80 * GB)


def test_the_cache_leaves_room_for_prefill_and_decoding_beside_it() -> None:
    parts = planned("qwen2.5-7b", "nvfp4", micro_batch=1408, longest=1408, sequences=256, optimizer_bytes=2)
    free = 12 * GB - parts.resident
    assert 0.8 * free + parts.prefill > free  # a share alone would not
    assert parts.fits(12 * GB)
    assert parts.sampling(12 * GB) <= 12 * GB
    assert parts.cache(24 * GB) == int(0.8 * (24 * GB - parts.resident))  # where there is plenty the share is all


def test_a_margin_is_counted() -> None:
    parts = planned("qwen2.5-7b", "nvfp4")
    assert parts.update_margin == int(0.02 * parts.update_peak)
    exactly = parts.update_peak + parts.context + parts.workspace
    assert parts.updating == exactly + parts.update_margin
    assert not parts.fits(exactly + 1)


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
@pytest.mark.parametrize("penalty", [False, True])
def test_a_run_leaves_beside_its_cache_what_the_plan_counts(
    base: str, penalty: bool, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint("qwen2")
    parts = footprint(shape_of(str(folder)), workload(base=base, sequences=7, longest=100, penalty=penalty))
    assert room_beside(loaded(folder, base, LoraSettings()), 700, 7, penalty) == parts.prefill + parts.workspace

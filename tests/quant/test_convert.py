"""The converter, judged by transformers with compressed-tensors and bitsandbytes, and by what it leaves behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qerl.errors import Interrupted
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES, Shape
from qerl.quant import convert as convert_module
from qerl.quant import nvfp4
from qerl.quant.checkpoint import Checkpoint
from qerl.quant.convert import convert
from qerl.quant.layout import dequantize, layout_for
from qerl.quant.plan import make_plan
from qerl.quant.report import Report, relative_error


def run(
    source: Path,
    out: Path,
    format: str = "nvfp4",
    method: str = "rtn",
    ignore: tuple[str, ...] = (),
    shard_gb: float = 1.0,
    double_quant: bool = False,
    device: str = "cpu",
    **callbacks: Callable[..., None],
) -> Report:
    layout = layout_for(format, double_quant)
    with Checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, layout, ignore, int(shard_gb * 1e9))
        return convert(checkpoint, out, layout, plan, method, device, **callbacks)


def our_dequantized_model(source: Path, out: Path) -> transformers.PreTrainedModel:
    """The source model in bf16 with its weights replaced by what our reader finds in the quantized folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with Checkpoint(out) as quantized, torch.no_grad():
        assert quantized.quantized_modules
        for module in quantized.quantized_modules:
            model.get_submodule(module).weight.copy_(dequantize(quantized.read_quantized(module), torch.bfloat16))
    return model.eval()


IDS = torch.tensor([[5, 77, 200, 3, 9, 150, 31, 8]])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("format", "method"), [("nvfp4", "rtn"), ("nvfp4", "mse"), ("mxfp4", "mse")])
def test_transformers_gives_the_logits_of_our_dequantized_weights(
    make_checkpoint: Callable[..., Path], tmp_path: Path, family: str, format: str, method: str
) -> None:
    source, out = make_checkpoint(family), tmp_path / "out"
    run(source, out, format, method)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    ours = our_dequantized_model(source, out)
    with torch.no_grad():
        logits = theirs(IDS).logits
        assert torch.equal(logits, ours(IDS).logits)
        plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
        assert not torch.equal(logits, plain(IDS).logits)


@pytest.mark.parametrize("double_quant", [False, True])
def test_transformers_with_bitsandbytes_reads_our_nf4(
    make_checkpoint: Callable[..., Path], tmp_path: Path, double_quant: bool
) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    run(source, out, "nf4", double_quant=double_quant)
    # In eval mode bitsandbytes repacks weights for a CPU kernel with other rounding; in train mode it dequantizes.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, device_map="cpu").train()
    ours = our_dequantized_model(source, out)
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, ours(IDS).logits)


def test_weights_equal_the_formats_own_with_the_shared_global_scale(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = make_checkpoint("qwen2", shard="60KB"), tmp_path / "out"
    run(source, out)
    with Checkpoint(source) as plain, Checkpoint(out) as quantized:
        at = "model.layers.1.self_attn"
        weights = {p: plain.read(f"{at}.{p}_proj.weight") for p in "qkv"}
        shared = nvfp4.global_scale(torch.stack([w.abs().max() for w in weights.values()]).max())
        for p, weight in weights.items():
            expected, got = nvfp4.quantize(weight, "rtn", shared), quantized.read_quantized(f"{at}.{p}_proj")
            assert isinstance(got, nvfp4.NVFP4)
            assert torch.equal(got.packed, expected.packed)
            assert torch.equal(got.scale.view(torch.uint8), expected.scale.view(torch.uint8))
            assert torch.equal(got.global_scale, shared)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
def test_pieces_do_not_change_the_result(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source = make_checkpoint("llama")
    run(source, tmp_path / "whole", format, "mse")
    monkeypatch.setattr(convert_module, "PIECE_CPU", 192)
    run(source, tmp_path / "pieces", format, "mse")
    assert folder_tensors(tmp_path / "whole") == folder_tensors(tmp_path / "pieces")


def folder_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (str(t.dtype), tuple(t.shape), t.flatten().view(torch.uint8).numpy().tobytes())
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


def test_the_folder_is_a_standard_one(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], tmp_path: Path
) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    add_tokenizer(source)
    (source / "README.md").write_text("the 16-bit model's card")
    run(source, out, ignore=("*.layers.0.mlp.*",), shard_gb=60e-6)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(shards) > 1
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in folder_tensors(out).values())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert set(config["ignore"]) == {"lm_head"} | {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert transformers.AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    assert (out / "generation_config.json").exists()
    assert not (out / "README.md").exists()
    tensors, plain = folder_tensors(out), folder_tensors(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        assert tensors[name] == plain[name]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, our_dequantized_model(source, out)(IDS).logits)


def test_the_report_measures_what_was_written(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_checkpoint("qwen2"), tmp_path / "out"
    report = run(source, out, method="mse")
    with Checkpoint(source) as plain, Checkpoint(out) as quantized:
        for layer in report.layers:
            before = plain.read(f"{layer.module}.weight").float()
            after = dequantize(quantized.read_quantized(layer.module))
            assert relative_error([layer]) == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
        assert report.bytes_after == quantized.nbytes
        assert report.bytes_before == plain.nbytes
    saved = json.loads((out / "quantize_report.json").read_text())
    assert saved["bits_per_weight"] == pytest.approx(4.5, abs=0.02)
    assert len(saved["layers"]) == 14
    assert len(saved["worst"]) == 10
    assert set(saved["relative_error_by_kind"]) == {f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")}


def test_out_that_exists_is_refused_and_left_alone(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists"):
        run(make_checkpoint(), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("format", ["nvfp4", "nf4"])
def test_nan_is_refused_with_the_tensors_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path, tensor: str, format: str
) -> None:
    source = make_checkpoint("llama")
    tensors = load_file(source / "model.safetensors")
    tensors[tensor][3, 7] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{tensor} holds NaN or Inf"):
        run(source, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_source_dtypes_load_as_they_are_and_run(
    make_checkpoint: Callable[..., Path], tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    run(make_checkpoint("llama", dtype), tmp_path / "out", format)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", device_map="cpu")
    with torch.no_grad():
        assert bool(torch.isfinite(model(IDS).logits).all())
    kept = torch.float16 if (format, dtype) == ("nf4", torch.float16) else torch.bfloat16
    assert load_file(next((tmp_path / "out").glob("*.safetensors")))["model.norm.weight"].dtype == kept


def test_a_value_that_16_bits_can_not_hold_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint("llama", torch.float32)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 3.4e38  # rounds to Inf in bf16
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN or Inf"):
        run(source, tmp_path / "out")


def test_a_folder_that_is_not_ours_is_left_alone(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model.safetensors").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.partial is not a folder that qerl began"):
        run(make_checkpoint(), tmp_path / "out")
    assert (tmp_path / "out.partial" / "model.safetensors").read_text() == "precious"


def test_another_model_of_the_same_size_and_time_starts_over(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    first, out = make_checkpoint("llama"), tmp_path / "out"
    with pytest.raises(Interrupted):
        run(first, out, shard_gb=30e-6, on_bytes=StopAfter(150_000, KeyboardInterrupt()))
    path = first / "model.safetensors"
    stat = path.stat()
    tensors = {name: tensor * 2 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    said: list[str] = []
    run(first, out, shard_gb=30e-6, say=said.append)
    assert "starting over" in said[0]


def test_a_shard_without_its_error_sums_is_made_again(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    with pytest.raises(Interrupted):
        run(source, out, shard_gb=30e-6, on_bytes=StopAfter(150_000, KeyboardInterrupt()))
    for path in (tmp_path / "out.partial" / ".resume").glob("*.errors.json"):
        path.unlink()
    assert len(run(source, out, shard_gb=30e-6).layers) == 14


class StopAfter:
    """on_bytes that interrupts after so many bytes."""

    def __init__(self, nbytes: int, error: BaseException) -> None:
        self.left, self.error = nbytes, error

    def __call__(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise self.error


def test_interrupted_it_leaves_no_out_and_resumes_from_finished_shards(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    run(source, tmp_path / "straight", method="mse", shard_gb=30e-6)
    with pytest.raises(Interrupted, match=r"interrupted.*out was not made.*shards are finished and kept.*same command"):
        run(source, out, method="mse", shard_gb=30e-6, on_bytes=StopAfter(150_000, KeyboardInterrupt()))
    assert not out.exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("*.safetensors")}
    assert kept
    said: list[str] = []
    done: list[int] = []
    report = run(source, out, method="mse", shard_gb=30e-6, say=said.append, on_bytes=done.append)
    assert f"Resuming: {len(kept)} of" in said[0]
    assert sum(done) == report.bytes_before
    assert all((out / path.name).stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert folder_tensors(out) == folder_tensors(tmp_path / "straight")
    assert len(report.layers) == 14
    assert not (tmp_path / "out.partial").exists()
    assert not (out / ".resume").exists()


def test_other_settings_do_not_reuse_finished_shards(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    with pytest.raises(Interrupted):
        run(source, out, method="mse", shard_gb=30e-6, on_bytes=StopAfter(150_000, KeyboardInterrupt()))
    said: list[str] = []
    run(source, out, method="rtn", shard_gb=30e-6, say=said.append)
    assert "starting over" in said[0]
    run(source, tmp_path / "straight", method="rtn", shard_gb=30e-6)
    assert folder_tensors(out) == folder_tensors(tmp_path / "straight")


def test_a_disk_that_fills_up_is_said_and_can_be_resumed(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    reserve, calls = os.posix_fallocate, []

    def full_at_the_third(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_third)
    with pytest.raises(Interrupted, match=r"No space left.*2 of \d+ shards are finished"):
        run(source, out, shard_gb=30e-6)
    assert not out.exists()
    run(source, out, shard_gb=30e-6)
    assert out.exists()


def test_too_little_disk_is_refused_before_work(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = convert_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"MB free; the result needs"):
        run(make_checkpoint(), tmp_path / "out")


def test_a_second_process_on_the_same_out_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_checkpoint(), tmp_path / "out"
    refused: list[str] = []

    def while_running(n: int) -> None:
        if not refused:
            refused.append("trying")
            with pytest.raises(ValueError, match="Another process is writing"):
                run(source, out)

    run(source, out, on_bytes=while_running)
    assert refused


KILLED = """
import sys, time
from pathlib import Path
from tests.quant.test_convert import run
run(Path(sys.argv[1]), Path(sys.argv[2]), shard_gb=30e-6, on_bytes=lambda n: time.sleep(0.02))
"""


def test_killed_with_sigkill_it_resumes(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out, partial = make_checkpoint("llama"), tmp_path / "out", tmp_path / "out.partial"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(out)])
    deadline = time.monotonic() + 60
    while len(list(partial.glob("*.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    said: list[str] = []
    run(source, out, shard_gb=30e-6, say=said.append)
    assert "Resuming" in said[0]
    run(source, tmp_path / "straight", shard_gb=30e-6)
    assert folder_tensors(out) == folder_tensors(tmp_path / "straight")


MEASURED = """
import sys
from pathlib import Path
from qerl.bench.quantize import peak_resident_bytes
from tests.quant.test_convert import run
for source in sys.argv[1:]:  # the peak of the first and then, in the same process, of both
    run(Path(source), Path(source + ".out"))
    print(peak_resident_bytes())
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    sources = []
    for layers in (1, 6):
        shape = Shape(1024, layers, 4096, 16, 4, vocab=1024 * layers, tied=True, head_dim=64)
        sources.append(tmp_path / f"source{layers}")
        write_random_checkpoint(shape, sources[-1])
    command = [sys.executable, "-c", MEASURED, *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    largest_group = 2 * 4096 * 1024 * 2
    assert large - small < largest_group


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4"])
def test_gpu_writes_what_the_cpu_writes(tmp_path: Path, format: str) -> None:
    write_random_checkpoint(SHAPES["toy"], tmp_path / "source")
    for device in ("cpu", "cuda"):
        run(tmp_path / "source", tmp_path / device, format, "mse", device=device)
    assert folder_tensors(tmp_path / "cpu") == folder_tensors(tmp_path / "cuda")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qerl.config import CalibrationConfig, QuantizeConfig
from qerl.quant import calibrate
from qerl.quant.calibrate import CalibrationText
from qerl.quantize import quantize


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and 1 + 2 = 3. " * 40)
    return path


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_gptq_runs_on_the_cpu_and_transformers_reads_it(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], tmp_path: Path, text: Path, format: str
) -> None:
    source, out = make_checkpoint("llama"), tmp_path / "out"
    add_tokenizer(source)
    settings = QuantizeConfig(
        format=format,
        method="gptq",
        device="cpu",
        ignore=("*.layers.0.self_attn.*",),
        calibration=CalibrationConfig(file=text, num_samples=8, max_seq_length=64),
    )
    said: list[str] = []
    report = quantize(str(source), out, settings, say=said.append)
    assert "8 sequences, 512 tokens" in said[0]
    assert len(report.layers) == 14 - 4
    assert 0.02 < report.summary()["relative_error"] < 0.3
    assert report.bits_per_weight == pytest.approx(4.5 if format == "nvfp4" else 4.25, abs=0.02)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert bool(torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all())
    assert not (tmp_path / "out.partial").exists()
    assert (out / "quantize_report.json").exists()
    assert (out / "tokenizer.json").exists()


@pytest.mark.gpu
def test_awq_runs_on_the_gpu(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], tmp_path: Path, text: Path
) -> None:
    pytest.importorskip("llmcompressor")
    source, out = make_checkpoint("llama"), tmp_path / "out"
    add_tokenizer(source)
    calibration = CalibrationConfig(file=text, num_samples=8, max_seq_length=64)
    report = quantize(str(source), out, QuantizeConfig(method="awq", device="cuda", calibration=calibration))
    assert len(report.layers) == 14
    assert report.summary()["relative_error"] is None
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert bool(torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all())


def test_a_model_without_tokenizer_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    settings = QuantizeConfig(method="gptq", device="cpu", calibration=CalibrationConfig(file=text))
    with pytest.raises(ValueError, match="has no tokenizer"):
        quantize(str(make_checkpoint()), tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_samples_come_from_text_prompts_and_messages(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = make_checkpoint()
    add_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "abcdefgh"}\n\n{"prompt": "ijkl"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    samples = calibrate.read_samples(CalibrationText(path, 100, 4), tokenizer)
    assert all(len(sample) == 4 for sample in samples)
    assert tokenizer.decode([t for s in samples for t in s]).startswith("abcdefgh</s>ijkl</s>user: hi")
    assert len(calibrate.read_samples(CalibrationText(path, 2, 4), tokenizer)) == 2
    path.write_text('{"answer": 3}\n')
    with pytest.raises(ValueError, match="line 1, has none of the fields"):
        calibrate.read_samples(CalibrationText(path, 1, 4), tokenizer)
    path.write_text("{oops\n")
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        calibrate.read_samples(CalibrationText(path, 1, 4), tokenizer)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        calibrate.read_samples(CalibrationText(path, 1, 4), tokenizer)


def test_nan_is_refused_before_the_library_sees_it(
    make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], tmp_path: Path, text: Path
) -> None:
    source = make_checkpoint("llama")
    add_tokenizer(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = torch.inf
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    settings = QuantizeConfig(method="gptq", device="cpu", calibration=CalibrationConfig(file=text))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or Inf"):
        quantize(str(source), tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_missing_text_is_asked_for() -> None:
    with pytest.raises(ValueError, match="needs calibration text: --calibration FILE"):
        calibrate.require("gptq", "cpu", None)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    monkeypatch.setattr(calibrate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'qerl\[calibrate\]'"):
        calibrate.require("gptq", "cpu", text)

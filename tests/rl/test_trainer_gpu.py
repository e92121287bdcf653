"""The loop on a GPU: 4-bit base, bf16, noise, graphs, the cache asleep while training."""

from pathlib import Path

import pytest

import qerl
from qerl.metrics import read_metrics
from qerl.recipe import default_recipe, load_config
from qerl.rl.run import build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("base", ["nvfp4", "full"])
def test_reward_rises_on_a_gpu(tmp_path: Path, base: str) -> None:
    words = [
        "device=cuda",
        f"base={base}",
        "max_steps=25",
        "eval_size=200",
        "eval_steps=25",
        f"output_dir={tmp_path / 'run'}",
    ]
    words += ["learning_rate=1e-4"] if base == "full" else []
    result = qerl.train(load_config(default_recipe(), words))
    assert result.after["eval_accuracy"] >= result.before["eval_accuracy"] + 0.2
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    clean = [line for line in lines if line["noise/sigma"] == 0]
    assert all(line["sampling/sampling_logp_difference/mean"] < 0.05 for line in clean)  # bf16 rounding alone
    assert all(line["sampling/ess"] > 0.9 for line in clean)


def test_what_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    import torch

    words = ["device=cuda", f"output_dir={tmp_path / 'run'}", "max_completion_length=200", "prompts_per_step=4096"]
    words += ["micro_batch_tokens=6000000"]
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(2e9 / total)
    try:
        with pytest.raises(ValueError, match=r"Lower\s+micro_batch_tokens to \d+, which fits"):
            build(load_config(default_recipe(), words))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

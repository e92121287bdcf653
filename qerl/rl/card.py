"""The folder that a trained adapter is shared as: PEFT's files, the curves, and a model card that says how it was made.

RUN/adapter/               adapter_config.json, adapter_model.safetensors, README.md, plots/
RUN/adapter-step-000050/   the same of an older checkpoint, where that was asked for
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

import qerl
from qerl.config import Config
from qerl.metrics import read_metrics
from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.model.adapter import read_settings
from qerl.recipe import load_config, settings
from qerl.rl.checkpoint import ADAPTER, STATE, checkpoints
from qerl.rl.display import counted
from qerl.rl.folder import CHECKPOINTS, CONFIG, METRICS
from qerl.tasks.source import SUFFIXES

CARD, PLOTS = "README.md", "plots"
REPOSITORY = "THIS_REPOSITORY"  # in a card, until it is known where it goes
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Of the machine or of the person, not of the recipe.
PRIVATE = {
    *("output_dir", "data_dir", "init_adapter", "device", "report_to", "project", "quantize.device"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "model"),
}


def share_run(run: Path, plots: list[Path], checkpoint: Path, into: Path | None = None) -> Path:
    """Write RUN/adapter from the newest checkpoint, or RUN/adapter-step-N from an older one, with the run's metrics and
    plots; returns it. It is replaced as a whole. into: a folder for it in place of the run's."""
    if not (checkpoint / ADAPTER / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{checkpoint} holds no adapter (full training?); only adapters are shared.")
    config, into = load_config(run / CONFIG), into or run
    newest = checkpoint.name == checkpoints(run / CHECKPOINTS)[-1].name
    target, partial = into / (ADAPTER if newest else f"{ADAPTER}-{checkpoint.name}"), into / f".{ADAPTER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint / ADAPTER, partial)
    name_base(partial, config.model)
    (partial / PLOTS).mkdir()
    for path in plots:
        shutil.copy(path, partial / PLOTS)
    state = json.loads((checkpoint / STATE).read_text())["run"]
    lines = [line for line in read_metrics(run / METRICS) if line["step"] <= state["step"]]
    (partial / CARD).write_text(run_card(config, state, lines, [path.name for path in plots]), encoding="utf-8")
    old = into / f".{ADAPTER}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def name_base(folder: Path, model: str) -> None:
    """A folder of this machine means nothing elsewhere: its name alone stands in the adapter's configuration."""
    path = folder / ADAPTER_CONFIG
    written = json.loads(path.read_text()) | {"base_model_name_or_path": base_name(model)}
    path.write_text(json.dumps(written, indent=2))


def base_name(model: str) -> str:
    """A hub id as it is; of a folder its name."""
    return model if is_hub_id(model) else f"qerl-{model}" if model == "tiny" else Path(model).name


def is_hub_id(model: str) -> bool:
    return bool(HUB_ID.fullmatch(model)) and not Path(model).exists()


def run_card(config: Config, state: dict[str, Any], lines: list[dict[str, Any]], plots: list[str]) -> str:
    """The card of a run's adapter: base, evaluation, curves, recipe."""
    base, task = base_name(config.model), Path(config.task).name if config.task.endswith(SUFFIXES) else config.task
    recipe = {e.key: e.value for e in settings(config) if e.value != e.default and e.key not in PRIVATE}
    begun = {} if config.init_adapter is None else {"init_adapter": config.init_adapter.name}
    recipe = {"model": base, "task": task} | recipe | {"task": task} | begun
    plain = json.loads(json.dumps(recipe, default=str))
    sampled = next((line["num_tokens"] for line in reversed(lines) if "num_tokens" in line), 0)
    return "\n\n".join(
        (
            front_matter(config.model, ["grpo", config.base, config.loss_type]),
            f"# {config.output_dir.name}",
            f"A LoRA adapter for {link(config.model)}, trained by reinforcement learning ({config.loss_type}) on "
            f"`{task}` with qerl {qerl.__version__}, which follows [QeRL](https://arxiv.org/abs/2510.11696): "
            f"{counted(state['step'], 'step')}, {sampled:,} tokens. {frozen(config.base)}",
            "## Evaluation",
            evaluation(state["before"], state["after"] if state["evaluated"] == state["step"] else {}),
            "## Curves",
            "\n".join(f"![{Path(name).stem}]({PLOTS}/{name})" for name in plots) or "None.",
            "## Recipe",
            f"What differs from qerl's defaults:\n\n```yaml\n{yaml.safe_dump(plain, sort_keys=False)}```",
            "## Use",
            use(config.model),
        )
    )


def adapter_card(folder: Path, model: str) -> str:
    """The card of an adapter whose run is not known."""
    lora = read_settings(folder)
    return "\n\n".join(
        (
            front_matter(model, []),
            f"# {folder.resolve().name}",
            f"A LoRA adapter for {link(model)}: rank {lora.r}, alpha {lora.lora_alpha:g}.",
            "## Use",
            use(model),
        )
    )


def front_matter(model: str, tags: list[str]) -> str:
    """The hub's metadata. It knows a base by its hub id only."""
    base = {"base_model": model} if is_hub_id(model) else {}
    data = base | {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["qerl", "lora", *tags]}
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def link(model: str) -> str:
    if is_hub_id(model):
        return f"[{model}](https://huggingface.co/{model})"
    return f"`{base_name(model)}` ({'the model shipped with qerl' if model == 'tiny' else 'a local folder'})"


def frozen(base: str) -> str:
    """What the adapter was trained on, and what that means for its use."""
    plain = f"While it was trained the base's weights were frozen as {base}."
    if base == "bf16":
        return plain
    return f"{plain} On the base in 16 bits, as below, it is a slightly different model: see qerl's docs/export.md."


def evaluation(before: dict[str, float], after: dict[str, float]) -> str:
    rows = [f"| {key.removeprefix('eval_')} | {before[key]:.4g} | {after[key]:.4g} |" for key in after if key in before]
    if not rows:
        return "None was made of this step."
    return "\n".join(("Held-out prompts, continued greedily:\n", "| | before | after |", "|---|---|---|", *rows))


def use(model: str) -> str:
    local = "" if is_hub_id(model) else "  # a local folder: write its path"
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base_name(model)}"){local}
model = PeftModel.from_pretrained(base, "{REPOSITORY}")
```
"""

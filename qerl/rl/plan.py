"""What a run will do and what it will take, from its settings: no weights, no data, no GPU, no network."""

from dataclasses import asdict, dataclass
from typing import Any

from qerl.config import Config
from qerl.model.adapter import read_settings
from qerl.model.layers import LoraSettings
from qerl.model.shapes import Shape, shape_of
from qerl.rl.footprint import Footprint, Workload, footprint, trained_weights
from qerl.rl.sizes import (
    OPTIMIZER_BYTES,
    copied_keys,
    group_tokens,
    largest_micro_batch,
    longest_sequence,
    running_sequences,
    total_steps,
)
from qerl.tasks.size import training_rows

GB = 10**9


@dataclass(frozen=True)
class Plan:
    """Tokens are upper bounds: every prompt and completion at its longest, no group drawn again."""

    rows: int | None  # of the training data; None: not known without a download
    steps: int | None
    epochs: float | None
    updates: int | None
    completions_a_step: int
    sampled_tokens_a_step: int
    sampled_tokens: int | None  # over the run
    updated_tokens: int | None  # that updates compute: a group's prompt once, unless micro-batches cut it
    trained_weights: int
    memory: Footprint
    gpu_gb: float
    fits: bool
    sequences: int  # decoded at a time, at most: a step's completions, or an evaluation's questions if those are more
    whole_sequences: int  # that the cache holds at their longest
    advice: str  # what would fit, where this does not

    def summary(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "memory"}
        parts = {key: round(value / GB, 3) for key, value in asdict(self.memory).items()}
        gpu = int(self.gpu_gb * GB)
        peaks = {"updating": self.memory.updating(gpu), "sampling": self.memory.sampling(gpu)}
        peaks |= {"cache": self.memory.cache(gpu), "torch_update_peak": self.memory.update_peak}
        peaks |= {"workspace": self.memory.workspace_for(gpu)}  # of the cache that this GPU has room for
        return found | {"memory_gb": parts | {key: round(value / GB, 3) for key, value in peaks.items()}}


def make_plan(config: Config, gpu_gb: float = 80.0) -> Plan:
    if gpu_gb <= 0:
        raise ValueError(f"--gpu is the GPU's memory in GB, such as 80: {gpu_gb:g} is not above 0.")
    shape, rows, gpu = shape_of(config.model), training_rows(config), int(gpu_gb * GB)
    steps = total_steps(config, rows or 0) if rows is not None or config.max_steps >= 0 else None
    completions = config.prompts_per_step * config.num_generations
    sampled = completions * config.max_completion_length
    passed = config.prompts_per_step * group_tokens(config) * config.num_iterations
    parts = footprint(shape, workload(config))
    fits = parts.fits(gpu)
    return Plan(
        rows=rows,
        steps=steps,
        epochs=None if steps is None or not rows else steps * config.prompts_per_step / rows,
        updates=None if steps is None else steps * config.steps_per_generation * config.num_iterations,
        completions_a_step=completions,
        sampled_tokens_a_step=sampled,
        sampled_tokens=None if steps is None else steps * sampled,
        updated_tokens=None if steps is None else steps * passed,
        trained_weights=sum(trained_weights(shape, workload(config))),
        memory=parts,
        gpu_gb=gpu_gb,
        fits=fits,
        sequences=parts.cache_wanted // parts.cache_each,
        whole_sequences=parts.cache(gpu) // parts.cache_each,
        advice="" if fits else advice(config, shape, gpu),
    )


def workload(config: Config) -> Workload:
    lora = LoraSettings(config.lora_r, config.lora_alpha, config.lora_target_modules, train_norms=config.train_norms)
    return Workload(
        base=config.base,
        lora=lora if config.init_adapter is None else read_settings(config.init_adapter),
        optimizer_bytes=OPTIMIZER_BYTES[config.optim],
        micro_batch=largest_micro_batch(config),
        keys=copied_keys(config),
        recompute=config.recompute,
        sequences=running_sequences(config, config.eval_size),
        longest=longest_sequence(config),
        item=4 if config.dtype == "float32" else 2,
        kv_cache_dtype=config.kv_cache_dtype,
    )


def advice(config: Config, shape: Shape, gpu: int) -> str:
    """The first change that makes the run fit, the one that costs least first; all together come last."""
    longest = longest_sequence(config)
    shorter = max(1, config.max_completion_length // 2)
    changes: list[dict[str, Any]] = [
        {"recompute": True},
        {"optim": "adamw_8bit"},
        *({"micro_batch_tokens": n} for n in (16384, 8192, 4096) if longest <= n < config.micro_batch_tokens),
        {"micro_batch_tokens": longest},
        *([{"base": "bf16"}] if config.base == "full" else []),  # LoRA instead of all weights
        {"base": "nvfp4"},
        {"max_completion_length": shorter, "micro_batch_tokens": config.max_prompt_length + shorter},
        {"base": "nvfp4", "optim": "adamw_8bit", "recompute": True, "micro_batch_tokens": longest},
    ]
    for change in changes:
        if footprint(shape, workload(config.model_copy(update=change))).fits(gpu):
            return " ".join(f"{key}={value}" for key, value in change.items())
    return ""

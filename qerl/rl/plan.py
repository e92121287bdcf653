"""What a run will do and what it will take, from its settings: no weights, no data, no GPU, no network."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from qerl.config import Config
from qerl.engine.engine import MAX_RUNNING
from qerl.model.adapter import read_settings
from qerl.model.layers import LoraSettings
from qerl.model.shapes import Shape, shape_of
from qerl.rl.advice import changes, too_large
from qerl.rl.footprint import CONTEXT, Footprint, Workload, fewest_recomputed, footprint, trained_weights
from qerl.rl.sizes import (
    OPTIMIZER_BYTES,
    copied_keys,
    group_tokens,
    largest_micro_batch,
    longest_sequence,
    penalizes,
    require_context,
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
    micro_batch: int  # tokens of the largest: micro_batch_tokens, or what there is
    blocks: int  # of the model
    recomputed_blocks: int  # whose activations are computed again in the backward pass
    memory: Footprint
    gpu_gb: float
    fits: bool
    step_sequences: int  # decoded at a time in a step
    eval_sequences: int  # and in an evaluation
    whole_sequences: int  # that the cache holds at their longest
    too_large: str  # what it is that does not fit
    advice: str  # what would fit, where this does not

    def summary(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if key != "memory"}
        parts = {key: round(value / GB, 3) for key, value in asdict(self.memory).items()}
        gpu = int(self.gpu_gb * GB)
        peaks = {"updating": self.memory.updating, "sampling": self.memory.sampling(gpu)}
        peaks |= {"cache": self.memory.cache(gpu), "torch_update_peak": self.memory.update_peak}
        peaks |= {"update_margin": self.memory.update_margin, "sample_margin": self.memory.sample_margin}
        return found | {"memory_gb": parts | {key: round(value / GB, 3) for key, value in peaks.items()}}


def make_plan(config: Config, gpu_gb: float = 80.0) -> Plan:
    if not 0 < gpu_gb < math.inf:
        raise ValueError(f"--gpu is the GPU's memory in GB, a number above 0 such as 80, not {gpu_gb:g}.")
    shape, rows, gpu = shape_of(config.model), training_rows(config), int(gpu_gb * GB)
    require_context(config, shape.context)
    steps = total_steps(config, rows or 0) if rows is not None or config.max_steps >= 0 else None
    completions = config.prompts_per_step * config.num_generations
    sampled = completions * config.max_completion_length
    passed = config.prompts_per_step * group_tokens(config) * config.num_iterations
    work = workload(config, shape, gpu)
    parts = footprint(shape, work)
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
        trained_weights=sum(trained_weights(shape, work)),
        micro_batch=work.micro_batch,
        blocks=shape.layers,
        recomputed_blocks=work.recompute,
        memory=parts,
        gpu_gb=gpu_gb,
        fits=fits,
        step_sequences=running_sequences(config, 0),
        eval_sequences=min(MAX_RUNNING, config.eval_size),
        whole_sequences=parts.cache(gpu) // parts.cache_each,
        too_large="" if fits else too_large(parts, gpu),
        advice="" if fits else advice(config, shape, gpu),
    )


def workload(config: Config, shape: Shape, gpu: int) -> Workload:
    """On a GPU of so many bytes, which decides how many blocks are recomputed where that is left open."""
    lora = LoraSettings(config.lora_r, config.lora_alpha, config.lora_target_modules, train_norms=config.train_norms)
    work = Workload(
        base=config.base,
        lora=lora if config.init_adapter is None else read_settings(config.init_adapter),
        optimizer_bytes=OPTIMIZER_BYTES[config.optim],
        micro_batch=largest_micro_batch(config),
        keys=copied_keys(config),
        recompute=shape.layers,
        sequences=running_sequences(config, config.eval_size),
        longest=longest_sequence(config),
        item=4 if config.dtype == "float32" else 2,
        kv_cache_dtype=config.kv_cache_dtype,
        penalty=penalizes(config),
    )
    if config.recompute == "auto":
        return replace(work, recompute=fewest_recomputed(shape, work, gpu))
    require_blocks(config, shape)
    named = {"all": shape.layers, "none": 0}
    return replace(work, recompute=named[config.recompute] if isinstance(config.recompute, str) else config.recompute)


def require_blocks(config: Config, shape: Shape) -> None:
    if isinstance(config.recompute, int) and config.recompute > shape.layers:
        raise ValueError(
            f"recompute={config.recompute}: the model has {shape.layers} blocks. Write recompute=all, or a number up "
            f"to {shape.layers}."
        )


def recomputed_blocks(config: Config, shape: Shape, device: torch.device) -> int:
    """The same for the device that a model has just been loaded on; none on a CPU."""
    if device.type != "cuda":
        return 0
    return workload(config, shape, within_reach(device)).recompute


def within_reach(device: torch.device) -> int:
    """Bytes of a GPU that this process has or can have, CUDA's context included."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + CONTEXT


def advice(config: Config, shape: Shape, gpu: int) -> str:
    """The first change that makes the run fit, the one that costs least first; "" where none does."""
    for change in changes(config):
        if footprint(shape, workload(config.model_copy(update=change), shape, gpu)).fits(gpu):
            return " ".join(f"{key}={value}" for key, value in change.items())
    return ""

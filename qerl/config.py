"""Every setting of qerl, typed, checked when built, each with its help and unit. (Recipes: `qerl.recipe`.)"""

from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Format = Literal["nvfp4", "mxfp4", "nf4"]
Method = Literal["rtn", "mse", "awq", "gptq"]
Base = Literal["bf16", "nvfp4", "mxfp4", "nf4", "full"]
Schedule = Literal["exponential", "linear", "cosine", "logarithmic", "constant", "entropy", "off"]
LossType = Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo"]


class ConfigError(ValueError):
    """A setting that can't be used; the message names it and what to write instead."""


def setting(default: Any, help: str, unit: str, **limits: Any) -> Any:
    """A field with its help and unit ("name" and "true/false" for what has none)."""
    return Field(default, description=help, json_schema_extra={"unit": unit}, **limits)


def _only_a_list(annotation: Any) -> bool:
    """Whether a setting takes a list and, none aside, nothing else."""
    kinds = (annotation,) if get_origin(annotation) is tuple else get_args(annotation)
    return {get_origin(kind) for kind in kinds if kind is not NoneType} == {tuple}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list_of_one(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            return value
        if not _only_a_list(cls.model_fields[info.field_name or ""].annotation):
            return value
        if isinstance(value, str) and "," in value and info.field_name != "ignore":  # of patterns
            raise ValueError(f"{value!r} is one value. A list is written in brackets: [{value}].")
        return (value,)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if value is False and "off" in get_args(field.annotation):  # YAML reads off as false
            return "off"
        if isinstance(value, bool) and field.annotation in (int, float, str):
            raise ValueError(f"{value!r} is true/false, where a {field.annotation.__name__} belongs.")
        return value


class CalibrationConfig(Section):
    """The text that AWQ and GPTQ look at."""

    file: Path | None = setting(
        None, "JSONL (text, prompt or messages a row) or plain text; needed by awq and gptq.", "path"
    )
    num_samples: int = setting(256, "How many sequences to take from the file.", "sequences", ge=1)
    max_seq_length: int = setting(2048, "Length of a sequence.", "tokens", ge=16)


class QuantizeConfig(Section):
    """How 16-bit weights become 4-bit ones."""

    format: Format = setting("nvfp4", "4-bit format: nvfp4, mxfp4 or nf4.", "name")
    method: Method = setting(
        "mse",
        "Rounding: rtn (nearest), mse (best scale a block), awq or gptq (llm-compressor, calibration text).",
        "name",
    )
    double_quant: bool = setting(False, "nf4 only: store the blocks' absmax in 8 bits as well.", "true/false")
    ignore: tuple[str, ...] = setting(
        (), "Linear layers left in 16 bits besides the head: names, shell patterns, or re:expressions.", "patterns"
    )
    device: str = setting("auto", "Where to compute: cpu, cuda, cuda:1, or auto (a GPU if there is one).", "name")
    max_shard_size: float = setting(
        2.0, "Largest output file; a finished one survives an interruption.", "GB", gt=0, le=1000
    )
    calibration: CalibrationConfig = CalibrationConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "QuantizeConfig":
        if self.double_quant and self.format != "nf4":
            raise ValueError(f"double_quant belongs to nf4, not to {self.format}. Drop it or set format=nf4.")
        if self.method in ("awq", "gptq"):
            if self.format == "nf4":
                raise ValueError(f"method {self.method} knows nvfp4 and mxfp4, not nf4. Use method=mse or rtn for nf4.")
        elif self.calibration.file is not None:
            raise ValueError(f"calibration.file is for awq and gptq; method {self.method} reads no text. Drop it.")
        return self


class NoiseConfig(Section):
    """Adaptive quantization noise (AQN): exploration by noise on the norms' gains while sampling."""

    schedule: Schedule = setting(
        "exponential",
        "How sigma goes from sigma_start to sigma_end over the stages; entropy: a closed loop; off: no noise.",
        "name",
    )
    sigma_start: float = setting(1e-2, "Noise of the first noisy stage (entropy: of the first step).", "std", gt=0)
    sigma_end: float = setting(1e-4, "Noise of the last stage.", "std", gt=0)
    num_stages: int = setting(10, "Stages of equal length; the first is clean.", "stages", ge=2)
    profile: Literal["uniform", "linear"] | tuple[float, ...] = setting(
        "uniform", "Factor on sigma over depth: uniform, linear (deeper is noisier, mean 1), or one a layer.", "factors"
    )
    in_loss: bool = setting(False, "Apply the noise in the loss forward as well.", "true/false")
    target_entropy: float | tuple[float, float] | None = setting(
        None, "entropy: what to hold; two numbers: a line over the run; none: the first step's entropy.", "nats"
    )
    gain: float = setting(0.5, "entropy: how fast sigma follows (eta).", "factor", gt=0, le=10)
    sigma_min: float = setting(1e-5, "entropy: least sigma.", "std", gt=0)
    sigma_max: float = setting(1e-1, "entropy: largest sigma.", "std", gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> "NoiseConfig":
        if self.schedule == "entropy" and not self.sigma_min <= self.sigma_start <= self.sigma_max:
            raise ValueError("sigma_start must lie between sigma_min and sigma_max.")
        asked = self.target_entropy
        if asked is not None and min(asked if isinstance(asked, tuple) else (asked,)) <= 0:
            raise ValueError("target_entropy must be above 0.")
        return self


class DynamicSamplingConfig(Section):
    """Groups without variance teach nothing: drop them and draw others, as DAPO does."""

    enabled: bool = setting(True, "Drop groups without variance and refill.", "true/false")
    metric: str | None = setting(
        None, "Reward function whose variance counts; none: the accuracy reward if there is one, else the sum.", "name"
    )
    max_waves: int = setting(4, "Rollouts a step at most, the first included.", "waves", ge=1)


class CorrectionConfig(Section):
    """Importance weights for the difference between the sampler and the clean policy."""

    form: Literal["token", "masked", "sequence", "geometric", "off"] = setting(
        "token", "Weight each token; set those above the cap to 0 (masked); or one weight a sequence.", "name"
    )
    cap: float = setting(2.0, "Largest weight.", "factor", gt=0)


class CodeConfig(Section):
    """Rewards that run programs."""

    unsafe: bool = setting(
        False, "Run programs where the system has no isolation, with limits only. Read docs/sandbox.md.", "true/false"
    )


class ArithmeticConfig(Section):
    """The task `arithmetic`: generated sums."""

    levels: tuple[int, ...] = setting(
        (2, 3, 3, 4, 4), "Digits of the numbers; one of these is drawn for each problem.", "digits"
    )


class Config(Section):
    """All settings. Names are TRL's and PEFT's where they mean the same."""

    model: str = setting("tiny", "Checkpoint folder or hub id; tiny is the model shipped with qerl.", "name")
    base: Base = setting(
        "nvfp4", "Weights: bf16, nvfp4, mxfp4 or nf4 with LoRA; full: 16-bit weights, all of them trained.", "name"
    )
    device: str = setting("auto", "Where to compute: cpu, cuda, cuda:1, or auto (a GPU if there is one).", "name")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "Of activations and 16-bit weights; auto: bfloat16 on a GPU, float32 on a CPU.", "name"
    )
    output_dir: Path = setting(Path("runs/qerl"), "Folder for everything a run leaves.", "path")
    seed: int = setting(0, "Of data order, sampling, LoRA's start and noise.", "number", ge=0)

    task: str = setting("arithmetic", "Registered task, hub id, or a .jsonl or .parquet file of rows.", "name")
    data_dir: Path | None = setting(None, "Folder with data sets as files, looked into before the hub.", "path")
    system_prompt: str | None = setting(None, "In place of the task's own; empty: none.", "text")
    reward_funcs: tuple[str, ...] | None = setting(
        None,
        "Rewards by registered name, or by import path: module.function, or module:function for the workers; "
        "none: the task's own.",
        "names",
    )
    reward_weights: tuple[float, ...] | None = setting(None, "Weight of each reward; none: 1 each.", "factors")
    reward_workers: int = setting(2, "Processes that run graders, where rewards are graders.", "processes", ge=1)
    reward_memory_mb: int = setting(4096, "Memory of each such process.", "MB", ge=256)
    reward_timeout: float | None = setting(
        None, "Longest call of reward functions; of your own graders for each sample (none: 5).", "s", gt=0
    )
    max_prompt_length: int = setting(512, "Longer prompts are left out.", "tokens", ge=1)

    max_steps: int = setting(
        -1, "Steps to train: a step is one rollout and its updates. -1: by epochs.", "steps", ge=-1
    )
    num_train_epochs: float = setting(1.0, "Passes over the data where max_steps is -1.", "epochs", gt=0)
    prompts_per_step: int = setting(16, "Prompts of a rollout.", "prompts", ge=1)
    num_generations: int = setting(8, "Completions of each prompt, G.", "completions", ge=2)
    steps_per_generation: int = setting(1, "Updates that a rollout is cut into.", "updates", ge=1)
    num_iterations: int = setting(1, "Epochs over a rollout.", "epochs", ge=1)
    micro_batch_tokens: int = setting(16384, "Packed tokens of a forward and backward pass.", "tokens", ge=1)
    recompute: Literal["auto", "all", "none"] | int = setting(
        "auto",
        "Blocks whose activations are computed again in the backward pass, on a GPU: as few as memory asks for (auto), "
        "all, none, or how many.",
        "blocks",
    )

    max_completion_length: int = setting(256, "New tokens at most.", "tokens", ge=1)
    temperature: float = setting(
        1.0, "Of sampling and of the trained policy; 0.001 or more (evaluation is greedy).", "factor", ge=1e-3
    )
    top_p: float = setting(1.0, "Sample from the most likely tokens of this mass.", "share", gt=0, le=1)
    top_k: int = setting(0, "Sample from so many tokens; 0: all.", "tokens", ge=0)
    min_p: float = setting(0.0, "Leave out tokens below this share of the likeliest.", "share", ge=0, le=1)
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = setting(
        "auto", "The sampler's keys and values: auto (as computed), or fp8: half the memory, rounded.", "name"
    )
    repetition_penalty: float = setting(1.0, "Above 1: seen tokens become less likely.", "factor", gt=0)

    loss_type: LossType = setting("dapo", "grpo, dapo, dr_grpo, bnpo or cispo.", "name")
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "Ratio of each token, or one of the sequence (GSPO).", "name"
    )
    ratio: Literal["clean", "behaviour"] = setting(
        "clean",
        "The ratio's old policy: the clean one at rollout time, or the sampler as it was (no correction).",
        "name",
    )
    epsilon: float = setting(0.2, "Clip range of the ratio.", "share", gt=0)
    epsilon_high: float | None = setting(None, "Upper clip range; none: epsilon (cispo: cap of 5).", "share", gt=0)
    beta: float = setting(0.0, "Weight of the KL to the policy without adapter.", "factor", ge=0)
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "Divide advantages by the std of the group, of the batch, or not.", "name"
    )
    mask_truncated_completions: bool = setting(
        True, "Leave completions without an end out of the loss (not out of the group's mean).", "true/false"
    )

    learning_rate: float = setting(1e-5, "Of AdamW.", "rate", gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting("cosine", "After the warm-up.", "name")
    warmup_steps: float = setting(0.1, "Updates of warm-up; below 1: their share of all.", "updates", ge=0)
    optim: Literal["adamw", "adamw_8bit"] = setting("adamw", "adamw (fused) or adamw_8bit (bitsandbytes).", "name")
    weight_decay: float = setting(0.1, "Of AdamW.", "factor", ge=0)
    adam_beta1: float = setting(0.9, "Of AdamW.", "factor", ge=0, lt=1)
    adam_beta2: float = setting(0.99, "Of AdamW.", "factor", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "Of AdamW.", "number", gt=0)
    max_grad_norm: float = setting(0.2, "Gradients are clipped to this norm.", "norm", gt=0)
    max_skipped_updates: int = setting(3, "Updates in a row with NaN or Inf before the run stops.", "updates", ge=1)

    lora_r: int = setting(32, "Rank of LoRA.", "rank", ge=1)
    lora_alpha: float = setting(64.0, "LoRA's scale is lora_alpha / lora_r.", "number", gt=0)
    lora_target_modules: tuple[str, ...] | str = setting("all-linear", "As PEFT's target_modules.", "names")
    init_adapter: Path | None = setting(
        None, "PEFT adapter to start from, with its own rank and targets; it is also the reference of beta.", "path"
    )
    train_norms: bool = setting(False, "Train the gains of the blocks' norms as well.", "true/false")

    logging_steps: int = setting(1, "Print a line every so many steps (metrics.jsonl has all).", "steps", ge=1)
    save_steps: int = setting(50, "Write a checkpoint every so many steps, and at the end.", "steps", ge=1)
    save_total_limit: int = setting(2, "Checkpoints kept.", "checkpoints", ge=1)
    eval_steps: int = setting(50, "Evaluate every so many steps, before and after; never: eval_size=0.", "steps", ge=1)
    eval_size: int = setting(256, "Held-out prompts, greedily continued; 0: no evaluation.", "prompts", ge=0)
    log_completions: bool = setting(True, "Write every step's completions as Parquet.", "true/false")
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = setting(
        (), "Trackers told of metrics and completions besides the files: tensorboard, wandb, trackio; or none.", "names"
    )
    project: str | None = setting(None, "Project in wandb and trackio; none: wandb's own choice, qerl.", "name")
    push_to_hub: bool = setting(False, "Upload the adapter with its card at the end.", "true/false")
    hub_model_id: str | None = setting(None, "Repository to push to; none: yours, by output_dir's name.", "name")
    hub_private_repo: bool | None = setting(
        None, "Make a new repository private; none: as your account has it.", "true/false"
    )

    noise: NoiseConfig = NoiseConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    correction: CorrectionConfig = CorrectionConfig()
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    code: CodeConfig = CodeConfig()
    quantize: QuantizeConfig = QuantizeConfig()

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @field_validator("recompute", mode="before")
    @classmethod
    def _all_or_none(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise ValueError(f"{value} blocks can't be recomputed; write auto, all, none or a number from 0 up.")
        return ("all" if value else "none") if isinstance(value, bool) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: Any) -> Any:
        named = [value] if value in ("none", "") else value
        return [name for name in named if name not in ("none", "")] if isinstance(named, list | tuple) else named

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _as_trl_writes_it(cls, value: Any) -> Any:
        return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.prompts_per_step % self.steps_per_generation:
            raise ValueError(
                f"prompts_per_step ({self.prompts_per_step}) must be a multiple of steps_per_generation "
                f"({self.steps_per_generation}), so that every update has the same number of groups."
            )
        weights, functions = self.reward_weights, self.reward_funcs
        if weights is not None and functions is not None and len(weights) != len(functions):
            raise ValueError(f"{len(weights)} reward_weights for {len(functions)} reward_funcs.")
        if self.kv_cache_dtype != "auto" and self.ratio == "clean" and self.correction.form == "off":
            raise ValueError(
                "kv_cache_dtype=fp8 lets the sampler differ from the policy that is trained, and nothing corrects for "
                "it with correction.form=off. Leave the correction on, or set kv_cache_dtype=auto."
            )
        if self.base == "full" and self.init_adapter is not None:
            raise ValueError("init_adapter needs LoRA: take a base other than full.")
        if self.base == "full" and self.push_to_hub:
            raise ValueError("push_to_hub uploads adapters, which full training has not. Drop it.")
        if self.base == "full" and self.beta > 0:
            raise ValueError("beta needs the policy without adapter as its reference, which full training has not.")
        return self

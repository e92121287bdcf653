"""A whole step of RL through the trainer itself, on random weights: every part's seconds, and memory beside the plan's.

Prompts and completions have a fixed length (nothing ends a sample), no group is dropped, and the reward looks at the
first token. Times are medians over the steps after the first, which compiles kernels and captures graphs; the device's
work is waited for between parts.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from qerl.bench.clock import Clock, allocated_gb, occupied, peak_gb, reset_peak
from qerl.bench.decode import decoded, random_model
from qerl.bench.machine import require_context, require_shapes
from qerl.bench.qlora import BITSANDBYTES, nearest, ratios, require, rivals_first
from qerl.bench.training import Say, recomputed, require_recompute
from qerl.config import Config
from qerl.device import resolve_device
from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE
from qerl.metrics import Metrics
from qerl.model.adapter import trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.shapes import shape_named
from qerl.recipe import build_config
from qerl.records import Sampling
from qerl.rl.batch import MicroBatch
from qerl.rl.checkpoint import RunState
from qerl.rl.data import PromptSource
from qerl.rl.display import Display
from qerl.rl.footprint import footprint
from qerl.rl.guard import optimizer_bytes
from qerl.rl.plan import workload
from qerl.rl.rollout import train_samples
from qerl.rl.sizes import longest_sequence
from qerl.rl.trainer import Trainer
from qerl.rl.update import Tally, Updater, make_optimizer
from qerl.tasks.rewards import Rewards

PARTS = ("rollout", "reward", "old_logprobs", "forward", "backward", "optimizer", "sleep", "wake")
# Prompts, completions of each, and tokens of both where nobody says: on a CPU two bases are done in about a minute.
ON_A_GPU, ON_A_CPU = (16, 8, 256, 512), (4, 4, 64, 64)


@dataclass(frozen=True)
class Steps:
    """What is measured."""

    shapes: list[str]
    bases: list[str]
    running: list[int]  # sequences that decode at a time
    prompts: int
    group: int
    prompt: int  # tokens of a prompt
    new: int  # tokens of a completion
    rank: int
    recompute: str
    micro_batch: int  # tokens
    steps: int
    updates: int = 1  # that a rollout is cut into; more than one asks for old log-probs
    limit_gb: float | None = None
    device: str = "auto"


class Numbers:
    """Stands in for a tokenizer: text is token ids in decimal."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


class TimedEngine(Engine):
    """Notes how long the cache takes to go and come, and what the device holds just before."""

    clock: Clock
    held: int = 0  # most bytes of the device in use, as seen when the cache goes or comes

    def sleep(self) -> None:
        self._look()
        with self.clock.part("sleep"):
            super().sleep()

    def wake(self) -> None:
        self._look()
        with self.clock.part("wake"):
            super().wake()

    def _look(self) -> None:
        if self.model.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.model.device)
            self.held = max(self.held, total - free)


class TimedUpdater(Updater):
    """What is not forward and not optimizer is backward, clipping included."""

    clock: Clock
    largest: tuple[int, int] = (0, 0)  # of the micro-batches: tokens, and keys where prompts are shared

    def step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.clock.part("backward"):
            return super().step(*args, **kwargs)

    def score(self, *args: Any, **kwargs: Any) -> None:
        with self.clock.part("old_logprobs"):
            super().score(*args, **kwargs)

    def _loss(self, micro: MicroBatch, tally: Tally) -> torch.Tensor:
        keys = micro.packed.keys
        self.largest = max(self.largest, (len(micro.packed.ids_T), 0 if keys is None else sum(keys.lengths)))
        with self.clock.part("forward"):
            return super()._loss(micro, tally)

    def _apply(self, *args: Any, **kwargs: Any) -> None:
        with self.clock.part("optimizer"):
            super()._apply(*args, **kwargs)


def measure(job: Steps, say: Say) -> Iterator[dict[str, Any]]:
    """A row for each shape, base and number of sequences in flight; rivals first: the others have their ratios."""
    device = resolve_device(None if job.device == "auto" else job.device)
    if job.steps < 2:
        raise ValueError("--steps must be at least 2: the first one only warms up.")
    require(job.bases)  # refused before anything is made
    require_shapes(job.shapes, device)
    require_context(job.shapes, job.prompt, job.new)
    require_recompute(job.recompute, job.shapes)
    if job.prompts % job.updates:
        raise ValueError(
            f"--prompts ({job.prompts}) must be a multiple of --updates ({job.updates}), so that every update has the "
            f"same number of groups."
        )
    for base in job.bases:
        settings(job, base, Path())
    in_flight = list(dict.fromkeys(min(count, job.prompts * job.group) for count in job.running))
    ballast = occupied(job.limit_gb, device)
    taken = ballast.nbytes if ballast is not None else 0
    for name in job.shapes:
        done: dict[tuple[str, int], float] = {}
        for base in rivals_first(job.bases):
            say(f"Making random weights of {name} as {base} ...")
            try:
                model = random_model(name, base, job.rank, device)
            except torch.OutOfMemoryError:
                say(f"{name} as {base} does not fit.")
                reset_peak(device)
                continue
            for running in in_flight:
                try:
                    row = _row(job, name, base, model, running, taken, say)
                except torch.OutOfMemoryError as error:
                    say(f"{name} as {base} with {running} in flight does not fit: {str(error).splitlines()[0]}")
                else:
                    yield row | ratios(done, base, running, row["step_s"])
                for parameter in trained_parameters(model).values():
                    parameter.grad = None
                reset_peak(device)
            del model
            reset_peak(device)
    del ballast


def settings(job: Steps, base: str, folder: Path) -> Config:
    recompute = int(job.recompute) if job.recompute.isdigit() else job.recompute
    return build_config(
        {
            "base": nearest(base),
            "prompts_per_step": job.prompts,
            "num_generations": job.group,
            "steps_per_generation": job.updates,
            "max_prompt_length": job.prompt,
            "max_completion_length": job.new,
            "micro_batch_tokens": max(job.micro_batch, job.prompt + job.new),
            "recompute": recompute,
            "lora_r": job.rank,
            "lora_alpha": 2.0 * job.rank,
            "max_steps": job.steps,
            "mask_truncated_completions": False,
            "dynamic_sampling": False,
            "log_completions": False,
            "eval_size": 0,
            "output_dir": str(folder),
        }
    )


def first_token_is_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def _row(job: Steps, name: str, base: str, model: Decoder, running: int, taken: int, say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        trainer, clock = assemble(job, name, base, model, running, Path(scratch))
        engine, updater, device = trainer.sampler, trainer.updater, model.device
        assert isinstance(engine, TimedEngine)
        assert isinstance(updater, TimedUpdater)
        reset_peak(device)
        taken_s: list[dict[str, float]] = []
        computed: list[float] = []
        allocated: list[float | None] = []
        with trainer.metrics:
            for step in range(1, job.steps + 1):
                seconds, tokens = one_step(trainer, clock, step)
                taken_s.append(seconds)
                computed.append(tokens)
                allocated.append(allocated_gb(device))
                say(f"step {step}: " + "  ".join(f"{key} {value:.3f}" for key, value in taken_s[-1].items()))
        peak, config = peak_gb(device), trainer.config
    middle = {key: statistics.median(one[key] for one in taken_s[1:]) for key in taken_s[0]}
    sampled = job.prompts * job.group * job.new
    trained = statistics.median(computed[1:])
    shape = shape_named(name)
    load = workload(config.model_copy(update={"recompute": updater.recompute}), shape, 10**15)
    # Whole groups of equal lengths fill a micro-batch less than those of a run may: plan for what there was.
    load = replace(load, micro_batch=updater.largest[0], keys=updater.largest[1])
    parts = footprint(shape, load)
    kept = [one for one in allocated[2:] if one is not None]
    fixed = parts.context + parts.workspace * running // load.sequences
    sampling = parts.resident - parts.context + engine.cache.nbytes + parts.prefill
    planned = (fixed + max(parts.update_peak, sampling)) / 1e9
    ours = base != BITSANDBYTES  # whose memory nothing plans
    return {
        "op": "step", "shape": name, "base": base, "rank": job.rank, "running": running, "prompts": job.prompts,
        "group": job.group, "prompt": job.prompt, "new": job.new, "micro_batch": config.micro_batch_tokens,
        "trained_tokens": int(trained), "recomputed": updater.recompute, "step_s": round(middle["whole"], 3),
        "x_bf16": None, "x_bitsandbytes": None, "decode": decoded(engine),
        **{f"{part}_s": round(middle[part], 4) for part in (*PARTS, "other")},
        "switch_ms": round(1e3 * (middle["sleep"] + middle["wake"]), 2),
        "rollout_tokens_per_s": round(sampled / middle["rollout"], 1),
        "train_tokens_per_s": round(trained / max(1e-9, middle["forward"] + middle["backward"]), 1),
        "peak_gb": peak, "plan_gb": round(parts.torch_peak / 1e9, 3) if ours else None,
        "plan_off": round(parts.torch_peak / 1e9 / peak - 1, 3) if peak and ours else None,
        "device_gb": round((engine.held - taken) / 1e9, 2) if peak else None,
        "plan_device_gb": round(planned, 2) if ours else None, "limit_gb": job.limit_gb,
        "cache_gb": round(engine.cache.nbytes / 1e9, 2), "steps": job.steps,
        "allocated_gb_step3": kept[0] if kept else None, "allocated_gb_last": kept[-1] if kept else None,
        "last_s": round(taken_s[-1]["whole"], 3),
    }  # fmt: skip


def one_step(trainer: Trainer, clock: Clock, step: int) -> tuple[dict[str, float], float]:
    """Seconds by part, and the tokens that updates computed, shared prompts once. What the trainer's loop does, without
    evaluation, checkpoints and the completions' table."""
    clock.seconds.clear()
    with clock.part("other"):
        trainer.timing.clear()
        trainer.draw_noise(step)
        with clock.part("rollout"):
            rollout = trainer.roll_out()
        samples = train_samples(trainer.config, rollout.groups)
        tally, _ = trainer.update(samples, step)
    trainer.state.step = step
    found = {part: clock.seconds.get(part, 0.0) for part in (*PARTS, "other")}
    return found | {"whole": sum(found.values())}, tally.sums["computed"]


def assemble(job: Steps, name: str, base: str, model: Decoder, running: int, folder: Path) -> tuple[Trainer, Clock]:
    """A trainer as `qerl train` makes one, on this model, with a clock in it."""
    config, shape, clock = settings(job, base, folder), shape_named(name), Clock(model.device)
    optimizer = make_optimizer(config, list(trained_parameters(model).values()))
    again = recomputed(job.recompute, base, shape, workload(config, shape, 10**15), model.device)
    updater = TimedUpdater(config, model, optimizer, recompute=again)
    updater.clock = clock
    lengths = [longest_sequence(config)] * running
    blocks = blocks_that_fit(model, BLOCK_SIZE, lengths, optimizer_bytes(config, updater))
    tokenizer: Any = Numbers()
    engine = TimedEngine(model, blocks, BLOCK_SIZE, max_running=running, tokenizer=tokenizer)
    engine.clock = clock
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(str(draw.randrange(shape.vocab)) for _ in range(job.prompt))}
        for _ in range(job.prompts * job.steps)
    ]
    rewards = TimedRewards([first_token_is_even])
    rewards.clock = clock
    display = Display(job.steps, Console(quiet=True, stderr=True))
    return Trainer(
        config=config,
        model=model,
        tokenizer=tokenizer,
        sampler=engine,
        sampling=Sampling(config.max_completion_length, seed=config.seed, noise=True),
        source=PromptSource(rows, tokenizer, config.seed, config.max_prompt_length),
        eval_rows=[],
        rewards=rewards,
        updater=updater,
        state=RunState(rows=len(rows), rewards=rewards.names, cache_blocks=blocks),
        total_steps=job.steps,
        metrics=Metrics(folder / "metrics.jsonl"),
        display=display,
    ), clock


class TimedRewards(Rewards):
    clock: Clock

    def score(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.part("reward"):
            return super().score(*args, **kwargs)

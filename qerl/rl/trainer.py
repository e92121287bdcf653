"""The loop. One step: noise, rollout, rewards, advantages, updates of the clean policy, and the sampler told of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qerl.config import Config
from qerl.errors import Interrupted
from qerl.kernels.sample import stream_key
from qerl.metrics import Metrics
from qerl.model.decoder import Decoder
from qerl.model.noise import clear_noise, set_noise
from qerl.records import Sampler, Sampling
from qerl.rl import checkpoint
from qerl.rl.batch import TrainSample
from qerl.rl.checkpoint import RunState
from qerl.rl.data import PromptSource
from qerl.rl.display import Display, counted
from qerl.rl.evaluate import evaluate
from qerl.rl.folder import CHECKPOINTS, COMPLETIONS, EVALUATION
from qerl.rl.guard import CollapseWatch, Interrupts
from qerl.rl.measure import completions_table, peak_memory_gb, rollout_metrics, update_metrics, write_completions
from qerl.rl.ranks import ALONE, Ranks
from qerl.rl.rollout import Rollout, collect, train_samples
from qerl.rl.schedule import NoiseLevel, layer_sigmas, learning_rate
from qerl.rl.update import Tally, Updater
from qerl.tasks.rewards import Rewards, TrainerState

SEED_BITS = (1 << 63) - 1


@dataclass
class Trainer:
    """Everything a run is made of; `train` is the loop."""

    config: Config
    model: Decoder
    tokenizer: Any
    sampler: Sampler
    sampling: Sampling
    source: PromptSource
    eval_rows: Sequence[dict[str, Any]]
    rewards: Rewards
    updater: Updater
    state: RunState
    total_steps: int
    metrics: Metrics
    display: Display
    ranks: Ranks = ALONE
    timing: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.interrupts = Interrupts(self.display.warn, several=self.ranks.world > 1)
        self.ranks = replace(self.ranks, own_work=self.interrupts.own_work)
        self.noise = NoiseLevel(self.config.noise, self.total_steps, self.state.sigma, self.state.target)
        self.watch = CollapseWatch(self.state.watched)
        self.told: set[str] = set()  # graders whose failures were spoken of
        self.source.position, self.source.too_long = self.state.position, self.state.too_long

    def train(self) -> None:
        """Runs to the end. Interrupted or broken off, it saves what is done; only half-updated weights are never
        saved."""
        config, state, finished = self.config, self.state, False
        with self.display, self.interrupts:
            try:
                while True:
                    self.evaluate_and_save_if_due()
                    if state.step >= self.total_steps:
                        finished = True
                        return
                    step, started = state.step + 1, time.monotonic()
                    self.timing.clear()
                    sigma, stage = self.draw_noise(step)
                    rollout = self.roll_out()
                    samples = train_samples(config, rollout.groups)
                    with self.interrupts.shield("the update is done"):
                        tally, results = self.update(samples, step)
                        metrics = self.finish(step, rollout, tally, results, started, sigma, stage)
                        self.interrupts.settled()
                        self.write_down(step, rollout, samples, metrics)
                    self.stop_if_not_finite()
            except KeyboardInterrupt as error:
                raise Interrupted(
                    f"Stopped after step {state.step} of {self.total_steps}. To go on: {self.ranks.command} train "
                    f"--resume output_dir={config.output_dir} (from Python: the same call with resume=True)."
                ) from error
            finally:
                if state.step and not finished and not self.interrupts.broken:
                    self.display.say(f"Saved in {self.save()}.")

    def evaluate_and_save_if_due(self) -> None:
        config, state = self.config, self.state
        ends = state.step in (0, self.total_steps)
        if (ends or state.step % config.eval_steps == 0) and state.evaluated < state.step:
            state.after = self.evaluate()
            state.before = state.after if state.step == 0 else state.before
            state.evaluated = state.step
        if state.step and (ends or state.step % config.save_steps == 0):
            self.updater.require_same_weights()
            self.save()

    def draw_noise(self, step: int) -> tuple[float, int]:
        """Noise for the coming rollout: a function of seed and step (the closed loop's sigma aside)."""
        sigma, stage = self.noise.at(step - 1)
        if sigma > 0:
            sigmas = layer_sigmas(self.config.noise, sigma, self.model.arch.layers)
            set_noise(self.model, sigmas, torch.Generator().manual_seed(stream_key(self.config.seed, step) & SEED_BITS))
        elif self.config.noise.schedule != "off":
            clear_noise(self.model)
        return sigma, stage

    def roll_out(self) -> Rollout:
        """Sampled, scored and filtered groups."""
        done = [0, 0]
        wanted = self.config.prompts_per_step // self.ranks.world * self.config.num_generations

        def on_completion(tokens: int) -> None:
            done[0] += 1
            done[1] += tokens
            self.display.phase(f"rollout {done[0]}/{wanted}, {done[1]} tokens")

        version = self.sampler.policy_version
        before = self.timing.get("reward", 0.0)
        with self.timed("rollout"):
            self.sampler.wake()
            rollout = collect(
                self.config,
                self.source,
                self.sampler,
                self.sampling,
                self.rewards,
                self.trainer_state(),
                on_completion,
                lambda: self.timed("reward"),
                self.ranks,
            )
        self.timing["rollout"] -= self.timing.get("reward", 0.0) - before  # scored within the waves
        assert all(c.policy_version == version for c in rollout.completions), "completions of another policy"
        return rollout

    def update(self, samples: list[TrainSample], step: int) -> tuple[Tally, list[dict[str, float]]]:
        """The rollout cut into updates, several times over; then the sampler knows of it."""
        config, state = self.config, self.state
        per_rollout = config.steps_per_generation * config.num_iterations
        total, first = self.total_steps * per_rollout, (step - 1) * per_rollout
        groups = len(samples) // config.num_generations
        size = config.num_generations * -(-groups // config.steps_per_generation)  # whole groups
        updates = [samples[start : start + size] for start in range(0, len(samples), max(1, size))]
        own = [part[i] for part in updates for i in self.updater.own(part)]
        tally, mine = Tally(), Tally()
        results: list[dict[str, float]] = []
        with self.timed("train"):
            if self.model.device.type == "cuda":
                self.sampler.sleep()
            self.updater.score(own, old=per_rollout > 1, reference=config.beta > 0)
            if config.kv_cache_dtype != "auto":
                mine.measured |= self.updater.cache_difference(own)
            for _ in range(config.num_iterations):
                for part in updates:
                    self.display.phase(f"update {len(results) + 1}/{per_rollout}")
                    rate = learning_rate(config, first + len(results), total)
                    result = self.updater.step(part, rate, mine)
                    results.append(result | {"learning_rate": rate})
                    state.skipped_in_a_row = state.skipped_in_a_row + 1 if result["skipped"] else 0
                    if state.skipped_in_a_row:
                        self.display.warn(f"Step {step}: loss or gradient is not finite; the update was skipped.")
            for each in self.ranks.gather(mine):
                tally.include(each)
        self.sampler.on_policy_update()
        return tally, results

    def finish(
        self,
        step: int,
        rollout: Rollout,
        tally: Tally,
        results: list[dict[str, float]],
        started: float,
        sigma: float,
        stage: int,
    ) -> dict[str, Any]:
        """Count and measure; from here on the state is that of the step."""
        config, state = self.config, self.state
        sampled = sum(len(completion.token_ids) for completion in rollout.completions)
        state.num_tokens += sampled + sum(
            len(group.prompt.prompt_ids) * len(group.completions) for group in rollout.drawn
        )
        self.tell_failures(step, rollout)
        metrics = rollout_metrics(rollout, self.rewards, config.prompts_per_step)
        metrics |= update_metrics(tally, results, config.beta)
        if "entropy" in metrics:
            self.noise.observe(step - 1, metrics["entropy"])
            for warning in self.watch.check(step, metrics):
                self.display.warn(warning)
        elif step == 1 or step % 10 == 0:
            self.display.warn(
                f"Step {step}: in none of {counted(len(rollout.drawn), 'group')} (drawn in "
                f"{counted(rollout.waves, 'wave')}) do the rewards vary, so nothing was learnt. "
                "Are the problems too hard or too easy, or is the reward constant, or None? Look at completions/."
            )
        if self.source.too_long and not state.too_long:
            self.display.warn(
                f"Step {step}: {self.source.too_long} of the {self.source.position} rows drawn so far are left out: "
                f"their prompts are empty or longer than max_prompt_length={config.max_prompt_length}. data/too_long "
                "in the metrics counts them."
            )
        seconds = time.monotonic() - started
        metrics |= {
            "noise/sigma": sigma,
            "noise/stage": stage,
            "num_tokens": state.num_tokens,
            "epoch": self.source.position / len(self.source.rows),
            "data/too_long": self.source.too_long,
            "step_time": seconds,
            "rollout/tokens_per_s": sampled / max(1e-9, self.timing.get("rollout", 0.0)),
            "memory/peak_gb": max(self.ranks.gather(peak_memory_gb(self.model.device))),
        } | {f"timing_s/{name}": value for name, value in self.timing.items()}
        if results:
            metrics["learning_rate"] = results[-1]["learning_rate"]
        state.step, state.position, state.too_long = step, self.source.position, self.source.too_long
        state.sigma, state.target, state.watched = self.noise.sigma, self.noise.target, self.watch.seen
        return metrics

    def write_down(self, step: int, rollout: Rollout, samples: list[TrainSample], metrics: dict[str, Any]) -> None:
        config = self.config
        if config.log_completions and self.ranks.first:
            path = Path(config.output_dir) / COMPLETIONS / f"step-{step:06d}.parquet"
            columns = completions_table(step, rollout, self.rewards, [sample.advantage for sample in samples])
            write_completions(path, columns)
            self.metrics.completions(columns, step)
        self.metrics.log(metrics, step)
        self.display.done(step)
        if step % config.logging_steps == 0 or step == self.total_steps:
            self.display.line(step, metrics)

    def tell_failures(self, step: int, rollout: Rollout) -> None:
        """Of a grader once, and of every step in which it graded nothing."""
        count = len(rollout.completions)
        for name, failed in rollout.failed.items():
            if failed and (len(failed) == count or name not in self.told):
                self.told.add(name)
                self.display.warn(
                    f"Step {step}: the grader {name} failed on {len(failed)} of {count} samples, which score 0. "
                    f"The first ({failed[0].reason}): {failed[0].detail}"
                )

    def stop_if_not_finite(self) -> None:
        count = self.state.skipped_in_a_row
        if count >= self.config.max_skipped_updates:
            raise ValueError(
                f"{count} updates in a row had a loss or gradient that is not finite; they changed nothing. Lower "
                "learning_rate or max_grad_norm, or look at the last steps in completions/."
            )

    def evaluate(self) -> dict[str, float]:
        """Held-out prompts, greedily, without noise."""
        if not self.eval_rows:
            return {}
        self.display.phase(f"evaluating {len(self.eval_rows)} prompts")
        with self.timed("eval"):
            self.sampler.wake()
            args = (self.eval_rows, self.tokenizer, self.sampler, self.sampling, self.rewards)
            metrics, _ = evaluate(*args, self.trainer_state(), self.ranks)
        self.metrics.log(metrics | {EVALUATION: self.timing["eval"]}, self.state.step)
        shown = "  ".join(f"{key.removeprefix('eval_')} {value:.4g}" for key, value in metrics.items())
        self.display.say(f"evaluation after step {self.state.step}: {shown}")
        return metrics

    def save(self) -> Path:
        """By rank 0, whatever the others do: it may be the last thing that is left to do."""
        folder, optimizer = Path(self.config.output_dir) / CHECKPOINTS, self.updater.optimizer
        if not self.ranks.first:
            return checkpoint.path_of(folder, self.state.step)
        with self.interrupts.shield("the checkpoint is written"):
            return checkpoint.save(folder, self.model, optimizer, self.state, self.config.save_total_limit)

    def trainer_state(self) -> TrainerState:
        """What reward functions see."""
        return TrainerState(self.state.step, self.total_steps, self.source.position / len(self.source.rows))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.timing[name] = self.timing.get(name, 0.0) + time.monotonic() - started

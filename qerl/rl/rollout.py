"""Prompts to scored groups of completions: sampling in waves, rewards, and the groups that teach something."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qerl.config import Config
from qerl.errors import Interrupted
from qerl.records import Completion, Request, Sampler, Sampling
from qerl.rl.advantage import NO_VARIANCE, advantages, group_std, total_rewards
from qerl.rl.batch import TrainSample
from qerl.rl.data import DrawnPrompt, PromptSource
from qerl.rl.ranks import ALONE, Ranks
from qerl.tasks.rewards import Rewards, Scores, TrainerState
from qerl.tasks.workers import Graded


@dataclass(frozen=True)
class Group:
    """A prompt, its G completions and what they earned."""

    prompt: DrawnPrompt
    completions: tuple[Completion, ...]
    rewards_GF: Tensor  # float64; NaN where a function does not apply
    total_G: Tensor


@dataclass
class Rollout:
    groups: list[Group]  # those that are trained on, in prompt order
    drawn: list[Group]  # all, those dropped included
    waves: int
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns logged by reward functions, over `drawn`
    metrics: dict[str, list[float]] = field(default_factory=dict)  # logged by reward functions
    failures: Counter[str] = field(default_factory=Counter)  # samples that graders failed on, by reason
    failed: dict[str, list[Graded]] = field(default_factory=dict)  # the same samples, by the grader's name

    @property
    def completions(self) -> list[Completion]:
        return [completion for group in self.drawn for completion in group.completions]

    def add(self, groups: list[Group], scores: Scores) -> None:
        """A wave, and what reward functions logged of it."""
        self.waves += 1
        self.failures.update(scores.failures)
        for name, failed in scores.failed.items():
            self.failed.setdefault(name, []).extend(failed)
        for column, values in scores.extra.items():
            before = len(self.completions) - len(self.extra.get(column, []))
            self.extra[column] = [*self.extra.get(column, []), *[None] * before, *values]
        for name, numbers in scores.metrics.items():
            self.metrics.setdefault(name, []).extend(numbers)
        self.drawn += groups


def collect(
    config: Config,
    source: PromptSource,
    sampler: Sampler,
    sampling: Sampling,
    rewards: Rewards,
    state: TrainerState,
    on_completion: Callable[[int], None],
    on_reward: Callable[[], Any],
    ranks: Ranks = ALONE,
) -> Rollout:
    """One step's rollout, the same on every rank. Groups without variance are dropped and refilled, in waves of as many
    prompts as are missing, up to max_waves; what is still missing then stays missing."""
    dynamic = config.dynamic_sampling
    waves = dynamic.max_waves if dynamic.enabled else 1
    index = rewards.accuracy_index(dynamic.metric)
    rollout = Rollout([], [], 0)
    while len(rollout.groups) < config.prompts_per_step and rollout.waves < waves:
        prompts = source.draw(config.prompts_per_step - len(rollout.groups))
        groups, scores = draw_groups(
            sampler, prompts, config.num_generations, sampling, rewards, state, on_completion, on_reward, ranks
        )
        if state.global_step == 0 and rollout.waves == 0:
            require_graded(scores.failed, len(groups) * config.num_generations)
        rollout.add(groups, scores)
        rollout.groups += [group for group in groups if not dynamic.enabled or _varies(group, index)]
    return rollout


def draw_groups(
    sampler: Sampler,
    prompts: Sequence[DrawnPrompt],
    samples: int,
    sampling: Sampling,
    rewards: Rewards,
    state: TrainerState,
    on_completion: Callable[[int], None] = lambda tokens: None,
    on_reward: Callable[[], Any] = nullcontext,
    ranks: Ranks = ALONE,
) -> tuple[list[Group], Scores]:
    """All prompts' groups, in order: each rank samples and scores its share of the prompts, and all get them all."""
    own = ranks.share(prompts)

    def work() -> tuple[list[tuple[Completion, ...]], Scores]:
        completions = sample(sampler, own, samples, sampling, rewards, on_completion)
        with on_reward():
            return completions, score(own, completions, rewards, state)

    parts = ranks.together(work)
    scores = parts[0][1] if len(parts) == 1 else _joined([part for _, part in parts])
    return grouped(prompts, [group for part, _ in parts for group in part], scores, rewards), scores


def sample(
    sampler: Sampler,
    prompts: Sequence[DrawnPrompt],
    samples: int,
    sampling: Sampling,
    rewards: Rewards,
    on_completion: Callable[[int], None],
) -> list[tuple[Completion, ...]]:
    """The completions of each prompt, in order. Graders start on a completion as soon as it ends."""
    rows = {prompt.id: prompt.row for prompt in prompts}
    requests = [Request(prompt.id, prompt.prompt_ids, samples) for prompt in prompts]
    done: dict[int, list[Completion]] = {request.id: [] for request in requests}
    for completion in sampler.stream(requests, sampling):
        if completion.error:
            raise ValueError(f"A prompt can't be sampled from: {completion.error}")
        done[completion.request].append(completion)
        rewards.begin(_key(completion), rows[completion.request], completion.text)
        on_completion(len(completion.token_ids))
    if any(len(found) < samples for found in done.values()):
        raise Interrupted("Sampling ended early.")
    return [tuple(sorted(done[request.id], key=lambda c: c.sample)) for request in requests]


def score(
    prompts: Sequence[DrawnPrompt],
    completions: Sequence[tuple[Completion, ...]],
    rewards: Rewards,
    state: TrainerState,
) -> Scores:
    """Rewards of every completion, and what functions log."""
    flat = [completion for group in completions for completion in group]
    rows = [prompt.row for prompt, group in zip(prompts, completions, strict=True) for _ in group]
    keys = [_key(completion) for completion in flat]
    if not flat:  # a wave smaller than the number of ranks
        return Scores([[] for _ in rewards.names], {}, {}, Counter(), {})
    return rewards.score(rows, [c.text for c in flat], [c.token_ids for c in flat], state, keys)


def _joined(parts: Sequence[Scores]) -> Scores:
    """The ranks' scores one after another. A column that a rank did not log is empty there."""
    columns = dict.fromkeys(column for part in parts for column in part.extra)
    joined = Scores([[] for _ in parts[0].values], {column: [] for column in columns}, {}, Counter(), {})
    for part in parts:
        count = len(part.values[0])
        for values, more in zip(joined.values, part.values, strict=True):
            values.extend(more)
        for column, cells in joined.extra.items():
            cells.extend([*part.extra.get(column, []), *[None] * count][:count])
        joined.failures.update(part.failures)
        for name, numbers in part.metrics.items():
            joined.metrics.setdefault(name, []).extend(numbers)
        for name, failed in part.failed.items():
            joined.failed.setdefault(name, []).extend(failed)
    return joined


def grouped(
    prompts: Sequence[DrawnPrompt],
    completions: Sequence[tuple[Completion, ...]],
    scores: Scores,
    rewards: Rewards,
) -> list[Group]:
    rewards_SF = torch.tensor(scores.values, dtype=torch.float64).t()
    total_S = total_rewards(rewards_SF, torch.tensor(rewards.weights, dtype=torch.float64))
    groups, start = [], 0
    for prompt, group in zip(prompts, completions, strict=True):
        at = slice(start, start + len(group))
        groups.append(Group(prompt, group, rewards_SF[at], total_S[at]))
        start += len(group)
    return groups


def require_graded(failed: dict[str, list[Graded]], count: int) -> None:
    """A grader that raises on each of a run's first samples is at fault, not the policy."""
    for name, samples in failed.items():
        if sum(one.reason == "error" for one in samples) == count:
            raise ValueError(f"The grader {name} failed on all of the first {count} samples: {samples[0].detail}")


def _key(completion: Completion) -> tuple[int, int]:
    return completion.request, completion.sample


def _varies(group: Group, index: int | None) -> bool:
    values_G = group.total_G if index is None else group.rewards_GF[:, index]
    if values_G.isnan().all():  # the accuracy reward does not apply to this task
        values_G = group.total_G
    return bool(group_std(values_G) > NO_VARIANCE)


def train_samples(config: Config, groups: Sequence[Group]) -> list[TrainSample]:
    """What is trained on, with advantages. Truncated completions count in their group's mean and std; whether they are
    in the loss is mask_truncated_completions."""
    if not groups:
        return []
    advantage_PG = advantages(torch.stack([group.total_G for group in groups]), config.scale_rewards)
    return [
        TrainSample(
            group.prompt.prompt_ids,
            completion.token_ids,
            completion.policy_logprobs,
            advantage,
            not (config.mask_truncated_completions and completion.finish_reason == "length"),
        )
        for group, row in zip(groups, advantage_PG.tolist(), strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]

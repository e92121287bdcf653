"""Prompts to scored groups of completions: sampling in waves, rewards, and the groups that teach something."""

from collections import Counter
from collections.abc import Callable, Sequence
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
from qerl.tasks.rewards import Rewards, TrainerState
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


def collect(
    config: Config,
    source: PromptSource,
    sampler: Sampler,
    sampling: Sampling,
    rewards: Rewards,
    state: TrainerState,
    on_completion: Callable[[int], None],
    on_reward: Callable[[], Any],
) -> Rollout:
    """One step's rollout. Groups without variance are dropped and refilled, in waves of as many prompts as are missing,
    up to max_waves; what is still missing then stays missing."""
    dynamic = config.dynamic_sampling
    waves = dynamic.max_waves if dynamic.enabled else 1
    index = rewards.accuracy_index(dynamic.metric)
    rollout = Rollout([], [], 0)
    while len(rollout.groups) < config.prompts_per_step and rollout.waves < waves:
        prompts = source.draw(config.prompts_per_step - len(rollout.groups))
        completions = sample(sampler, prompts, config.num_generations, sampling, rewards, on_completion)
        with on_reward():
            groups = score(prompts, completions, rewards, state, rollout)
        rollout.waves += 1
        rollout.drawn += groups
        rollout.groups += [group for group in groups if not dynamic.enabled or _varies(group, index)]
    return rollout


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
    into: Rollout | None = None,
) -> list[Group]:
    """Rewards of every completion; what functions log goes into the rollout."""
    flat = [completion for group in completions for completion in group]
    rows = [prompt.row for prompt, group in zip(prompts, completions, strict=True) for _ in group]
    keys = [_key(completion) for completion in flat]
    scores = rewards.score(rows, [c.text for c in flat], [c.token_ids for c in flat], state, keys)
    if state.global_step == 0 and (into is None or not into.drawn):
        _require_graded(scores.failed, len(flat))
    if into is not None:
        into.failures.update(scores.failures)
        for name, failed in scores.failed.items():
            into.failed.setdefault(name, []).extend(failed)
        for column, values in scores.extra.items():
            before = len(into.completions) - len(into.extra.get(column, []))
            into.extra[column] = [*into.extra.get(column, []), *[None] * before, *values]
        for name, numbers in scores.metrics.items():
            into.metrics.setdefault(name, []).extend(numbers)
    rewards_SF = torch.tensor(scores.values, dtype=torch.float64).t()
    total_S = total_rewards(rewards_SF, torch.tensor(rewards.weights, dtype=torch.float64))
    groups, start = [], 0
    for prompt, group in zip(prompts, completions, strict=True):
        at = slice(start, start + len(group))
        groups.append(Group(prompt, group, rewards_SF[at], total_S[at]))
        start += len(group)
    return groups


def _require_graded(failed: dict[str, list[Graded]], count: int) -> None:
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

"""Prompts in, completions out: scheduler, runner and sampler in a loop."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from qerl.engine.block_pool import BlockPool
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Scheduler, Step
from qerl.engine.sequence import Sequence
from qerl.kernels.sample import penalize, sample, uniform
from qerl.model.decoder import Decoder
from qerl.records import Completion, Request, Sampling


class Engine:
    """Samples from the decoder that the trainer updates; no copy of it. Implements `records.Sampler`."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        token_budget: int = 2048,
        max_running: int = 256,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.token_budget, self.max_running = model, token_budget, max_running
        self.tokenizer = tokenizer
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = Runner(model, num_blocks, block_size)
        self.policy_version = 0

    def on_policy_update(self) -> None:
        """Weights have changed in place: what is cached of the old policy is not to be reused."""
        self.policy_version += 1
        self.pool.forget_all()

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> list[Completion]:
        requests = list(requests)
        order = {request.id: i for i, request in enumerate(requests)}
        return sorted(self.stream(requests, sampling), key=lambda done: (order[done.request], done.sample))

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Completion]:
        root = (self.policy_version, self.model.noise_version if sampling.noise else "clean")
        scheduler = Scheduler(self.pool, self.token_budget, self.max_running, root)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("Stop strings need a tokenizer: Engine(..., tokenizer=...).")
        live = _Drawn(sampling, self.tokenizer)
        for sequence in self._sequences(requests, sampling):
            scheduler.add(sequence)
        try:
            while scheduler.busy:
                step = scheduler.schedule()
                tokens = live.draw(step, self.runner.run(step, sampling.noise))
                scheduler.advance(step, tokens)
                for sequence in tokens:
                    if reason := live.ended(sequence):
                        scheduler.finish(sequence)
                        yield live.completion(sequence, reason, self.policy_version)
        finally:
            for sequence in list(scheduler.running):  # stopped in the middle: give the blocks back
                scheduler.finish(sequence)

    def _sequences(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Sequence]:
        arrival, ids = 0, set()
        for request in requests:
            if request.id in ids:
                raise ValueError(f"Two requests have the id {request.id}.")
            ids.add(request.id)
            room = self.model.arch.max_positions - len(request.prompt_ids)
            if room < 1:
                raise ValueError(
                    f"The prompt of request {request.id} has {len(request.prompt_ids)} tokens; the model's context is "
                    f"{self.model.arch.max_positions}."
                )
            leader = None
            for i in range(request.samples):
                most = min(sampling.max_tokens, room)
                sequence = Sequence(arrival, request.id, i, request.prompt_ids, most, leader)
                leader = leader or sequence
                arrival += 1
                yield sequence


class _Drawn:
    """The log-probabilities of the tokens drawn so far, and the rules by which a sequence ends."""

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        self.sampling, self.tokenizer = sampling, tokenizer
        self.drawn: dict[Sequence, list[float]] = {}
        self.policy: dict[Sequence, list[float]] = {}

    def draw(self, step: Step, logits_SV: torch.Tensor) -> dict[Sequence, int]:
        s = self.sampling
        sequences = [chunk.sequence for chunk in step.chunks if chunk.samples]
        if not sequences:
            return {}
        if s.repetition_penalty != 1.0:
            logits_SV = penalize(logits_SV, [list(q.tokens(0, len(q))) for q in sequences], s.repetition_penalty)
        for row, sequence in zip(logits_SV, sequences, strict=True):
            if len(sequence.output) < s.min_tokens and s.stop_ids:
                row[list(s.stop_ids)] = -torch.inf
        numbers = [uniform(s.seed, s.rollout, q.request, q.sample, len(q.output)) for q in sequences]
        uniforms_S = torch.tensor(numbers, dtype=torch.float64, device=logits_SV.device)
        drawn = sample(logits_SV, uniforms_S, s.temperature, s.top_k, s.top_p, s.min_p)
        tokens, logprobs, policy = (values.tolist() for values in drawn)
        for sequence, logprob, before in zip(sequences, logprobs, policy, strict=True):
            self.drawn.setdefault(sequence, []).append(logprob)
            self.policy.setdefault(sequence, []).append(before)
        return dict(zip(sequences, tokens, strict=True))

    def ended(self, sequence: Sequence) -> str:
        if sequence.output[-1] in self.sampling.stop_ids:
            return "stop"
        if self.sampling.stop and any(stop in self._decode(sequence) for stop in self.sampling.stop):
            return "stop"
        return "length" if len(sequence.output) == sequence.max_tokens else ""

    def _decode(self, sequence: Sequence) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(sequence.output, skip_special_tokens=True)
        return text

    def completion(self, sequence: Sequence, reason: str, version: int) -> Completion:
        text = self._decode(sequence)
        ends = [at for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return Completion(
            sequence.request,
            sequence.sample,
            tuple(sequence.output),
            text[: min(ends)] if ends else text,
            tuple(self.drawn.pop(sequence)),
            tuple(self.policy.pop(sequence)),
            "stop" if reason == "stop" else "length",
            version,
        )

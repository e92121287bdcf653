"""Prompts in, completions out: scheduler, runner, graphs and the rules by which a sample ends, in a loop."""

import logging
from collections.abc import Callable, Generator, Iterable
from typing import Any

from qerl.engine.block_pool import BlockPool
from qerl.engine.cache import Cache
from qerl.engine.decode import DecodeBatch
from qerl.engine.drawing import Drawing
from qerl.engine.ending import Ending
from qerl.engine.graphs import Graphs, bucket
from qerl.engine.look import Look
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Scheduler, Step
from qerl.engine.sequence import Sequence
from qerl.engine.workspace import CPU_BUDGET, GPU_BUDGET
from qerl.kernels.sample import stream_key
from qerl.model.decoder import Decoder
from qerl.records import Completion, Request, Sampling

logger = logging.getLogger(__name__)

OnTokens = Callable[[int, int, list[int]], None]  # request, sample, new tokens
MAX_RUNNING = 256  # sequences that decode at a time, unless told otherwise
LOOKAHEAD = 8  # decode steps between looks at the host, with graphs


class Engine:
    """Samples from the decoder that the trainer updates; no copy of it. Implements `records.Sampler`.

    num_blocks of block_size tokens are the cache, for life: `blocks_that_fit` says how many there is room for.
    token_budget (by default 8192 on a GPU, 2048 on a CPU) and max_running bound a step. graphs: capture decode steps
    (by default on a GPU); lookahead: decode steps between looks at the host (by default 8 with graphs, else 1);
    overlap: begin the next look's steps before the host has seen what the last ones drew, so that the device never
    waits for it (by default with graphs). A call shares prefixes among its own prompts; with keep_prefixes also those
    of earlier calls, so that its rounding depends on them. kv_cache_dtype: auto (the model's own), or fp8 for keys and
    values in half the bytes, rounded.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        token_budget: int | None = None,
        max_running: int = MAX_RUNNING,
        tokenizer: Any = None,
        graphs: bool | None = None,
        lookahead: int | None = None,
        keep_prefixes: bool = False,
        kv_cache_dtype: str = "auto",
        overlap: bool | None = None,
    ) -> None:
        self.keep_prefixes = keep_prefixes
        if token_budget is None:
            token_budget = GPU_BUDGET if model.device.type == "cuda" else CPU_BUDGET
        if min(token_budget, max_running, 1 if lookahead is None else lookahead) < 1:
            raise ValueError("token_budget, max_running and lookahead must be at least 1.")
        self.model, self.token_budget, self.max_running = model, token_budget, max_running
        self.tokenizer = tokenizer
        on_gpu = model.device.type == "cuda"
        if graphs and not on_gpu:
            raise ValueError("Graphs need a GPU: leave graphs off.")
        captures = on_gpu if graphs is None else graphs
        self.lookahead = lookahead or (LOOKAHEAD if captures else 1)
        self.overlap = captures if overlap is None else overlap
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = Cache(model, num_blocks, block_size, kv_cache_dtype)
        self.runner = Runner(model, self.cache)
        # A context, and what may be drawn past its end; in buckets.
        most = bucket(-(-(min(model.arch.max_positions, num_blocks * block_size) + self.lookahead) // block_size) + 1)
        self.batch = DecodeBatch(model, self.cache, bucket(max_running), most, self.lookahead)
        self.graphs = Graphs(self.batch) if captures else None
        self.policy_version = 0
        self._streaming = False

    def on_policy_update(self) -> None:
        """Weights have changed in place: what is cached of the old policy is not to be reused."""
        if self._streaming:
            raise ValueError("The policy can't change in the middle of a stream: finish or close it first.")
        self.policy_version += 1
        self.pool.forget_all()

    def sleep(self) -> None:
        """Give the cache's memory away until `wake`. Graphs stay valid: the cache comes back at the same address."""
        if self._streaming:
            raise ValueError("The engine can't sleep in the middle of a stream: finish or close it first.")
        self.pool.forget_all()
        self.cache.sleep()

    def wake(self) -> None:
        self.cache.wake()

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> list[Completion]:
        """All completions, in the order of requests and samples. A Ctrl-C returns those that are complete."""
        requests = list(requests)
        order = {request.id: i for i, request in enumerate(requests)}
        done: list[Completion] = []
        try:
            for completion in self.stream(requests, sampling):
                done.append(completion)
        except KeyboardInterrupt:
            logger.warning(
                "Interrupted: %d of %d completions are complete.", len(done), sum(r.samples for r in requests)
            )
        return sorted(done, key=lambda completion: (order[completion.request], completion.sample))

    def stream(
        self, requests: Iterable[Request], sampling: Sampling, on_tokens: OnTokens | None = None
    ) -> Generator[Completion, None, None]:
        """Each completion as it ends; those of a request that can't be served at once, with finish reason `refused`.

        on_tokens is told of tokens as they are drawn.
        """
        if self._streaming:
            raise ValueError("The engine serves one stream at a time: finish or close the other first.")
        if not self.cache.awake:
            raise ValueError("The engine sleeps: call wake() first.")
        if sampling.stop and self.tokenizer is None:
            raise ValueError("Stop strings need a tokenizer: Engine(..., tokenizer=...).")
        if not self.keep_prefixes:
            self.pool.forget_all()
        adapter = self.model.adapter_enabled
        root = (self.policy_version, adapter, self.model.noise_version if sampling.noise else "clean")
        scheduler = Scheduler(self.pool, self.token_budget, self.max_running, root, self.lookahead)
        drawing = Drawing(sampling, self.model.arch.vocab, self.model.device)
        ending = Ending(sampling, self.tokenizer, self.policy_version, self.model.noise_version)
        if self.graphs is not None:
            self.graphs.check()
        refused = self._add(list(requests), sampling, scheduler)
        self._streaming, finished, ahead = True, False, None
        try:
            yield from (ending.refusal(request, i, why) for request, why in refused for i in range(request.samples))
            while scheduler.busy:
                if ending.noise_id not in (None, self.model.noise_version):
                    raise ValueError("Noise was drawn anew in the middle of a stream: draw it before or after.")
                if self.model.adapter_enabled != adapter:
                    raise ValueError("The adapter was switched in the middle of a stream: do it before or after.")
                look = ahead or self.begin(scheduler.schedule(), drawing)
                further = self._further(look.step, scheduler)
                ahead = None if further is None else self.begin(further, drawing)
                kept = ending.keep(look.drawn(), look.has_nan())  # the device is busy with what is ahead
                scheduler.advance(look.step, kept)
                if on_tokens is not None:
                    for sequence, tokens in kept.items():
                        on_tokens(sequence.request, sequence.sample, tokens)
                for sequence, reason in ending.ended():
                    scheduler.finish(sequence)
                    yield ending.completion(sequence, reason)
            finished = True
        finally:
            self._streaming = False
            if not finished:  # left or broken off, perhaps in the middle of bookkeeping, perhaps with NaN in the cache
                self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
                self.batch.clear()
                self.cache.clear()
            if ahead is not None:  # all that it would have gone on with has ended
                ahead.wait()

    def begin(self, step: Step, drawing: Drawing) -> Look:
        """Enqueue the step's work, and the way of what it draws to the host."""
        noise = drawing.sampling.noise
        for source, target in step.copies:
            self.cache.copy_block(source, target)
        if not step.decodes:
            return Look(step, *self.runner.run(step, noise, drawing))
        sequences, on_gpu = [chunk.sequence for chunk in step.chunks], self.model.device.type == "cuda"
        if step.ahead:
            self.batch.go_on(sequences)
        else:
            self.batch.fill(sequences, bucket(len(sequences)) if on_gpu else len(sequences), drawing)
        if self.graphs is not None:
            self.graphs.run(step.repeats, self.batch.used, noise, drawing)
        else:
            longest = max(chunk.start for chunk in step.chunks) + step.repeats
            # On a GPU the kernels read lengths there.
            blocks = self.batch.most_blocks if on_gpu else -(-longest // self.pool.block_size)
            for _ in range(step.repeats):
                self.batch.step(self.batch.used, blocks, noise, drawing)
        return Look(step, *self.batch.results(step.repeats))

    def _further(self, step: Step, scheduler: Scheduler) -> Step | None:
        """What to begin before the step's tokens are known, if anything."""
        if not self.overlap or not step.decodes or bucket(len(scheduler.running)) < bucket(self.batch.used):
            return None  # rows that nobody needs cost time in every step: those that go on are brought together first
        return scheduler.further(step)

    def _add(self, requests: list[Request], sampling: Sampling, scheduler: Scheduler) -> list[tuple[Request, str]]:
        """Queue what can be served; returns the rest with the reasons."""
        if len({request.id for request in requests}) < len(requests):
            raise ValueError("Two requests have the same id; ids name the random numbers, so they must differ.")
        refused, arrival = [], 0
        context, vocab = self.model.arch.max_positions, self.model.arch.vocab
        for request in requests:
            length = len(request.prompt_ids)
            if length + max(1, sampling.min_tokens) > context:
                why = (
                    f"The prompt has {length} tokens and min_tokens is {sampling.min_tokens}: no room for an answer is"
                )
                refused.append((request, f"{why} left, since the model's context is {context}."))
                continue
            if not all(0 <= token < vocab for token in request.prompt_ids):
                refused.append((request, f"The prompt has token ids outside 0 to {vocab - 1}."))
                continue
            leader = None
            try:
                for i in range(request.samples):
                    key = stream_key(sampling.seed, sampling.rollout, request.id, i)
                    most = min(sampling.max_tokens, context - length)
                    sequence = Sequence(arrival, request.id, i, request.prompt_ids, most, leader, key)
                    scheduler.add(sequence)
                    leader = leader or sequence
                    arrival += 1
            except ValueError as error:  # of the first sample: the others are like it
                refused.append((request, str(error)))
        return refused

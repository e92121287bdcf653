"""Which tokens of which sequences go through the model next. Plain Python ints, no torch.

Each step takes one token of every sequence that is decoding, then prefills under what is left of a token budget: chunks
of prompts under way first, then new sequences. When blocks run out the youngest sequence is preempted: it gives its
blocks back and is computed again later, its tokens kept. The oldest unfinished sequence is never preempted, so
everything finishes as long as one sequence fits alone. Every decision depends on the requests and the block count only.

Where every sequence decodes and none can be admitted, several decode steps are taken in a row (`repeats`), as far as
blocks for them can be had without preempting anyone; what is drawn past a sequence's end is dropped.

Such a look can be followed by another before its tokens are known (`further`): who goes on, and which blocks that
takes, follows from lengths alone. A sequence that turns out to have ended in the first draws on through the second, in
vain. That harms no one:
- Its blocks may be given to others as soon as the first look is read, while the second still writes to them. The device
  does one thing after another: whatever is written for the new holder comes after the second look.
- Prefixes that can be found are full blocks of tokens that were kept and fed back (`computed`, all but the last token);
  in vain are the last kept token and what follows it, which lie behind them.
- Nobody is preempted, admitted or copied while a look is on its way: `schedule` is called when all is read.

The samples of a group wait for the first of them to have its prompt computed, then share its full blocks and copy the
partial one; they compute only the prompt's last token, which gives each its own first logits.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from qerl.engine.block_pool import BlockPool
from qerl.engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens start to start + length of a sequence, to be computed now."""

    sequence: Sequence
    start: int
    length: int
    samples: bool  # the chunk ends at the sequence's last token: its logits give the next one


@dataclass(frozen=True)
class Step:
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]  # blocks to copy before, (from, to)
    decodes: bool  # every chunk is one token whose logits give the next
    repeats: int = 1  # decode steps in a row; 1 unless the step decodes
    ahead: bool = False  # to be begun before the tokens of the step before it are known; continues its sequences


class Scheduler:
    """root names what the cache depends on besides tokens (policy version, noise): prefixes are shared within it."""

    def __init__(
        self, pool: BlockPool, token_budget: int, max_running: int, root: Hashable = "root", lookahead: int = 1
    ) -> None:
        if token_budget < 1 or max_running < 1 or lookahead < 1:
            raise ValueError("The token budget, the number of running sequences and lookahead must be at least 1.")
        self.lookahead = lookahead
        self.pool, self.token_budget, self.max_running, self.root = pool, token_budget, max_running, root
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Refuses what could never finish."""
        if not sequence.prompt:
            raise ValueError("A prompt must have at least one token.")
        if sequence.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {sequence.max_tokens}.")
        most = len(sequence.prompt) + sequence.max_tokens - 1  # the last token is never fed back
        capacity = self.pool.num_blocks * self.pool.block_size
        if most > capacity:
            raise ValueError(
                f"A prompt of {len(sequence.prompt)} tokens with up to {sequence.max_tokens} new ones needs {most} "
                f"places; the cache has {capacity}. Give it more blocks, or lower max_tokens."
            )
        insort(self.waiting, sequence, key=_arrival)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """The next step; never empty while there is work. All that earlier steps drew must be known."""
        if len(self.running) <= self.token_budget and (look := self._look(0)) is not None:
            return look
        budget = self.token_budget
        chunks: dict[Sequence, Chunk] = {}
        preemptions = self.preemptions
        todo = [(sequence, len(sequence) - sequence.computed) for sequence in self.running]  # and how many tokens
        todo.sort(key=lambda pair: pair[1] > 1)  # those that decode first
        for sequence, tokens in todo:
            if budget == 0:
                break
            if self.preemptions > preemptions and sequence not in self.running:  # an older one preempted it just now
                continue
            count = min(tokens, budget)
            if self._reserve(sequence, sequence.computed + count, chunks):
                chunks[sequence] = Chunk(sequence, sequence.computed, count, count == tokens)
                budget -= count
        budget = self.token_budget - sum(chunk.length for chunk in chunks.values())
        copies: list[tuple[int, int]] = []
        admitted = False
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) == self.max_running:
                break
            if sequence.leader is not None and self._computes_prompt(sequence.leader):
                continue
            if not self._admit(sequence, copies):
                break
            admitted = True
            tokens = len(sequence) - sequence.computed
            count = min(tokens, budget)
            chunks[sequence] = Chunk(sequence, sequence.computed, count, count == tokens)
            budget -= count
        assert chunks or not self.busy, "nothing was scheduled although there is work"
        decodes = all(chunk.length == 1 and chunk.samples for chunk in chunks.values())
        repeats = 1
        if decodes and not admitted:
            decoding = [(sequence, chunk.start, sequence.remaining) for sequence, chunk in chunks.items()]
            repeats = self._reserve_steps(decoding, whole=False)
        return Step(tuple(chunks.values()), tuple(copies), decodes, repeats)

    def further(self, step: Step) -> Step | None:
        """What can be begun before the tokens of the step, the only one on its way, are known. Reserves its blocks.

        None where the step is no look of all that run, where none of them goes on for sure, where others could take
        their places, or where the blocks can't be had without preempting anyone: then wait for the step's tokens.
        """
        if not step.decodes or len(step.chunks) < len(self.running):
            return None
        return self._look(step.repeats)

    def advance(self, step: Step, sampled: dict[Sequence, list[int]]) -> None:
        """The step was computed: `sampled` holds the next tokens of each sequence that samples, up to its end.

        Those that ended while the step was on its way are done with.
        """
        size = self.pool.block_size
        for sequence, _, length, samples in step.chunks:
            if sequence.finished:
                continue
            if samples:
                sequence.output += sampled[sequence]
                sequence.computed = len(sequence) - 1  # the last token is not fed back yet
            else:
                sequence.computed += length
            if (sequence.remembered + 1) * size <= sequence.computed:
                self._remember(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has its last token: let go of its blocks."""
        self._let_go(sequence)
        sequence.finished = True

    def _look(self, pending: int) -> Step | None:
        """A whole look of all that run, if they all decode, nobody can be admitted and there are blocks for it.

        pending: decode steps of theirs that are on their way.
        """
        if self._may_admit():
            return None
        decoding: list[tuple[Sequence, int, int]] = []
        for sequence in self.running:
            output = len(sequence.output)
            if sequence.computed != len(sequence.prompt) + output - 1:
                return None
            left = sequence.max_tokens - output - pending
            if left > 0:  # else it ends with what is on its way
                decoding.append((sequence, sequence.computed + pending, left))
        if not decoding or (self.waiting and len(decoding) < len(self.running)):
            return None
        steps = self._reserve_steps(decoding, whole=True)
        chunks = tuple(Chunk(sequence, start, 1, True) for sequence, start, _ in decoding)
        return Step(chunks, (), True, steps, ahead=pending > 0) if steps else None

    def _reserve_steps(self, decoding: list[tuple[Sequence, int, int]], whole: bool) -> int:
        """Blocks for as many decode steps in a row as can be had without preempting anyone, up to lookahead, and how
        many steps that are. decoding: sequences, their tokens in the cache, and those that they may still draw. whole:
        all of the steps or none."""
        size, available = self.pool.block_size, self.pool.available
        steps = most = min(self.lookahead, max(left for _, _, left in decoding))
        while steps and (steps == most or not whole):
            wanting: list[tuple[Sequence, int]] = []
            total = 0
            for sequence, start, left in decoding:
                missing = -(-(start + (left if left < steps else steps)) // size) - len(sequence.blocks)
                if missing > 0:
                    wanting.append((sequence, missing))
                    total += missing
            if total <= available:
                for sequence, missing in wanting:
                    sequence.blocks += [self.pool.take() for _ in range(missing)]
                return steps
            steps -= 1
        return 0

    def _may_admit(self) -> bool:
        """Whether somebody could be admitted now, or that is to be found out."""
        if not self.waiting or len(self.running) == self.max_running:
            return False
        first = self.waiting[0]
        if first.leader is not None and self._computes_prompt(first.leader):
            return True
        return self._fits(first, self._prefix(first)[0])

    def _computes_prompt(self, leader: Sequence) -> bool:
        return not leader.finished and leader.computed < len(leader.prompt)

    def _reserve(self, sequence: Sequence, tokens: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Blocks for so many tokens; preempts from the youngest on. False if the sequence itself had to go."""
        while (needed := self._missing(sequence, tokens)) > self.pool.available:
            youngest = self.running[-1]
            self._let_go(youngest)
            youngest.computed, youngest.remembered, youngest.last_node = 0, 0, None
            insort(self.waiting, youngest, key=_arrival)
            chunks.pop(youngest, None)
            self.preemptions += 1
            if youngest is sequence:
                return False
        if needed:
            sequence.blocks += [self.pool.take() for _ in range(needed)]
        return True

    def _admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Start a sequence if all its present tokens fit, taking over what the cache has of them."""
        shared, parent = self._prefix(sequence)
        if not self._fits(sequence, shared):
            return False
        for block in shared:
            self.pool.share(block)
        sequence.blocks = shared
        sequence.computed, sequence.remembered = len(shared) * self.pool.block_size, len(shared)
        sequence.last_node = parent if shared else None
        self._copy_partial(sequence, len(sequence) - 1, copies)
        sequence.blocks += [self.pool.take() for _ in range(self._missing(sequence, len(sequence)))]
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        return True

    def _prefix(self, sequence: Sequence) -> tuple[list[int], Hashable]:
        """The blocks that hold the sequence's beginning already, and the last one's node (the root without any)."""
        size, reusable = self.pool.block_size, len(sequence) - 1  # the last token is always computed: it gives logits
        shared: list[int] = []
        parent = self.root
        while (len(shared) + 1) * size <= reusable:
            start = len(shared) * size
            node = self.pool.find(parent, sequence.tokens(start, start + size))
            if node is None:
                break
            shared.append(node.block)
            parent = node.id
        return shared, parent

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there are blocks for the sequence's present tokens besides these, which nobody may hold yet."""
        idle = sum(self.pool.holders[block] == 0 for block in shared)
        return -(-len(sequence) // self.pool.block_size) - len(shared) <= self.pool.available - idle

    def _copy_partial(self, sequence: Sequence, reusable: int, copies: list[tuple[int, int]]) -> None:
        """The block of the leader that holds the prompt's last, partial run of tokens, as a copy."""
        leader, size = sequence.leader, self.pool.block_size
        first = len(sequence.blocks)
        usable = (
            leader is not None
            and not sequence.output
            and leader in self.running
            and first == reusable // size
            and reusable % size
            and leader.computed >= reusable
        )
        if usable:
            assert leader is not None
            sequence.blocks.append(self.pool.take())
            copies.append((leader.blocks[first], sequence.blocks[first]))
            sequence.computed = reusable

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        needed = -(-tokens // self.pool.block_size) - len(sequence.blocks)
        return needed if needed > 0 else 0

    def _remember(self, sequence: Sequence) -> None:
        size = self.pool.block_size
        while (sequence.remembered + 1) * size <= sequence.computed:
            start = sequence.remembered * size
            parent = self.root if sequence.remembered == 0 else sequence.last_node
            tokens = sequence.tokens(start, start + size)
            sequence.last_node = self.pool.remember(sequence.blocks[sequence.remembered], parent, tokens).id
            sequence.remembered += 1

    def _let_go(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):  # ends are forgotten before beginnings
            self.pool.release(block)
        sequence.blocks = []
        self.running.remove(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival

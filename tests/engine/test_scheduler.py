"""The scheduler by itself: a cache of plain lists stands in for the model's, and every step is checked against it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.engine.block_pool import BlockPool
from qerl.engine.scheduler import Scheduler, Step
from qerl.engine.sequence import Sequence


class Device:
    """Does what it is told in the order of the calls, as a stream does.

    A place of the cache holds the whole prefix that was computed there; rows hold what the device knows of the
    sequences: their tokens, and their block table.
    """

    def __init__(self, pool: BlockPool, cache: dict[tuple[int, int], tuple[int, ...]]) -> None:
        self.pool, self.cache = pool, cache
        self.rows: dict[Sequence, tuple[list[int], list[int]]] = {}
        self.computed = 0

    def run(self, step: Step) -> dict[Sequence, list[int]]:
        """What the sequences that sample draw; the host may look at it later."""
        size = self.pool.block_size
        for source, target in step.copies:
            self.cache |= {(target, i): self.cache[source, i] for i in range(size) if (source, i) in self.cache}
        if step.ahead:  # tokens are the device's own
            self.rows = {chunk.sequence: (self.rows[chunk.sequence][0], []) for chunk in step.chunks}
        else:
            self.rows = {q: ([*q.tokens(0, len(q))], []) for q in (chunk.sequence for chunk in step.chunks)}
        drawn: dict[Sequence, list[int]] = {}
        for chunk in step.chunks:
            sequence = chunk.sequence
            tokens, table = self.rows[sequence]
            table += sequence.blocks
            for at in range(chunk.start):  # what is attended to must be this very prefix
                assert self.cache[table[at // size], at % size] == tuple(tokens[: at + 1])
            for at in range(chunk.start, chunk.start + chunk.length):
                self._write(tokens, table, at)
            if chunk.samples:
                assert chunk.start + chunk.length == len(tokens)
                tokens.append(hash((sequence.arrival, len(tokens))) % 1000 % 3)
                for _ in range(step.repeats - 1):  # later steps in a row feed back what was drawn
                    at = len(tokens) - 1
                    if at // size < len(table):  # past the end there is only the trash block
                        self._write(tokens, table, at)
                    else:
                        assert at >= len(sequence.prompt) + sequence.max_tokens - 1
                    tokens.append(hash((sequence.arrival, len(tokens))) % 1000 % 3)
                drawn[sequence] = tokens[-step.repeats :]
        return drawn

    def _write(self, tokens: list[int], table: list[int], at: int) -> None:
        block, place = table[at // self.pool.block_size], at % self.pool.block_size
        assert self.pool.holders[block] == 1, "a shared block would be written"
        assert block not in self.pool._node_of, "a block that can be found would be written"
        self.cache[block, place] = tuple(tokens[: at + 1])
        self.computed += 1


def simulate(
    prompts: list[tuple[int, ...]],
    samples: int,
    lengths: list[int],
    num_blocks: int,
    block_size: int,
    token_budget: int,
    max_running: int,
    lookahead: int = 1,
    early: int = 10**9,  # one token in so many ends its sequence
    pool: BlockPool | None = None,
    cache: dict[tuple[int, int], tuple[int, ...]] | None = None,
    overlap: bool = False,
) -> tuple[list[Sequence], Scheduler, int]:
    """Run all to the end; returns the sequences, the scheduler and the tokens computed."""
    pool = pool or BlockPool(num_blocks, block_size)
    scheduler = Scheduler(pool, token_budget, max_running, lookahead=lookahead)
    sequences: list[Sequence] = []
    for r, prompt in enumerate(prompts):
        leader = None
        for s in range(samples):
            length = lengths[(r * samples + s) % len(lengths)]
            sequence = Sequence(len(sequences), r, s, prompt, length, leader)
            leader = leader or sequence
            sequences.append(sequence)
            scheduler.add(sequence)
    device = Device(pool, {} if cache is None else cache)
    ahead: tuple[Step, dict[Sequence, list[int]]] | None = None
    while scheduler.busy:
        if ahead is None:
            step = scheduler.schedule()
            assert not step.ahead
            drawn = device.run(step)
        else:
            step, drawn = ahead
        assert step.chunks
        assert sum(chunk.length for chunk in step.chunks) <= token_budget
        assert step.decodes == all(chunk.length == 1 and chunk.samples for chunk in step.chunks)
        assert step.repeats == 1 or step.decodes
        assert len(scheduler.running) <= max_running
        preemptions, running = scheduler.preemptions, list(scheduler.running)
        further = scheduler.further(step) if overlap else None
        assert (scheduler.preemptions, scheduler.running) == (preemptions, running)
        ahead = None if further is None else (further, device.run(further))
        sampled: dict[Sequence, list[int]] = {}
        for chunk in step.chunks:
            sequence, length = chunk.sequence, len(chunk.sequence)
            if sequence.finished:  # by the look before: drawn in vain
                assert step.ahead
                continue
            assert chunk.start == sequence.computed
            if not chunk.samples:
                continue
            kept = drawn[sequence][: sequence.remaining]
            ends = [i for i in range(len(kept)) if hash((sequence.arrival, length + i)) % early == 0]
            if ends:
                sequence.max_tokens = len(sequence.output) + ends[0] + 1
            sampled[sequence] = kept[: ends[0] + 1] if ends else kept
        scheduler.advance(step, sampled)
        for sequence in sampled:
            if len(sequence.output) == sequence.max_tokens:
                scheduler.finish(sequence)
        held = [block for sequence in scheduler.running for block in sequence.blocks]
        assert [held.count(block) for block in range(num_blocks)] == pool.holders, "a block leaked or was freed twice"
        assert pool.available == pool.holders.count(0)
    assert pool.available == num_blocks
    return sequences, scheduler, device.computed


@st.composite
def loads(draw: st.DrawFn) -> dict:
    block_size = draw(st.integers(1, 5))
    shared = tuple(draw(st.lists(st.integers(0, 3), max_size=9)))
    prompts = [
        shared + tuple(draw(st.lists(st.integers(0, 3), min_size=0 if shared else 1, max_size=8)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    longest = max(map(len, prompts)) + max(lengths) - 1
    least = -(-longest // block_size)
    return {
        "prompts": prompts,
        "samples": draw(st.integers(1, 4)),
        "lengths": lengths,
        "num_blocks": least + draw(st.integers(0, 12)),
        "block_size": block_size,
        "token_budget": draw(st.integers(1, 20)),
        "max_running": draw(st.integers(1, 8)),
        "lookahead": draw(st.integers(1, 6)),
    }


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=250, deadline=None)
@given(load=loads())
def test_everything_finishes_nothing_leaks_and_every_prefix_is_right(load: dict, overlap: bool) -> None:
    sequences, _, _ = simulate(**load, overlap=overlap)
    for sequence in sequences:
        assert sequence.finished
        assert len(sequence.output) == sequence.max_tokens


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=150, deadline=None)
@given(load=loads(), early=st.integers(2, 12))
def test_sequences_that_end_early_and_a_pool_that_outlives_calls(load: dict, early: int, overlap: bool) -> None:
    pool, cache = BlockPool(load["num_blocks"], load["block_size"]), {}
    for _ in range(3):
        sequences, _, _ = simulate(**load, early=early, pool=pool, cache=cache, overlap=overlap)
        assert all(sequence.finished for sequence in sequences)


@settings(max_examples=100, deadline=None)
@given(loads(), st.integers(2, 12))
def test_the_same_load_takes_the_same_steps_and_draws_the_same_with_overlap(load: dict, early: int) -> None:
    first, second, other = (simulate(**load, early=early, overlap=overlap) for overlap in (True, True, False))
    assert [s.output for s in first[0]] == [s.output for s in second[0]] == [s.output for s in other[0]]
    assert first[1].preemptions == second[1].preemptions
    assert first[2] == second[2]


def test_a_group_computes_its_prompt_once() -> None:
    prompt = tuple(range(30))
    _, _, computed = simulate([prompt], 8, [5], num_blocks=64, block_size=4, token_budget=64, max_running=16)
    # The prompt once, its last token for the other seven, and four fed-back tokens each (the fifth is never fed).
    assert computed == 30 + 7 + 8 * 4


def test_prompts_with_a_common_beginning_share_its_full_blocks() -> None:
    system = tuple(range(100, 120))
    prompts = [(*system, i, i, i) for i in range(6)]
    _, _, computed = simulate(prompts, 1, [1], num_blocks=64, block_size=4, token_budget=23, max_running=1)
    assert computed == 23 + 5 * 3


def test_too_few_blocks_lead_to_preemption_and_all_the_same_to_the_end() -> None:
    sequences, scheduler, _ = simulate(
        [(i, i + 1) for i in range(6)], 2, [12], num_blocks=6, block_size=4, token_budget=32, max_running=12
    )
    assert scheduler.preemptions > 0
    assert all(sequence.finished for sequence in sequences)


def test_decode_steps_are_taken_in_a_row_as_far_as_blocks_reach() -> None:
    pool = BlockPool(6, 4)
    scheduler = Scheduler(pool, token_budget=32, max_running=4, lookahead=8)
    for i in range(2):
        scheduler.add(Sequence(i, i, 0, (i, 1, 2), 20))
    repeats = []
    while scheduler.busy and len(repeats) < 6:
        step = scheduler.schedule()
        repeats.append(step.repeats)
        scheduler.advance(step, {chunk.sequence: [7] * step.repeats for chunk in step.chunks})
    # Prefill; 3 + 8 = 11 tokens need 3 blocks each, all there are; one more fits; then the younger one is preempted.
    assert repeats[:3] == [1, 8, 1]
    assert scheduler.preemptions == 1


def test_a_look_is_followed_by_another_before_it_is_read() -> None:
    scheduler = Scheduler(BlockPool(8, 4), token_budget=32, max_running=2, lookahead=4)
    first, second, third = (Sequence(i, i, 0, (i, 1, 2), 11 + i) for i in range(3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    prefill = scheduler.schedule()
    assert scheduler.further(prefill) is None
    scheduler.advance(prefill, {first: [7], second: [7]})
    look = scheduler.schedule()
    ahead = scheduler.further(look)
    assert ahead is not None
    assert [(chunk.sequence, chunk.start) for chunk in ahead.chunks] == [(first, 7), (second, 7)]
    assert (look.ahead, ahead.ahead, ahead.repeats) == (False, True, 4)
    assert (len(first.blocks), first.computed) == (3, 3)
    # The first ends, and with it goes what it drew ahead. There is a place for the third: what is ahead is read first.
    scheduler.advance(look, {first: [7, 8], second: [7] * 4})
    scheduler.finish(first)
    assert scheduler.further(ahead) is None
    scheduler.advance(ahead, {second: [9] * 4})
    assert first.output == [7, 7, 8]
    assert second.output == [7] * 5 + [9] * 4
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [second, third]


def test_nothing_is_begun_ahead_without_blocks_or_past_the_last_token() -> None:
    def after_prefill(blocks: int, most: int) -> tuple[Scheduler, list[Sequence]]:
        scheduler = Scheduler(BlockPool(blocks, 4), token_budget=32, max_running=4, lookahead=4)
        sequences = [Sequence(i, i, 0, (i, 1, 2), most) for i in range(2)]
        for sequence in sequences:
            scheduler.add(sequence)
        scheduler.advance(scheduler.schedule(), {sequence: [7] for sequence in sequences})
        return scheduler, sequences

    scheduler, sequences = after_prefill(blocks=5, most=12)
    look = scheduler.schedule()  # 7 tokens each, 11 with another look: that takes a sixth block
    assert look.repeats == 4
    assert scheduler.further(look) is None
    assert [len(sequence.blocks) for sequence in sequences] == [2, 2]
    scheduler, sequences = after_prefill(blocks=20, most=7)
    assert scheduler.further(look := scheduler.schedule()).repeats == 2
    scheduler, sequences = after_prefill(blocks=20, most=5)
    assert scheduler.further(scheduler.schedule()) is None


def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(pool, token_budget=8, max_running=4)
    short, long = Sequence(0, 0, 0, (1, 2), 50), Sequence(1, 1, 0, tuple(range(40)), 5)
    scheduler.add(short)
    scheduler.add(long)
    mixed = 0
    for _ in range(8):
        step = scheduler.schedule()
        kinds = {chunk.sequence.arrival: chunk.length for chunk in step.chunks}
        mixed += kinds.get(0) == 1 and kinds.get(1, 0) > 1
        scheduler.advance(step, {chunk.sequence: [random.randrange(9)] for chunk in step.chunks if chunk.samples})
    assert mixed >= 4


def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 8, 2)
    with pytest.raises(ValueError, match=r"needs 19 places; the cache has 16.*lower max_tokens"):
        scheduler.add(Sequence(0, 0, 0, tuple(range(10)), 10))
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.add(Sequence(0, 0, 0, (), 10))
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        scheduler.add(Sequence(0, 0, 0, (1,), 0))
    assert not scheduler.busy
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 4)


def test_after_a_policy_update_no_prefix_is_found() -> None:
    pool = BlockPool(8, 2)
    block = pool.take()
    pool.remember(block, "root", (1, 2))
    pool.release(block)
    assert pool.find("root", (1, 2)) is not None
    assert pool.find("other noise", (1, 2)) is None
    pool.forget_all()
    assert pool.find("root", (1, 2)) is None
    assert pool.available == 8

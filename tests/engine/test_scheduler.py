"""The scheduler by itself: a cache of plain lists stands in for the model's, and every step is checked against it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.engine.block_pool import BlockPool
from qerl.engine.scheduler import Scheduler
from qerl.engine.sequence import Sequence


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
    cache = {} if cache is None else cache  # (block, place) -> the whole prefix that was computed there
    computed = 0
    while scheduler.busy:
        step = scheduler.schedule()
        assert step.chunks
        assert sum(chunk.count for chunk in step.chunks) <= token_budget
        assert len(scheduler.running) <= max_running
        for source, target in step.copies:
            cache |= {(target, place): cache[source, place] for place in range(block_size) if (source, place) in cache}
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.computed
            for at in range(chunk.start + chunk.count):
                block, place = sequence.blocks[at // block_size], at % block_size
                prefix = sequence.tokens(0, at + 1)
                if at < chunk.start:  # what is attended to must be this very prefix
                    assert cache[block, place] == prefix
                else:
                    assert pool.holders[block] == 1, "a shared block would be written"
                    cache[block, place] = prefix
                    computed += 1
        assert step.repeats == 1 or step.decodes
        sampled: dict[Sequence, list[int]] = {}
        for chunk in step.chunks:
            if not chunk.samples:
                continue
            sequence, length = chunk.sequence, len(chunk.sequence)
            drawn = [hash((sequence.arrival, length + i)) % 1000 % 3 for i in range(step.repeats)]
            whole = (*sequence.tokens(0, length), *drawn)
            for at in range(length, length + step.repeats - 1):  # later steps in a row feed back what was drawn
                if at // block_size < len(sequence.blocks):  # past the end there is only the trash block
                    block, place = sequence.blocks[at // block_size], at % block_size
                    assert pool.holders[block] == 1, "a shared block would be written"
                    cache[block, place] = whole[: at + 1]
                    computed += 1
                else:
                    assert at >= length + sequence.remaining - 1
            kept = drawn[: sequence.remaining]
            ends = [i for i in range(len(kept)) if hash((sequence.arrival, length, i)) % early == 0]
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
    return sequences, scheduler, computed


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


@settings(max_examples=400, deadline=None)
@given(loads())
def test_everything_finishes_nothing_leaks_and_every_prefix_is_right(load: dict) -> None:
    sequences, _, _ = simulate(**load)
    for sequence in sequences:
        assert sequence.finished
        assert len(sequence.output) == sequence.max_tokens


@settings(max_examples=200, deadline=None)
@given(loads(), st.integers(2, 12))
def test_sequences_that_end_early_and_a_pool_that_outlives_calls(load: dict, early: int) -> None:
    pool, cache = BlockPool(load["num_blocks"], load["block_size"]), {}
    for _ in range(3):
        sequences, _, _ = simulate(**load, early=early, pool=pool, cache=cache)
        assert all(sequence.finished for sequence in sequences)


@settings(max_examples=50, deadline=None)
@given(loads())
def test_the_same_load_takes_the_same_steps(load: dict) -> None:
    first, second = simulate(**load), simulate(**load)
    assert [s.output for s in first[0]] == [s.output for s in second[0]]
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


def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(pool, token_budget=8, max_running=4)
    short, long = Sequence(0, 0, 0, (1, 2), 50), Sequence(1, 1, 0, tuple(range(40)), 5)
    scheduler.add(short)
    scheduler.add(long)
    mixed = 0
    for _ in range(8):
        step = scheduler.schedule()
        kinds = {chunk.sequence.arrival: chunk.count for chunk in step.chunks}
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

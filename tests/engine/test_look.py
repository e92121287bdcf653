"""What a step drew, on its way to the host, while the next one is begun."""

import torch

from qerl.engine.look import Look
from qerl.engine.scheduler import Chunk, Step
from qerl.engine.sequence import Sequence


def test_a_look_has_its_own_numbers_and_leaves_out_who_has_ended() -> None:
    one, two, ended = (Sequence(i, i, 0, (1,), 8) for i in range(3))
    owners: list[Sequence | None] = [two, None, one, ended]
    tokens, logprobs = torch.arange(8).view(4, 2), torch.zeros(2, 4, 2)
    chunks = tuple(Chunk(sequence, 0, 1, True) for sequence in (one, two, ended))
    look = Look(Step(chunks, (), True, 2), owners, tokens, logprobs)
    tokens.zero_(), logprobs.fill_(float("nan"))  # the next step overwrites what it draws into,
    owners[0], owners[2] = None, two  # and gives rows to others
    ended.finished = True
    assert {sequence: found[0] for sequence, found in look.drawn().items()} == {one: [4, 5], two: [0, 1]}
    assert not look.has_nan()
    assert Look(Step(chunks, (), True, 2), owners, tokens, logprobs).has_nan()

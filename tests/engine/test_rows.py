from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.engine.rows import Rows
from qerl.engine.sequence import Sequence

TRASH = 99


def sequence(arrival: int, blocks: list[int]) -> Sequence:
    return Sequence(arrival, arrival, 0, (1,), 1, blocks=blocks)


class Device:
    """A table that only ever gets the changes."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = Rows(rows, width, TRASH), width
        self.table = [TRASH] * (rows * width)

    def fill(self, sequences: list[Sequence], rows: int) -> int:
        """Bring the sequences there, and check that the table says what they hold; returns how much was written."""
        seated = self.rows.seat(sequences)
        assert sorted(seated, key=id) == sorted(sequences, key=id)
        places, blocks = self.rows.changes(rows)
        for place, block in zip(places, blocks, strict=True):
            self.table[place] = block
        for row in range(rows):
            held = seated[row].blocks if row < len(seated) else []
            found = self.table[row * self.width : (row + 1) * self.width]
            assert found == held + [TRASH] * (self.width - len(held))
        return len(places)


def test_only_what_is_new_travels() -> None:
    device = Device(4, 8)
    a, b, c = (sequence(i, [10 * i + j for j in range(3)]) for i in range(3))
    assert device.fill([a, b, c], 4) == 9
    assert device.fill([a, b, c], 4) == 0
    b.blocks += [7]
    assert device.fill([a, b, c], 4) == 1
    # The first ends: the last moves to its row, and its old row is emptied.
    assert device.fill([b, c], 2) == 3
    assert device.rows.owners[:2] == [c, b]
    c.blocks = [5]  # preempted, and computed again in other blocks
    assert device.fill([b, c], 2) == 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_table_always_says_what_the_sequences_hold(data: st.DataObject) -> None:
    device, alive, arrival = Device(6, 5), [], 0
    for _ in range(data.draw(st.integers(1, 12))):
        for q in list(alive):
            change = data.draw(st.sampled_from(["stay", "grow", "again", "end"]))
            if change == "grow" and len(q.blocks) < 5:
                q.blocks += [data.draw(st.integers(0, 50))]
            elif change == "again":
                q.blocks = data.draw(st.lists(st.integers(0, 50), max_size=5))
            elif change == "end":
                alive.remove(q)
        for _ in range(data.draw(st.integers(0, 6 - len(alive)))):
            alive.append(sequence(arrival, data.draw(st.lists(st.integers(0, 50), max_size=5))))
            arrival += 1
        if alive:
            device.fill(alive, data.draw(st.integers(len(alive), 6)))

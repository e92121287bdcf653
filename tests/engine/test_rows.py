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
        return self._write(rows)

    def go_on(self, sequences: list[Sequence], rows: int) -> int:
        """Likewise, for some of those who have rows, in the rows they have."""
        before = list(self.rows.owners)
        empty = self.rows.keep(sequences)
        assert self.rows.owners == [owner if owner in sequences else None for owner in before]
        assert empty == [row for row, owner in enumerate(before) if owner is not None and owner not in sequences]
        return self._write(rows)

    def _write(self, rows: int) -> int:
        places, blocks = self.rows.changes(rows)
        for place, block in zip(places, blocks, strict=True):
            self.table[place] = block
        for row in range(rows):
            owner = self.rows.owners[row]
            held = owner.blocks if owner is not None else []
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


def test_those_who_go_on_keep_their_rows_and_the_others_are_emptied() -> None:
    device = Device(4, 8)
    a, b, c = (sequence(i, [10 * i + j for j in range(3)]) for i in range(3))
    device.fill([a, b, c], 4)
    a.blocks = []  # ended
    c.blocks += [7]
    assert device.go_on([b, c], 4) == 4
    assert device.rows.owners == [None, b, c, None]
    assert device.go_on([b], 4) == 4  # c ends for sure, though it still holds its blocks
    assert device.fill([b, c], 2) == 4  # b stays, and c is written to the first row


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_table_always_says_what_the_sequences_hold(data: st.DataObject) -> None:
    device, alive, arrival, used = Device(6, 5), [], 0, 0
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
        if alive and used and data.draw(st.booleans()):
            device.go_on([q for q in alive if q in device.rows.owners], used)
        if alive:
            used = data.draw(st.integers(len(alive), 6))
            device.fill(alive, used)

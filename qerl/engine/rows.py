"""Which decoding sequence has which row of the device's state, and what its row of the block table holds. No torch.

A sequence keeps its row while it decodes, so that from look to look only new blocks have to travel to the device. Rows
depend on the call alone: sequences of earlier calls are never among those of the present one.
"""

from collections.abc import Sequence as Series

from qerl.engine.sequence import Sequence


class Rows:
    """The host's picture of a block table of `width` columns, which holds `trash` where a sequence has no block."""

    def __init__(self, rows: int, width: int, trash: int) -> None:
        self.width, self.trash = width, trash
        self.owners: list[Sequence | None] = [None] * rows
        self._written: list[list[int] | None] = [None] * rows  # the very list that was written; lists only grow
        self._filled = [0] * rows  # entries that are not trash

    def seat(self, sequences: Series[Sequence]) -> list[Sequence]:
        """The sequences by row, from the first row on; those who have one of these rows keep it."""
        count = len(sequences)
        present = set(sequences)
        kept = [owner if owner in present else None for owner in self.owners[:count]]
        newcomers = iter(sorted(present.difference(kept), key=lambda sequence: sequence.arrival))
        seated = [next(newcomers) if owner is None else owner for owner in kept]
        self.owners = [*seated, *[None] * (len(self.owners) - count)]
        return seated

    def keep(self, sequences: Series[Sequence]) -> list[int]:
        """Only these stay, in the rows they have; returns the rows that become empty."""
        present = set(sequences)
        empty = [row for row, owner in enumerate(self.owners) if owner is not None and owner not in present]
        for row in empty:
            self.owners[row] = None
        return empty

    def changes(self, rows: int) -> tuple[list[int], list[int]]:
        """What to write to the first `rows` rows so that they hold their owners' blocks: flat places, and blocks."""
        places: list[int] = []
        blocks: list[int] = []
        for row, owner in enumerate(self.owners[:rows]):
            held = owner.blocks if owner is not None else None
            filled, wanted = self._filled[row], len(held) if held is not None else 0
            same = held is self._written[row]
            if same and filled == wanted:
                continue
            start = filled if same else 0
            end = max(filled, wanted)
            places += range(row * self.width + start, row * self.width + end)
            blocks += [*(held or [])[start:], *[self.trash] * (end - wanted)]
            self._written[row], self._filled[row] = held, wanted
        return places, blocks

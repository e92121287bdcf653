"""Blocks of the key/value cache: who holds which, and which finished ones can be reused as a prefix.

A block holds `block_size` consecutive tokens of a sequence. Sequences may share full blocks; each holder counts. A full
block is remembered under its parent block and its tokens, so that another sequence with the same beginning finds it;
when its last holder lets go it stays until the space is needed (least recently released first). Plain ints, no torch.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

Key = tuple[Hashable, tuple[int, ...]]  # (node of the parent block, or the root's name; the block's tokens)


@dataclass(frozen=True)
class Node:
    """A full block that can be found again. Ids are never reused, so children of a forgotten block stay unreachable."""

    id: int
    block: int
    key: Key


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"A cache needs at least one block of one token, not {num_blocks} of {block_size}.")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: lowest number first
        self._released: OrderedDict[int, None] = OrderedDict()  # remembered blocks that nobody holds, oldest first
        self._nodes: dict[Key, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._next_id = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken now, forgotten prefixes included."""
        return len(self._free) + len(self._released)

    def take(self) -> int:
        """A block of one's own. Forgets the prefix released longest ago if nothing else is free."""
        if not self._free:
            assert self._released, "take() without an available block"
            block, _ = self._released.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        block = self._free.pop()
        self.holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is held, or that is remembered."""
        if self.holders[block] == 0:
            del self._released[block]
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less."""
        assert self.holders[block] > 0, f"block {block} was released more often than it was taken"
        self.holders[block] -= 1
        if self.holders[block] == 0:
            if block in self._node_of:
                self._released[block] = None
            else:
                self._free.append(block)

    def remember(self, block: int, parent: Hashable, tokens: tuple[int, ...]) -> Node:
        """Make a full block findable; returns the node for its children. An equal block that is known already stays."""
        assert len(tokens) == self.block_size, "only full blocks are remembered"
        known = self._nodes.get((parent, tokens))
        if known is not None:
            return known
        node = Node(self._next_id, block, (parent, tokens))
        self._next_id += 1
        self._nodes[node.key] = self._node_of[block] = node
        return node

    def find(self, parent: Hashable, tokens: tuple[int, ...]) -> Node | None:
        return self._nodes.get((parent, tokens))

    def forget_all(self) -> None:
        """After a policy update: no prefix is valid any more."""
        self._free += reversed(self._released)
        self._released.clear()
        self._nodes.clear()
        self._node_of.clear()

    def _forget(self, block: int) -> None:
        del self._nodes[self._node_of.pop(block).key]

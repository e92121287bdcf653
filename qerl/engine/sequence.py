"""One sample on its way: its tokens, how many of them lie in the cache, and in which blocks."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """Sample `sample` of request `request`. Sequences compare by identity; `arrival` orders them."""

    arrival: int
    request: int
    sample: int
    prompt: tuple[int, ...]
    max_tokens: int  # of output
    leader: "Sequence | None" = None  # the first sample of the same prompt; its cache is taken over
    key: int = 0  # names its random numbers
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values lie in the cache
    blocks: list[int] = field(default_factory=list)
    remembered: int = 0  # leading blocks that are findable as a prefix
    last_node: Hashable = None  # of the last of those
    finished: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def last(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still draw."""
        return self.max_tokens - len(self.output)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        p = len(self.prompt)
        return (*self.prompt[start:end], *self.output[max(start - p, 0) : max(end - p, 0)])

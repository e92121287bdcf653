"""What the engine takes of a GPU beside its cache, and the cache that this leaves room for: numbers alone.

The run sizes its cache by these, and so does the plan (`qerl.rl.footprint`), so that both come to the same.
"""

from qerl.model.architecture import Architecture
from qerl.model.shapes import Shape

GPU_BUDGET, CPU_BUDGET = 8192, 2048  # tokens of a step
GPU_SHARE = 0.8  # of what is free on a GPU once the model is loaded, that a cache takes at most
LOGIT_BYTES = 5  # a logit on its way to a token, filters or not
PENALIZED_BYTES = 20  # with a repetition penalty, which makes float32 copies and remembers what was seen
# Of what torch allocates, for what nobody plans: gaps between its pieces, libraries' own memory (.4 % in a measured 32B
# step that 80 GB bounded), and the estimate's own error (up to .8 % too low).
MARGIN = 0.02


def prefill_bytes(of: Shape | Architecture, tokens: int, item: int, quantized: bool) -> int:
    """Transient results of a prefill of so many tokens, or of as many as a step takes. item: bytes of an activation."""
    dequantized = 2 * of.intermediate * of.hidden * item if quantized else 0
    return min(GPU_BUDGET, tokens) * item * 3 * (of.intermediate + of.hidden) + dequantized


def decode_bytes(of: Shape | Architecture, sequences: int, item: int, penalty: bool) -> int:
    """Of a decode step of so many sequences; captured graphs keep it. penalty: on repetition, it is asked for."""
    logit = PENALIZED_BYTES if penalty else LOGIT_BYTES
    return sequences * (of.vocab * logit + item * (3 * of.intermediate + 4 * of.hidden))


def margin(allocated: int) -> int:
    return int(MARGIN * allocated)


def cache_room(free: int, held: int, beside: int, each: int) -> int:
    """Bytes that a cache may take of those that are free, beside those that torch holds (held) and will need for
    prefill and decoding (beside). Where not even one sequence (each) would be left room for, up to half of what is
    free goes to it all the same: a step rarely needs all that it may."""
    left = free - beside - margin(held + beside)
    return max(0, min(int(GPU_SHARE * free), max(left, min(each, free // 2))))

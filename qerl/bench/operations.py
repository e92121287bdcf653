"""Floating-point operations that a training pass really does, recomputation included."""

from collections.abc import Sequence

from qerl.model.shapes import Shape

PEAK = 989e12  # of an H100 or H200 in bf16, without sparsity
ATTENTION_BACKWARD = 2.5  # five products for the forward's two


def pass_operations(shape: Shape, rank: int, lengths: Sequence[int], predicted: int, recomputed: int) -> float:
    """Forward and backward over packed sequences: frozen weights, LoRA on all projections (rank 0: none), log-probs of
    `predicted` tokens, so many blocks computed a second time (all but their last large product)."""
    tokens = sum(lengths)
    q, kv, d, wide = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden, shape.intermediate
    layers = ((q, d), (kv, d), (kv, d), (d, q), (wide, d), (wide, d), (d, wide))
    products = 2.0 * tokens * sum(n * k for n, k in layers)
    low_rank = 2.0 * tokens * rank * sum(n + k for n, k in layers)
    attention = 4.0 * q * sum(length * (length + 1) / 2 for length in lengths)
    forward = products + low_rank + attention
    backward = products + 2 * low_rank + ATTENTION_BACKWARD * attention
    again = forward - 2.0 * tokens * d * wide
    unneeded = 2.0 * tokens * d * (q + 2 * kv)  # the embedding is frozen: nothing flows out of the first block
    head = 2 * 2.0 * predicted * shape.vocab * d
    return shape.layers * (forward + backward) + recomputed * again - unneeded + head

"""One operation a file: the reference in PyTorch, which is also what a CPU runs, and the public function.

Dimensions in names: T tokens (packed, no padding), D hidden, V vocabulary, H query heads, G key/value heads, d head
size, N outputs, K inputs of a linear layer, S segments.
"""

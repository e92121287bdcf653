"""One operation a file: the reference in PyTorch, which is also what a CPU runs, and the public function.

The Triton kernels are in `gpu`, in files of the same names, imported where they run: on GPU tensors, where no gradient
is asked or inside an autograd function of the file. They round where the reference rounds.

Dimensions in names: T tokens (packed, no padding), D hidden, V vocabulary, H query heads, G key/value heads, d head
size, N outputs, K inputs of a linear layer, S segments.
"""

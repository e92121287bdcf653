"""Without a GPU, Triton's kernels run in its interpreter, which must be chosen before triton is imported anywhere."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

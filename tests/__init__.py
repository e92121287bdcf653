"""Without a GPU, Triton's kernels run in its interpreter, which must be chosen before triton is imported anywhere."""

import os

if "TRITON_INTERPRET" not in os.environ:  # processes that tests start inherit it, and need not load torch to know
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

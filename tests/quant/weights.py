"""Weights that formats find hard, for property tests."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

# Magnitudes from float32's subnormals to near its end (MXFP4's library breaks above 2.9e38).
MAGNITUDES = (0.0, 1e-44, 1e-40, 1e-37, 1e-30, 1e-8, 0.02, 1.0, 1e10, 1e30, 1e37)
# Values that fall on ties and edges of the E2M1 grid when a block's step is a power of two.
EDGES = (0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -0.25, -2.5, -5.0, -6.0)


@st.composite
def matrices(draw: st.DrawFn, block: int, most_rows: int = 7, most_blocks: int = 5) -> Tensor:
    """float32 [N, K], K a multiple of block: random rows of mixed magnitudes, with zero blocks, signed zeros, ties."""
    rows = draw(st.integers(1, most_rows))
    columns = block * draw(st.integers(1, most_blocks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    weight *= rng.choice(np.array(draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=3))), (rows, 1))
    for row in range(rows):
        kind = draw(st.sampled_from(("plain", "zero block", "edges", "sparse", "outlier")))
        if kind == "zero block":
            weight[row, :block] = rng.choice([0.0, -0.0])
        elif kind == "edges":
            weight[row] = rng.choice(np.array(EDGES, dtype=np.float32), columns)
        elif kind == "sparse":
            weight[row, rng.random(columns) < 0.7] = 0
        elif kind == "outlier":
            weight[row, rng.integers(columns)] *= 1e4 if np.abs(weight).max() < 1e33 else 1.0
    return torch.from_numpy(weight.astype(np.float32))

"""How one call draws its tokens, as tensors on the device: the same inside a captured graph and outside."""

import torch
from torch import Tensor

from qerl.kernels.draw import draw
from qerl.kernels.sample import penalize
from qerl.records import Sampling


class Drawing:
    """The rules of a `Sampling` that act on logits."""

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device) -> None:
        if any(not 0 <= stop < vocab for stop in sampling.stop_ids):
            raise ValueError(f"Stop ids must be from 0 to {vocab - 1}; is the tokenizer another model's?")
        if sampling.min_tokens and len(set(sampling.stop_ids)) >= vocab:
            raise ValueError("With min_tokens some token must be left that is no stop id.")
        self.sampling = sampling
        self.penalizes = sampling.repetition_penalty != 1.0
        stops = sampling.stop_ids if sampling.min_tokens else ()
        self.early_stops = torch.tensor(stops, dtype=torch.int64, device=device)
        s = sampling
        # What a captured graph depends on.
        self.key = (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.min_tokens, stops)

    def draw(
        self, logits_SV: Tensor, keys_S: Tensor, drawn_S: Tensor, seen_SV: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """float32 logits -> tokens, log-probs as drawn, log-probs before filters, [S] each.

        keys_S: int64, the state of each sequence's random numbers; drawn_S: int64, tokens it has drawn so far; seen_SV:
        bool, the tokens it holds, for the repetition penalty.
        """
        s, policy_SV = self.sampling, logits_SV
        if self.penalizes:
            assert seen_SV is not None
            logits_SV = penalize(logits_SV, seen_SV, s.repetition_penalty)
        if len(self.early_stops):
            early_S1 = (drawn_S < s.min_tokens)[:, None]
            stops = logits_SV[:, self.early_stops].masked_fill(early_S1, -torch.inf)
            logits_SV = logits_SV.index_copy(1, self.early_stops, stops)
        return draw(logits_SV, keys_S, drawn_S, s.temperature, s.top_k, s.top_p, s.min_p, policy_SV)

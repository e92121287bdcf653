"""What a model's weights take in each format, from its shape alone."""

from dataclasses import dataclass

from qerl.model.shapes import Shape
from qerl.quant.layout import layout_for

FORMATS = ("bf16", "nf4", "mxfp4", "nvfp4")


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights, by part."""

    blocks: int  # everything in the decoder blocks and the final norm, linear layers in the format
    embedding: int  # 16-bit
    head: int  # 16-bit; what it takes, or would take, apart from the embedding
    tied: bool  # the head is the embedding

    @property
    def total(self) -> int:
        return self.blocks + self.embedding + (0 if self.tied else self.head)

    @property
    def with_head_apart(self) -> int:
        return self.blocks + self.embedding + self.head


def weight_bytes(shape: Shape, format: str) -> WeightBytes:
    """format: bf16, nf4, mxfp4 or nvfp4."""
    blocks = embedding = 0
    for name, spec in shape.tensors().items():
        if name == "model.embed_tokens.weight":
            embedding = spec.nbytes
        elif name.endswith("_proj.weight") and format != "bf16":
            blocks += sum(part.nbytes for part in layout_for(format).specs(spec).values())
        elif name != "lm_head.weight":
            blocks += spec.nbytes
    return WeightBytes(blocks, embedding, embedding, shape.tied)


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper's memory table (arXiv 2510.11696) and the sum of ours that it stands for."""

    gigabytes: float
    counts: str

    def ours(self, weights: WeightBytes) -> float:
        sums = {
            "all weights": weights.total,
            "all weights, tied head stored apart": weights.with_head_apart,
            "decoder blocks only": weights.blocks,
        }
        return sums[self.counts] / 1e9


PAPER = {
    ("qwen2.5-3b", "bf16"): PaperFigure(6.2, "all weights"),
    ("qwen2.5-3b", "nvfp4"): PaperFigure(2.8, "all weights, tied head stored apart"),
    ("qwen2.5-7b", "bf16"): PaperFigure(15.2, "all weights"),
    ("qwen2.5-7b", "nvfp4"): PaperFigure(5.9, "all weights"),
    ("qwen2.5-14b", "bf16"): PaperFigure(29.6, "all weights"),
    ("qwen2.5-14b", "nvfp4"): PaperFigure(10.6, "all weights"),
    ("qwen2.5-32b", "bf16"): PaperFigure(62.3, "decoder blocks only"),
    ("qwen2.5-32b", "nvfp4"): PaperFigure(20.7, "all weights"),
}

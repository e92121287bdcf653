"""What a run takes of a GPU's memory, part by part, from shapes and a few numbers alone.

Two moments decide. While a model is updated there are the weights, what is trained with its gradients and optimizer
states, and activations; the cache sleeps. While it samples there are the weights, what is trained, the optimizer's
states, the cache, and the workspace of a decode step.

Bytes a token of one block's backward pass follow from what autograd keeps of `qerl.model.layers`; the constants below
are estimates of what libraries add, and are there to be corrected by measurements.
"""

from dataclasses import dataclass

from qerl.engine.cache import GPU_SHARE, head_bytes
from qerl.kernels.logprob import CHUNK_BYTES
from qerl.model.adapter import match_targets
from qerl.model.architecture import PROJECTIONS
from qerl.model.layers import LoraSettings
from qerl.model.memory import weight_bytes
from qerl.model.shapes import Shape
from qerl.quant.layout import DEQUANTIZE_GPU

CONTEXT = 800_000_000  # CUDA's context and the libraries' workspaces
DEQUANTIZE_SCRATCH = 12  # bytes of intermediate results for each element that is dequantized at a time
SAMPLING_BYTES = 36  # a logit on its way to a token: float32 logits and log-probs, float64 running sums


@dataclass(frozen=True)
class Workload:
    """What of a run decides its memory, beside the model's shape."""

    base: str  # bf16, nvfp4, mxfp4, nf4 or full
    lora: LoraSettings
    optimizer_bytes: int  # of each trained weight
    micro_batch: int  # tokens of a forward and backward pass
    recompute: bool
    sequences: int  # that the engine decodes at a time
    longest: int  # tokens of a sequence
    item: int = 2  # bytes of an activation
    keys: int = 0  # of a micro-batch with shared prompts, which copies keys and values; 0 where none is shared
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Footprint:
    """Bytes by part."""

    weights: int  # the frozen or, in full training, 16-bit weights that forwards read
    masters: int  # float32, of what is trained
    copies: int  # of LoRA in the compute dtype
    optimizer: int
    gradients: int  # float32
    kept: int  # activations that wait for the backward pass
    block: int  # of the one block that is recomputed, and transient results of its backward pass
    logits: int  # of a chunk, and the final hidden states
    cache_wanted: int  # for all sequences at their longest
    cache_each: int  # for one
    workspace: int  # of a decode step with a full cache; captured graphs keep it
    context: int

    @property
    def resident(self) -> int:
        """What is always there."""
        return self.context + self.weights + self.masters + self.copies + self.optimizer

    @property
    def update_peak(self) -> int:
        """What torch allocates at most while the model is updated (its max_memory_allocated)."""
        return self.resident - self.context + self.gradients + self.kept + max(self.block, self.logits)

    def cache(self, gpu: int) -> int:
        """The cache that the engine takes on a GPU of so many bytes."""
        return max(0, min(self.cache_wanted, int(GPU_SHARE * (gpu - self.resident))))

    def updating(self, gpu: int) -> int:
        return self.update_peak + self.context + self.workspace_for(gpu)

    def sampling(self, gpu: int) -> int:
        return self.resident + self.cache(gpu) + self.workspace_for(gpu)

    def fits(self, gpu: int) -> bool:
        return max(self.updating(gpu), self.sampling(gpu)) <= gpu and self.cache(gpu) >= self.cache_each

    def workspace_for(self, gpu: int) -> int:
        """By the share of the sequences that the cache holds."""
        return self.workspace * self.cache(gpu) // max(1, self.cache_wanted)


def footprint(shape: Shape, work: Workload) -> Footprint:
    matrices, gains = trained_weights(shape, work)
    token, item = _block_token_bytes(shape, work), work.item
    hidden, largest = shape.hidden, 2 * shape.intermediate * shape.hidden
    quantized = work.base not in ("bf16", "full")
    transient = work.micro_batch * 8 * shape.intermediate * item  # gate and up, their gradients, LoRA's share
    if quantized:
        transient += largest * item + min(largest, DEQUANTIZE_GPU) * DEQUANTIZE_SCRATCH
    chunk = min(CHUNK_BYTES, 4 * shape.vocab * work.micro_batch)
    logits = 2 * chunk + work.micro_batch * hidden * (4 + 3 * item)
    if work.base == "full":  # the head's gradient, in float32 and as it is passed on
        logits += shape.vocab * hidden * (4 + item)
    activations = token * work.micro_batch + _copied(shape, work)
    # A token's key and value in one layer.
    place = 2 * shape.kv_heads * head_bytes(shape.head_dim, item, work.kv_cache_dtype)
    return Footprint(
        weights=_weights(shape, work.base, item),
        masters=4 * (matrices + gains),
        copies=0 if work.base == "full" else item * matrices,
        optimizer=work.optimizer_bytes * (matrices + gains),
        gradients=4 * (matrices + gains),
        kept=shape.layers * (hidden * item * work.micro_batch if work.recompute else activations),
        block=(activations if work.recompute else 0) + transient,
        logits=logits,
        cache_wanted=work.sequences * work.longest * place * shape.layers,
        cache_each=work.longest * place * shape.layers,
        workspace=work.sequences * (work.longest * place + shape.vocab * SAMPLING_BYTES),
        context=CONTEXT,
    )


def trained_weights(shape: Shape, work: Workload) -> tuple[int, int]:
    """How many weights are trained: of matrices (with biases and tables), and of norms' gains."""
    tensors = shape.tensors()
    if work.base == "full":
        gains = sum(spec.numel for name, spec in tensors.items() if _is_gain(name))
        return sum(spec.numel for spec in tensors.values()) - gains, gains
    linear = {name.removesuffix(".weight"): spec for name, spec in tensors.items() if name.endswith("_proj.weight")}
    chosen = match_targets(work.lora.target_modules, list(linear))
    matrices = sum(work.lora.r * sum(linear[name].shape) for name in chosen)
    return matrices, 2 * shape.layers * shape.hidden if work.lora.train_norms else 0


def _weights(shape: Shape, base: str, item: int) -> int:
    """As they lie in memory: gains are float32, and noise lies beside those of the blocks' two norms."""
    gains = sum(spec.numel for name, spec in shape.tensors().items() if _is_gain(name))
    stored = weight_bytes(shape, "bf16" if base == "full" else base)
    wider = (item - 2) * (stored.total if base in ("bf16", "full") else stored.embedding) // 2
    return stored.total + wider + 2 * gains + 4 * 2 * shape.layers * shape.hidden


def _block_token_bytes(shape: Shape, work: Workload) -> int:
    """What autograd keeps of a block for each token, were nothing recomputed."""
    item, hidden = work.item, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gain = 4 if work.base == "full" or work.lora.train_norms else 0  # the normed input, where the gain is trained
    norms = 2 * (hidden * (4 + item + gain) + 4)  # the input in float32, the output, 1/rms
    if shape.form == "qwen3":
        trained = 4 if work.base == "full" else 0
        norms += (q + kv) * (4 + trained) + 4 * (shape.heads + shape.kv_heads)
    attention = item * ((q + 2 * kv) + (q + kv) + q) + 4 * shape.heads  # as projected, turned, attended; logsumexp
    mlp = item * 4 * shape.intermediate  # gate and up, silu(gate), their product
    lora = 0 if work.base == "full" else item * work.lora.r * len(PROJECTIONS)
    return norms + attention + mlp + lora


def _copied(shape: Shape, work: Workload) -> int:
    """What a block keeps more, or less, where prompts are shared: copies of keys and values, in place of these and of
    the projection that the values are a part of."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return work.item * (2 * kv * work.keys - (q + 3 * kv) * work.micro_batch) if work.keys else 0


def _is_gain(name: str) -> bool:
    return name.endswith("norm.weight")

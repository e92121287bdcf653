"""What a run takes of a GPU's memory, part by part, from shapes and a few numbers alone.

Two moments decide. While a model is updated there are the weights, what is trained with its gradients and optimizer
states, and activations; the cache sleeps. While it samples there are the weights, what is trained, the optimizer's
states, the cache, and the workspaces of decode steps and of a prefill. Each has its margin (`qerl.engine.workspace`).

Bytes a token of one block's backward pass follow from what autograd keeps of `qerl.model.layers`; the constants below
are estimates of what libraries add, and are there to be corrected by measurements (`qerl bench step` prints both).

The first blocks are those that are recomputed: when the backward pass comes to them, what the others kept is free.
"""

import math
from dataclasses import dataclass, replace

from qerl.engine.cache import head_bytes
from qerl.engine.workspace import cache_room, decode_bytes, margin, prefill_bytes
from qerl.kernels.logprob import SCALED, chunk_tokens
from qerl.model.adapter import match_targets
from qerl.model.architecture import PROJECTIONS
from qerl.model.layers import LoraSettings
from qerl.model.memory import weight_bytes
from qerl.model.shapes import Shape

CONTEXT = 800_000_000  # CUDA's context and loaded kernels
CUBLAS = 3 * (32 << 20)  # workspaces that torch allocates for cuBLAS: of the forward's and the backward's thread, of Lt
SPARE = 0.06  # of a GPU that stays free before fewer blocks are recomputed: more than the margin, since it costs little


@dataclass(frozen=True)
class Workload:
    """What of a run decides its memory, beside the model's shape."""

    base: str  # bf16, nvfp4, mxfp4, nf4 or full
    lora: LoraSettings
    optimizer_bytes: int  # of each trained weight
    micro_batch: int  # tokens of a forward and backward pass
    recompute: int  # blocks, the first, whose activations are recomputed
    sequences: int  # that the engine decodes at a time
    longest: int  # tokens of a sequence
    item: int = 2  # bytes of an activation
    keys: int = 0  # of a micro-batch with shared prompts, which copies keys and values; 0 where none is shared
    kv_cache_dtype: str = "auto"
    penalty: bool = False  # on repetition, in sampling


@dataclass(frozen=True)
class Footprint:
    """Bytes by part."""

    weights: int  # the frozen or, in full training, 16-bit weights that forwards read
    masters: int  # float32, of what is trained
    copies: int  # of LoRA in the compute dtype
    optimizer: int
    gradients: int  # float32
    scratch: int  # a weight in 16 bits, dequantized for a product; cuBLAS's workspaces
    kept: int  # activations that wait for the backward pass
    block: int  # of one block that is recomputed if all are, and transient results of its backward pass
    logits: int  # of a chunk, and the final hidden states
    prefill: int  # transient results of a prefill
    cache_wanted: int  # for all sequences at their longest
    cache_each: int  # for one
    workspace: int  # of a decode step with all sequences; captured graphs keep it
    context: int

    @property
    def resident(self) -> int:
        """What is always there."""
        return self.context + self.weights + self.masters + self.copies + self.optimizer + self.scratch

    @property
    def update_peak(self) -> int:
        """What torch allocates at most while the model is updated (its max_memory_allocated)."""
        return self.held + self.gradients + self.kept + max(self.block, self.logits)

    @property
    def torch_peak(self) -> int:
        """The same of a whole step; torch does not count the cache."""
        return max(self.update_peak, self.held + max(self.prefill, self.workspace))

    @property
    def held(self) -> int:
        """What torch allocates always."""
        return self.resident - self.context

    def cache(self, gpu: int) -> int:
        """The cache that the engine takes on a GPU of so many bytes."""
        room = cache_room(gpu - self.resident, self.held, self.prefill + self.workspace, self.cache_each)
        return min(self.cache_wanted, room)

    @property
    def update_margin(self) -> int:
        return margin(self.update_peak)

    @property
    def sample_margin(self) -> int:
        """The cache, which torch does not allocate, has no gaps."""
        return margin(self.held + self.prefill + self.workspace)

    @property
    def updating(self) -> int:
        return self.update_peak + self.context + self.workspace + self.update_margin

    def sampling(self, gpu: int) -> int:
        return self.resident + self.cache(gpu) + self.workspace + self.prefill + self.sample_margin

    def fits(self, gpu: int) -> bool:
        return max(self.updating, self.sampling(gpu)) <= gpu and self.cache(gpu) >= self.cache_each


def footprint(shape: Shape, work: Workload) -> Footprint:
    matrices, gains = trained_weights(shape, work)
    token, item, tokens = _block_token_bytes(shape, work), work.item, work.micro_batch
    hidden, largest = shape.hidden, 2 * shape.intermediate * shape.hidden
    quantized = work.base not in ("bf16", "full")
    # Hidden states before and after the norm, those of completions, their gradient, and its scaling.
    logits = 4 * shape.vocab * min(tokens, chunk_tokens(shape.vocab)) + 4 * tokens * hidden * item
    logits += min(tokens, SCALED) * hidden * 4
    if work.base == "full":  # the head's gradient, in float32 and as it is passed on; a chunk's logits in 16 bits
        logits += shape.vocab * (hidden * (4 + item) + min(tokens, chunk_tokens(shape.vocab)) * (4 + item))
    again = min(work.recompute, shape.layers)
    activations = token * tokens + _copied(shape, work)
    # A token's key and value in one layer.
    place = 2 * shape.kv_heads * head_bytes(shape.head_dim, item, work.kv_cache_dtype)
    return Footprint(
        weights=_weights(shape, work.base, item),
        masters=4 * (matrices + gains),
        copies=0 if work.base == "full" else item * matrices,
        optimizer=work.optimizer_bytes * (matrices + gains),
        gradients=4 * (matrices + gains),
        scratch=CUBLAS + (largest * item if quantized else 0),
        kept=again * tokens * hidden * item + (shape.layers - again) * activations,
        block=(activations if again == shape.layers else 0) + _transient(shape, work),
        logits=logits,
        prefill=prefill_bytes(shape, work.sequences * work.longest, item, quantized),
        cache_wanted=work.sequences * work.longest * place * shape.layers,
        cache_each=work.longest * place * shape.layers,
        workspace=decode_bytes(shape, work.sequences, item, work.penalty),
        context=CONTEXT,
    )


def fewest_recomputed(shape: Shape, work: Workload, gpu: int) -> int:
    """How many blocks must be recomputed, so that updates fit a GPU of so many bytes; all, where not even that does."""
    none, one = (footprint(shape, replace(work, recompute=count)) for count in (0, 1))
    over = none.updating - none.update_margin - (1 - SPARE) * gpu
    return min(shape.layers, max(0, math.ceil(over / (none.kept - one.kept))))  # each block keeps so much less


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
    item, full = work.item, work.base == "full"
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * 2 * item * shape.hidden  # input and output
    attention = item * ((q + 2 * kv) + q) + 4 * shape.heads  # turned, attended; logsumexp
    if shape.form == "qwen3":
        attention += item * (q + 2 * kv)  # as projected
        if full:  # the norms' inputs and outputs in float32, 1/rms; values are not copied
            attention += 2 * 4 * (q + kv) + 4 * (shape.heads + shape.kv_heads) - item * kv
    mlp = item * (3 if full else 2) * shape.intermediate  # gate and up; with a trained weight, their product too
    return norms + attention + mlp + (0 if full else item * work.lora.r * len(PROJECTIONS))


def _copied(shape: Shape, work: Workload) -> int:
    """What a block keeps more, or less, where prompts are shared: copies of keys and values. The originals lie beside
    q; but where the norms of heads are trained they are apart, and neither keys nor the projection, which the values
    are a part of, are kept."""
    if not work.keys:
        return 0
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    apart = work.base == "full" and shape.form == "qwen3"
    return work.item * (2 * kv * work.keys - ((q + 3 * kv) * work.micro_batch if apart else 0))


def _transient(shape: Shape, work: Workload) -> int:
    """Of a block's backward pass."""
    item, tokens = work.item, work.micro_batch
    hidden, wide = shape.hidden, shape.intermediate
    # Of the MLP: silu(gate) * up, formed again, and its gradient; gradients of the residual, of the MLP's output and
    # input. Attention's, which are more beside a narrow MLP, come when gate and up are free.
    found = tokens * item * (2 * wide + 3 * hidden)
    if work.keys:  # attention's are more, too, where a prompt is long beside its completions
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        queries = tokens * (item * (hidden + 2 * q - 2 * wide) + 4 * q)  # residual, output, q; q's sums in float32
        found = max(found, queries + work.keys * item * 2 * (q + kv))  # of keys and values, by query head and summed
    if work.base == "full":  # a matrix's gradient as it is formed
        found += 2 * wide * hidden * item
    return found


def _is_gain(name: str) -> bool:
    return name.endswith("norm.weight")

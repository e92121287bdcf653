"""The engine's eager path on a GPU, in bf16, with LoRA and noise, judged by the packed forward in float32."""

import random
from pathlib import Path

import pytest
import torch

from qerl.engine.engine import Engine
from qerl.model.adapter import LoraSettings, add_lora, load_adapter, save_adapter
from qerl.model.loader import load
from qerl.model.noise import set_noise
from qerl.model.packing import next_tokens, pack
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES
from qerl.records import Completion, Request, Sampling
from tests.model.test_adapter import shake
from tests.quant.test_convert import run as quantize

pytestmark = pytest.mark.gpu


def packed_log_probs(model, prompts: list[tuple[int, ...]], done: list[Completion]) -> torch.Tensor:
    packed = pack([[*prompts[c.request], *c.token_ids] for c in done], "cuda")
    places, targets = next_tokens(packed)
    with torch.no_grad():
        logp, _ = model.logprobs(model(packed, noise=True)[places], targets, 0.9)
    parts = logp.split([length - 1 for length in packed.lengths])
    return torch.cat([part[len(prompts[c.request]) - 1 :] for part, c in zip(parts, done, strict=True)]).cpu()


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
@pytest.mark.parametrize("blocks", [70, 2000])
def test_behaviour_log_probs_err_at_most_twice_as_much_as_the_packed_forward(
    tmp_path: Path, base: str, blocks: int
) -> None:
    random.seed(0)
    write_random_checkpoint(SHAPES["tiny"], tmp_path / "bf16")
    if base != "bf16":
        quantize(tmp_path / "bf16", tmp_path / base, base)
    model = load(str(tmp_path / base), base=base, device="cuda")
    exact = load(str(tmp_path / base), base=base, device="cuda", dtype=torch.float32)
    add_lora(model, LoraSettings(r=8, train_norms=True))
    shake(model)
    save_adapter(model, tmp_path / "adapter")
    load_adapter(exact, tmp_path / "adapter")
    for one in (model, exact):
        set_noise(one, 0.02, torch.Generator().manual_seed(3))
    prompts = [tuple(random.randrange(4096) for _ in range(random.randrange(1, 150))) for _ in range(8)]
    requests = [Request(i, prompt, 4) for i, prompt in enumerate(prompts)]
    engine = Engine(model, num_blocks=blocks, block_size=16, token_budget=300)
    done = engine.generate(requests, Sampling(max_tokens=60, temperature=0.9, noise=True))
    again = Engine(model, num_blocks=blocks, block_size=16, token_budget=300).generate(
        requests, Sampling(max_tokens=60, temperature=0.9, noise=True)
    )
    assert [c.token_ids for c in done] == [c.token_ids for c in again]
    behaviour = torch.tensor([p for c in done for p in c.policy_logprobs])
    truth, packed = packed_log_probs(exact, prompts, done), packed_log_probs(model, prompts, done)
    assert (behaviour - truth).abs().max() <= 2 * (packed - truth).abs().max()
    assert (behaviour - truth).square().mean() <= 4 * (packed - truth).square().mean()

"""TRL's GRPOTrainer as a judge: its loss on given log-probs, and its advantages on given rewards."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.conftest import tiny_model


def trainer(tmp_path: Path, tokenizer: Any, rewards: Any = None, **options: Any) -> GRPOTrainer:
    settings = {
        "output_dir": str(tmp_path / "trl"),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
    }
    made = GRPOTrainer(
        model=tiny_model("llama", torch.float32),
        reward_funcs=rewards or (lambda completions, **kwargs: [0.0] * len(completions)),
        args=GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_list([{"prompt": "abc"}, {"prompt": "hello"}] * 8),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    return made


def loss_and_gradient(
    judge: GRPOTrainer,
    logp_BT: torch.Tensor,
    old_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    ref_BT: torch.Tensor | None,
    weight_BT: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 in, float64 out."""
    leaf = logp_BT.clone().requires_grad_()
    judge._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None)
    inputs = {
        "prompt_ids": torch.ones(len(leaf), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(leaf), 2, dtype=torch.int64),
        "completion_ids": torch.ones(leaf.shape, dtype=torch.int64),
        "completion_mask": mask_BT.to(torch.int64),
        "advantages": advantage_B,
        "old_per_token_logps": old_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    if ref_BT is not None:
        inputs["ref_per_token_logps"] = ref_BT
    if weight_BT is not None:
        judge.use_vllm, judge.vllm_importance_sampling_correction = True, True
        inputs["importance_sampling_ratio"] = weight_BT
    loss = judge._compute_loss(judge.model.train(), inputs)
    loss.backward()
    return loss.detach(), leaf.grad

"""Tiny checkpoints, made by transformers itself, and a small tokenizer."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"head_dim": 16, "sliding_window": None}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": False}),
}


def tiny_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> transformers.PreTrainedModel:
    config_class, model_class, extra = FAMILIES[family]
    settings = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**(settings | extra | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype).eval()


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """make_checkpoint(family, dtype, **config changes) -> folder saved by transformers."""

    def make(
        family: str = "qwen2", dtype: torch.dtype = torch.bfloat16, shard: str = "50GB", **changes: object
    ) -> Path:
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        tiny_model(family, dtype, **changes).save_pretrained(folder, max_shard_size=shard)
        return folder

    return make


@pytest.fixture
def add_tokenizer() -> Callable[[Path], None]:
    """Put a byte-level tokenizer with a chat template into a checkpoint folder."""

    def add(folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:250]
        vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: i + 3 for i, letter in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        )
        fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        fast.save_pretrained(folder)

    return add


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """command("quantize", ...): the `qerl` command in this process, which spares it the imports of another. What would
    end in a traceback fails the test."""
    from qerl.cli import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["qerl", *map(str, words)])
        before, status = signal.getsignal(signal.SIGTERM), 0
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, said.out, said.err)

    return run


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Change keys of a checkpoint's config.json."""

    def edit(folder: Path, **changes: object) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit

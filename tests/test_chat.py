import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qerl.chat import Chat
from qerl.records import Sampling
from tests.conftest import Command


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None]) -> Path:
    path = make_checkpoint("llama", torch.float32)
    add_tokenizer(path)
    return path


def test_a_conversation_goes_on_from_what_was_said(folder: Path) -> None:
    chat = Chat(str(folder), "bf16", device="cpu", system="be kind", sampling=Sampling(max_tokens=9, temperature=0))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = "system: be kind\n"
    for line in ("hello", "again"):
        pieces: list[str] = []
        answer = chat.say(line, pieces.append)
        assert answer.startswith("".join(pieces))
        said += f"user: {line}\n"
        ids = tokenizer(said, return_tensors="pt", add_special_tokens=False)["input_ids"]
        judge = model.generate(ids, do_sample=False, max_new_tokens=9, eos_token_id=2, pad_token_id=0)
        assert answer == tokenizer.decode(judge[0, ids.shape[1] :], skip_special_tokens=True)
        said += f"assistant: {answer}\n"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(ValueError, match=r"context is 128.*/new"):
        chat.say("x" * 200, pieces.append)
    chat.restart()
    assert len(chat.messages) == 1


def test_the_command_reads_lines_and_ends_in_json(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/new\nbye\n/quit\n"))
    done = command("chat", "--model", folder, "--base", "bf16", "--max-tokens", "5")
    assert json.loads(done.stdout.splitlines()[-1]) == {"turns": 2}, done.stderr

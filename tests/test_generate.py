import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qerl.generate import encode, read_prompts, stop_ids
from tests.test_cli import last_json, qerl_command


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None]) -> Path:
    path = make_checkpoint("llama", torch.float32)
    add_tokenizer(path)
    return path


def test_the_command_gives_what_transformers_generates(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": [{"role": "user", "content": "hello"}]}\n')
    done = qerl_command(
        *("generate", "--model", folder, "--file", tmp_path / "prompts.jsonl", "--base", "bf16", "--dtype", "float32"),
        *("--max-tokens", 12, "--temperature", 0, "--n", 2, "--out", tmp_path / "rows.jsonl"),
    )
    assert last_json(done)["prompts"] == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in zip(rows, ("abc", "user: hello\n"), strict=True):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        judge = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        assert len(row["completions"]) == 2
        for completion in row["completions"]:
            assert completion["token_ids"] == judge.tolist()
            assert completion["text"] == tokenizer.decode(judge, skip_special_tokens=True)
            assert len(completion["logprobs"]) == len(judge)
            assert completion["finish_reason"] in ("stop", "length")


def test_messages_go_through_the_template_without_a_second_bos(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    ids = encode(tokenizer, [{"role": "user", "content": "x"}])
    assert list(ids).count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "x"}])


def test_all_eos_ids_of_the_generation_config_stop(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 9]}))
    assert stop_ids(folder, transformers.AutoTokenizer.from_pretrained(folder)) == (2, 7, 9)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("", "holds no prompts"),
        ("{x", "line 1, is not JSON"),
        ('{"text": "x"}', "has no `prompt`"),
    ):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / "p.jsonl")
    done = qerl_command("generate", "--model", tmp_path)
    assert done.returncode == 2
    assert "either --prompt TEXT or --file" in done.stderr

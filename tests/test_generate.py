import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qerl.errors import Interrupted
from qerl.generate import Generation, Job, encode, read_prompts, stop_ids
from qerl.records import Sampling
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


def test_a_bad_prompt_is_refused_with_the_reason_and_the_others_are_served(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "abc"}, {"prompt": ""}, {"prompt": "x" * 200}, {"prompt": "abd"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("generate", "--model", folder, "--base", "bf16", "--max-tokens", 5, "--cache-blocks", 9)
    done = qerl_command(*words, "--file", tmp_path / "p.jsonl", "--out", tmp_path / "out.jsonl")
    result = last_json(done)
    assert (result["prompts"], result["refused"], result["cache_blocks"]) == (4, 2, 9)
    assert "1 of 4 prompts were refused" in done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in out] == [row["prompt"] for row in rows]
    assert [len(row["completions"]) for row in out] == [1, 0, 0, 1]
    assert "at least one token" in out[1]["error"]
    assert "context is 128" in out[2]["error"]
    alone = qerl_command(*words, "--prompt", "")
    assert alone.returncode == 2
    assert "at least one token" in alone.stderr


def test_an_interrupt_keeps_the_rows_that_are_complete(folder: Path) -> None:
    job = Job(str(folder), ["abc", "abd", "abe"], samples=2, base="bf16", device="cpu")
    generation = Generation(job, lambda stop: Sampling(max_tokens=20, stop_ids=stop))
    counts = []

    def on_done() -> None:
        counts.append(1)
        if len(counts) == 4:
            raise KeyboardInterrupt

    rows = []
    stream = generation.rows(lambda n: None, on_done)
    with pytest.raises(Interrupted, match="3 of 6 completions are complete"):
        rows.extend(stream)
    assert sum(len(row["completions"]) for row in rows) == 3

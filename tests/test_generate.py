import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from qerl.generate import Generation, Job, encode, load_tokenizer, read_prompts, stop_ids
from qerl.records import Sampling
from tests.conftest import Command
from tests.test_cli import last_json


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None]) -> Path:
    path = make_checkpoint("llama", torch.float32)
    add_tokenizer(path)
    return path


def test_the_command_gives_what_transformers_generates(folder: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": [{"role": "user", "content": "hello"}]}\n')
    done = command(
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


def test_an_fp8_cache_is_an_option(folder: Path, command: Command) -> None:
    words = ("generate", "--model", folder, "--base", "bf16", "--prompt", "abc", "--max-tokens", 5, "--kv-cache-dtype")
    assert last_json(command(*words, "fp8"))["tokens"] > 0
    wrong = command(*words, "int8")
    assert wrong.returncode == 2
    assert (
        wrong.stderr == "error: There is no kv_cache_dtype 'int8'; choose one of auto, fp8, fp8_e4m3.\n"
    )  # no Loading


def test_sampling_takes_only_the_likeliest_tokens_if_asked(folder: Path, tmp_path: Path, command: Command) -> None:
    words = ("generate", "--model", folder, "--base", "bf16", "--dtype", "float32", "--prompt", "abc", "--max-tokens")

    def tokens(name: str, *asked: object) -> list[int]:
        command(*words, 8, *asked, "--out", tmp_path / name)
        return json.loads((tmp_path / name).read_text())["completions"][0]["token_ids"]

    greedy = tokens("greedy", "--temperature", 0)
    assert tokens("k", "--top-k", 1) == tokens("p", "--top-p", 1e-6) == greedy != tokens("all")
    assert tokens("m", "--min-p", 1) == greedy
    wrong = command(*words, 8, "--top-p", 0)
    assert wrong.stderr == "error: top_p must be above 0 and at most 1.\n"  # no Loading
    idle = command(*words, 8, "--top-p", 0.9, "--temperature", 0)
    assert idle.stderr.startswith("error: At temperature 0 the likeliest token is taken")


def test_an_unknown_base_is_refused_before_anything_is_looked_for() -> None:
    with pytest.raises(ValueError, match="There is no base 'int8'; choose one of bf16, nvfp4, mxfp4, nf4"):
        Job("nobody/no-such-model", ["abc"], 1, "int8")


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


def test_a_prompt_may_hold_any_character_that_json_allows(tmp_path: Path) -> None:
    prompts = ["one\u2028line", "and\x85another", "a"]
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    assert read_prompts(tmp_path / "p.jsonl") == prompts


def test_a_folder_that_is_no_adapter_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    job = Job(str(folder), ["abc"], 1, "bf16", adapter=tmp_path / "none", device="cpu")
    with pytest.raises(ValueError, match=r"There is no folder .*none\. An adapter is RUN/adapter"):
        Generation(job, lambda ends: Sampling(max_tokens=1, stop_ids=ends))


def test_half_a_tokenizer_is_refused_by_its_folder(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{cut off")
    with pytest.raises(ValueError, match=f"can't read the tokenizer in {folder}"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()  # its settings alone would make one without words
    assert (folder / "tokenizer_config.json").exists()
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(folder)


def test_bad_input_is_refused(tmp_path: Path, command: Command) -> None:
    for text, message in (
        ("", "holds no prompts"),
        ("{x", "line 1: not JSON"),
        ('{"text": "x"}', "has no `prompt`"),
        ('{"prompt": "a"}\n{"prompt": []}', "line 2: messages are a list"),
        ('{"prompt": [{"role": "user"}]}', "line 1: messages are a list"),
    ):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / "p.jsonl")
    done = command("generate", "--model", tmp_path)
    assert done.returncode == 2
    assert "either --prompt TEXT or --file" in done.stderr


def test_a_bad_prompt_is_refused_with_the_reason_and_the_others_are_served(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    rows = [{"prompt": "abc"}, {"prompt": ""}, {"prompt": "x" * 200}, {"prompt": "abd"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("generate", "--model", folder, "--base", "bf16", "--max-tokens", 5, "--cache-blocks", 9)
    done = command(*words, "--file", tmp_path / "p.jsonl", "--out", tmp_path / "out.jsonl")
    result = last_json(done)
    assert (result["prompts"], result["refused"], result["cache_blocks"]) == (4, 2, 9)
    assert "1 of 4 prompts were refused" in done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in out] == [row["prompt"] for row in rows]
    assert [len(row["completions"]) for row in out] == [1, 0, 0, 1]
    assert "at least one token" in out[1]["error"]
    assert "context is 128" in out[2]["error"]
    alone = command(*words, "--prompt", "")
    assert alone.returncode == 2
    assert "at least one token" in alone.stderr


def test_a_ctrl_c_keeps_the_rows_that_are_complete(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "abc"}, {"prompt": "abd" * 30}] * 400
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "--model", folder, "--base", "bf16", "--max-tokens", "90", "--cache-blocks", "12"]
    out = tmp_path / "out.jsonl"
    words = ["qerl", *map(str, words), "--file", str(tmp_path / "p.jsonl"), "--out", str(out)]
    # Where tests run in the background Python starts with SIGINT ignored; the command must take it all the same.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv = {words!r}; from qerl.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        time.sleep(0.1)
        if out.exists() and out.read_text().count("\n") >= 3:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(kept) == len(rows)  # row k is prompt k, also where it is missing
    complete = [row for row in kept if "missing" not in row]
    assert 3 <= len(complete) < len(rows)
    assert all(row["missing"] == 1 and not row["completions"] for row in kept if row not in complete)
    assert f"{len(complete)} of {len(rows)} completions are complete; they were kept" in " ".join(errors.split())


def test_what_is_complete_out_of_order_comes_after_an_interrupt(folder: Path) -> None:
    job = Job(str(folder), ["abc", "abd", "abe"], samples=2, base="bf16", device="cpu")
    generation = Generation(job, lambda stop: Sampling(max_tokens=20, stop_ids=stop))

    def on_done() -> None:
        if sum(map(len, generation.done.values())) == 4:
            raise KeyboardInterrupt

    rows: list[dict] = []
    with pytest.raises(KeyboardInterrupt):
        rows.extend(generation.rows(lambda n: None, on_done))
    rows.extend(generation.rest(len(rows)))
    assert sum(len(row["completions"]) for row in rows) == 4
    generation.engine.sleep()  # the stream is closed

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from qerl.engine.engine import Engine
from qerl.generate import stop_ids
from qerl.model.decoder import Decoder
from qerl.model.loader import BASES, load
from qerl.model.packing import pack
from qerl.records import Request, Sampling
from qerl.tasks.arithmetic import LEVELS, accuracy, distinct, problem, worked, works
from qerl.tiny import make, tiny_model_folder

MAX_TOKENS = 48


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make such small work slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokenizer_of(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(folder)


def greedy(model: Decoder, prompts: list[str]) -> list[str]:
    folder = tiny_model_folder()
    tokenizer = tokenizer_of(folder)
    requests = [Request(i, tuple(tokenizer(prompt)["input_ids"])) for i, prompt in enumerate(prompts)]
    engine = Engine(model, 5 * len(prompts), 16, tokenizer=tokenizer)
    sampling = Sampling(MAX_TOKENS, temperature=0.0, stop_ids=stop_ids(folder, tokenizer))
    return [done.text for done in engine.generate(requests, sampling)]


def test_the_shipped_folder_is_small_and_loads_in_transformers() -> None:
    folder = tiny_model_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = tokenizer_of(folder)
    assert model.dtype == torch.bfloat16
    assert 2e6 < model.num_parameters() < 3e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.vocab_size % 16 == 0
    assert all(m.in_features % 64 == 0 for m in model.modules() if isinstance(m, torch.nn.Linear))


def test_the_tokenizer_gives_texts_back_and_they_fit() -> None:
    tokenizer = tokenizer_of(tiny_model_folder())
    for index in range(100):
        one = problem(0, index, LEVELS)
        prompt, completion = (tokenizer(text)["input_ids"] for text in (one.prompt, worked(one)))
        assert len(prompt) <= 16
        assert len(completion) < MAX_TOKENS
        ids = [*prompt, *completion, tokenizer.eos_token_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == one.prompt + worked(one)
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "1+1="
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


@pytest.mark.parametrize("base", BASES)
def test_it_loads_on_every_base(base: str, tmp_path: Path) -> None:
    model = load(str(tiny_model_folder()), base=base, device="cpu", cache_dir=tmp_path)
    tokens = pack([tokenizer_of(tiny_model_folder())("34+58=")["input_ids"]], model.device)
    with torch.no_grad():
        assert model(tokens).isfinite().all()


def test_greedy_decoding_answers_at_once_and_is_right_in_the_middle(tmp_path: Path) -> None:
    model = load(str(tiny_model_folder()), base="nvfp4", device="cpu", cache_dir=tmp_path)
    problems = distinct(200, 0)
    texts = greedy(model, [one.prompt for one in problems])
    right = [accuracy(text, one.answer) for text, one in zip(texts, problems, strict=True)]
    assert 0.2 < sum(right) / len(right) < 0.6
    assert sum(works(text) for text in texts) < 0.2 * len(texts)


def test_the_script_writes_a_folder_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["make", str(out), "--steps", "2", "--seed", "3"])
    monkeypatch.setattr(make, "EVALUATED", 4)
    make.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 2
    assert set(result["greedy"]) == set(result["worked"]) == {"2", "3", "4"}
    assert list(tmp_path.iterdir()) == [out]
    shipped = tiny_model_folder()
    assert {path.name for path in out.iterdir()} == {path.name for path in shipped.iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((shipped / name).read_text())
    transformers.AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(SystemExit):
        make.main()
    assert "exists" in capsys.readouterr().err


def test_training_stops_where_direct_answers_are_good_enough() -> None:
    tokenizer = make.build_tokenizer()
    recipe = make.Recipe(steps=5, batch=4, direct_accuracy=-1.0, check_every=2, checked=4)
    assert make.train(make.build_model(tokenizer, 0), tokenizer, 0, recipe, lambda loss: None) == 2


def test_direct_accuracy_is_what_greedy_decoding_gets_right() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_folder(), dtype=torch.float32)
    problems = distinct(make.EVALUATED, 0, (3,))
    tokenizer = tokenizer_of(tiny_model_folder())
    assert make.direct_accuracy(model, tokenizer, problems) == make.greedy_accuracy(model, tokenizer, 3, "<answer>")

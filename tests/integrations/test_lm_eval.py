"""Our lm-eval model against lm-eval's own `hf` on the same weights, in float32."""

import json
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qerl.bench.parity import compare
from qerl.cli import app
from qerl.model.adapter import add_lora, save_adapter, trained_parameters
from qerl.model.layers import LoraSettings
from qerl.model.loader import load
from qerl.tasks.arithmetic import distinct
from qerl.tiny import tiny_model_folder

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from qerl.integrations.lm_eval import QerlLM  # noqa: E402

CONTEXT = 96


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None]) -> Path:
    # As many tokens as the tokenizer has: with an adapter, lm-eval cuts the head to that size.
    changes = {"max_position_embeddings": CONTEXT, "initializer_range": 0.3, "vocab_size": 253}
    path = make_checkpoint("llama", torch.float32, **changes)
    add_tokenizer(path)
    return path


@pytest.fixture
def both(folder: Path) -> tuple[QerlLM, HFLM]:
    ours = QerlLM(str(folder), base="bf16", dtype="float32", device="cpu")
    return ours, HFLM(str(folder), dtype="float32", device="cpu", batch_size=3)


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_loglikelihoods_equal_hf(both: tuple[QerlLM, HFLM]) -> None:
    pairs = [
        ("The sky is", " blue"),
        ("The sky is", " green"),
        ("The sky is", "x"),  # one-token continuations share a forward
        ("The sky is", "y"),
        ("with a space at the end ", "then this"),
        ("", "no context at all"),
        ("a context that is too long " * 8, "keeps its end"),
    ]
    pairs += [(context, letter) for context in "abcdef" for letter in string.printable[:94]]
    ours, judge = (lm.loglikelihood(instances("loglikelihood", pairs)) for lm in both)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in judge], rel=1e-5, abs=1e-4)
    assert [one for _, one in ours] == [one for _, one in judge]
    assert any(greedy for _, greedy in ours)


def test_rolling_loglikelihoods_equal_hf_over_several_windows(both: tuple[QerlLM, HFLM]) -> None:
    texts = [("short",), ("longer than the context is " * 10,)]
    ours, judge = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for lm in both)
    assert ours == pytest.approx(judge, rel=1e-5)


def test_generation_equals_hf_with_stop_strings_and_long_prompts(both: tuple[QerlLM, HFLM]) -> None:
    (free,) = both[1].generate_until(instances("generate_until", [("abc", {"until": [], "max_gen_toks": 24})]))
    middle = free[10:12]
    asked = [
        ("abc", {"until": [], "max_gen_toks": 24}),
        ("abc", {"until": [middle], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}),
        ("something else", {"until": ["</s>", "Q:"], "max_gen_toks": 16}),
        ("a prompt that is too long " * 8, {"until": [], "max_gen_toks": 16}),
    ]
    ours, judge = (lm.generate_until(instances("generate_until", asked)) for lm in both)
    assert ours == judge
    assert ours[1] == free[: free.find(middle)]
    assert len(ours[1]) < len(ours[0])


def test_sampling_is_ours_and_unknown_settings_are_refused(both: tuple[QerlLM, HFLM]) -> None:
    ours, _ = both
    hot = {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0}
    one, other = ours.generate_until(instances("generate_until", [("abc", hot), ("abc", hot)]))
    assert one != other  # repeats of a question are different draws
    assert [one, other] == ours.generate_until(instances("generate_until", [("abc", hot), ("abc", hot)]))
    with pytest.raises(ValueError, match="num_beams"):
        ours.generate_until(instances("generate_until", [("abc", {"until": [], "num_beams": 4})]))
    with pytest.raises(ValueError, match="ask for fewer"):
        ours.generate_until(instances("generate_until", [("abc", {"until": [], "max_gen_toks": CONTEXT})]))


def test_an_adapter_applies_norms_included(folder: Path, both: tuple[QerlLM, HFLM], tmp_path: Path) -> None:
    model = load(str(folder), "bf16", "cpu", "float32")
    add_lora(model, LoraSettings(r=4, lora_alpha=8, train_norms=True))
    with torch.no_grad():
        for i, value in enumerate(trained_parameters(model).values()):
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(i)), alpha=0.1)
    save_adapter(model, tmp_path / "adapter", base_model=str(folder))
    ours = QerlLM(str(folder), "bf16", str(tmp_path / "adapter"), "float32", "cpu")
    judge = HFLM(str(folder), peft=str(tmp_path / "adapter"), dtype="float32", device="cpu")
    asked = instances("loglikelihood", [("The sky is", " blue")])
    (found,), (right,), (plain,) = (lm.loglikelihood(asked) for lm in (ours, judge, both[0]))
    assert found[0] == pytest.approx(right[0], rel=1e-5)
    assert found[0] != pytest.approx(plain[0], rel=1e-3)


def test_lm_evals_tasks_score_the_same_with_qerl_and_hf(folder: Path, tmp_path: Path) -> None:
    """A multiple-choice task and a perplexity, from YAML and local data, by the registered name."""
    rows = [{"q": f"{a} plus {a} is", "choices": [" two", " four", " a lot"], "label": a % 3} for a in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
"""
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\noutput_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\ndoc_to_choice: choices\n"
        f"doc_to_target: label\nmetric_list: [{{metric: acc}}, {{metric: acc_norm}}]{shared}"
    )
    (tmp_path / "rolling.yaml").write_text(
        "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\n"
        f"metric_list: [{{metric: word_perplexity}}]{shared}"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    arguments = {"pretrained": str(folder), "dtype": "float32"}
    scores = []
    for name, extra in (("qerl", {"base": "bf16"}), ("hf", {})):
        found = lm_eval.simple_evaluate(
            model=name,
            model_args=arguments | extra,
            tasks=["choice", "rolling"],
            device="cpu",
            batch_size=4,
            task_manager=manager,
            bootstrap_iters=0,
        )
        scores.append(
            [found["results"]["choice"][f"{metric},none"] for metric in ("acc", "acc_norm")]
            + [found["results"]["rolling"]["word_perplexity,none"]]
        )
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_lm_evals_default_device_is_the_cpu_and_model_args_may_name_one(folder: Path) -> None:
    words = f"pretrained={folder},base=bf16,dtype=float32"
    assert QerlLM.create_from_arg_string(words, {"device": "cuda:0", "batch_size": 1}).device.type == "cpu"
    assert QerlLM.create_from_arg_string(f"{words},device=cpu", {"device": "cuda:7"}).device.type == "cpu"
    with pytest.raises(ValueError, match="no device cuda:7"):
        QerlLM.create_from_arg_string(words, {"device": "cuda:7"})


def test_model_args_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="model_args has no peft; there are pretrained, base, adapter"):
        QerlLM.create_from_arg_obj({"pretrained": "nowhere", "peft": "x"}, {"device": "cpu"})
    with pytest.raises(ValueError, match="must name the model"):
        QerlLM.create_from_arg_string("base=bf16", None)


def test_the_command_is_lm_evals_own_with_our_model_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command writes there; put back afterwards
    done = CliRunner().invoke(app, ["lm-eval", "--help"])
    assert done.exit_code == 0
    assert "Language Model Evaluation Harness" in done.stdout
    assert get_model("qerl") is QerlLM


def test_our_gsm8k_score_equals_lm_evals(tmp_path: Path) -> None:
    """Sums in GSM8K's form, which the shipped model can do some of: prompts, texts and scores are lm-eval's."""
    sums = distinct(16, 7, (2, 3))
    rows = [{"question": one.prompt, "answer": f"So it is.\n#### {one.answer}"} for one in sums]
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(compare(str(tiny_model_folder()), tmp_path, 12, 24, 4, lambda text: None, system_prompt=""))
    assert [row["road"] for row in found] == ["qerl eval", "lm-eval qerl", "lm-eval hf"]
    assert len({row["accuracy"] for row in found}) == 1
    assert 0 < found[0]["accuracy"] < 1
    assert found[1]["exact_match"] == found[2]["exact_match"] == found[0]["accuracy"]
    for row in found:
        assert (row["questions"], row["other_prompts"], row["other_texts"], row["other_scores"]) == (12, 0, 0, 0)

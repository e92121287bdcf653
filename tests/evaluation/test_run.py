import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl.cli import app
from qerl.evaluation.compare import changed_settings, compare
from qerl.evaluation.job import Job
from qerl.evaluation.results import read_samples, samples_file
from qerl.evaluation.run import Evaluation, evaluate
from qerl.generate import load_tokenizer
from qerl.model.adapter import add_lora, save_adapter, trained_parameters
from qerl.model.layers import LoraSettings
from qerl.model.loader import load
from qerl.model.packing import pack
from qerl.tasks.arithmetic import problem
from qerl.tasks.sandbox import sandbox_available
from qerl.tiny import tiny_model_folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other make such small work slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The shipped model on sums; what it says at once is right for about a third."""
    return Job(
        model="tiny",
        tasks=("arithmetic",),
        base="bf16",
        dtype="float32",
        device="cpu",
        limit=24,
        max_tokens=64,
        out=tmp_path / "results",
        workers=1,
    )


def save_trained(folder: Path) -> Path:
    """An adapter whose model begins to work a sum out, which it does rightly once it has begun: LoRA trained on that
    one token, for a few steps."""
    model, tokenizer = load("tiny", "bf16", "cpu", "float32"), load_tokenizer(tiny_model_folder())
    add_lora(model, LoraSettings(r=4, lora_alpha=8))
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=0.005)
    think = torch.full((16,), tokenizer.convert_tokens_to_ids("<think>"))
    for step in range(5):
        packed = pack([tokenizer(problem(1, 16 * step + i).prompt)["input_ids"] for i in range(16)])
        logprobs, _ = model.logprobs(model(packed)[packed.bounds_S1[1:].long() - 1], think)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    save_adapter(model, folder)
    return folder


def test_an_adapter_moves_the_score(job: Job, tmp_path: Path) -> None:
    adapter = save_trained(tmp_path / "adapter")
    before = evaluate(job)["tasks"]["arithmetic"]["pass@1"]
    after = evaluate(replace(job, adapter=adapter, out=tmp_path / "adapted"))["tasks"]["arithmetic"]["pass@1"]
    assert before["value"] < 0.6
    assert after["value"] > 0.8
    (found,) = compare(tmp_path / "results", tmp_path / "adapted")
    assert found.difference.value == pytest.approx(after["value"] - before["value"])
    assert found.difference.low > 0
    assert found.difference.p_value < 0.05
    assert found.better - found.worse == round(24 * found.difference.value)
    assert changed_settings(tmp_path / "results", tmp_path / "adapted")["adapter"] == (None, str(adapter))


def test_the_trained_norms_of_an_adapter_move_the_score_by_themselves(job: Job, tmp_path: Path) -> None:
    model = load("tiny", "bf16", "cpu", "float32")
    add_lora(model, LoraSettings(r=4, lora_alpha=8, train_norms=True))  # fresh LoRA changes nothing
    save_adapter(model, tmp_path / "fresh")
    with torch.no_grad():
        for name, value in trained_parameters(model).items():
            if "norm" in name:
                value.mul_(0.3)
    save_adapter(model, tmp_path / "norms")
    scores = {
        name: evaluate(replace(job, adapter=name and tmp_path / name, out=tmp_path / f"results-{name}"))
        for name in (None, "fresh", "norms")
    }
    value = {name: found["tasks"]["arithmetic"]["pass@1"]["value"] for name, found in scores.items()}
    assert value["fresh"] == value[None] > 0.2
    assert value["norms"] < 0.1


def test_filters_reach_the_sampler_and_make_another_evaluation(job: Job) -> None:
    job = replace(job, limit=6)
    evaluate(job)
    likeliest = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
    jobs = [replace(job, temperature=1.0, out=job.folder() / name, **{name: by}) for name, by in likeliest.items()]
    for filtered in jobs:
        evaluate(filtered)
    said, *others = (
        [line["completion"] for line in read_samples(samples_file(one.folder(), "arithmetic")).values()]
        for one in (job, *jobs)
    )
    assert others == [said] * 3
    assert len({replace(one, out=None).folder() for one in (job, *jobs)}) == 4


def test_samples_and_scores_of_k(job: Job) -> None:
    job = replace(job, k=4, temperature=1.0, limit=8)
    results = evaluate(job)
    lines = read_samples(samples_file(job.folder(), "arithmetic"))
    assert sorted(lines) == [(i, sample) for i in range(8) for sample in range(4)]
    for line in lines.values():
        assert line["score"] == float(line["answer"] == line["right"] and line["completion"].endswith("</answer>"))
        assert line["finish_reason"] in ("stop", "length")
        assert 0 < line["tokens"] <= 64
    scores = results["tasks"]["arithmetic"]
    assert scores["pass@1"]["value"] == pytest.approx(sum(line["score"] for line in lines.values()) / 32)
    assert scores["pass@1"]["value"] <= scores["pass@2"]["value"] <= scores["pass@4"]["value"]
    solved = {i for (i, _), line in lines.items() if line["score"]}
    assert scores["pass@4"]["value"] == len(solved) / 8
    assert 0 <= scores["maj@4"]["value"] <= scores["pass@4"]["value"]
    assert json.loads((job.folder() / "results.json").read_text()) == json.loads(json.dumps(results))


def test_what_was_broken_off_goes_on_and_nothing_is_lost(job: Job, tmp_path: Path) -> None:
    whole = evaluate(replace(job, k=2, temperature=1.0, out=tmp_path / "whole"))
    broken = replace(job, k=2, temperature=1.0)
    with Evaluation(broken) as evaluation, closing(evaluation.samples()) as lines:
        next(lines)
    path = samples_file(broken.folder(), "arithmetic")
    kept = len(read_samples(path))
    assert 16 < kept < 48  # what had been sampled was graded and written, also what nobody had asked for yet
    path.write_text(path.read_text() + '{"task": "arith')  # a line that a crash cut short
    with Evaluation(broken) as evaluation:
        assert evaluation.missing == 48 - kept
        assert len(list(evaluation.samples())) == 48 - kept
        assert evaluation.results()["tasks"] == whole["tasks"]
        assert list(evaluation.samples()) == []
    again = read_samples(samples_file(tmp_path / "whole", "arithmetic"))
    assert {key: line["completion"] for key, line in read_samples(path).items()} == {
        key: line["completion"] for key, line in again.items()
    }


def test_another_task_adds_to_a_folder_of_results(job: Job) -> None:
    small = replace(job, limit=2, max_tokens=8)
    before = evaluate(small)["tasks"]["arithmetic"]
    with Evaluation(replace(small, tasks=("arithmetic", "countdown"))) as more:
        assert {line["task"] for line in more.samples()} == {"countdown"}
        assert more.results()["tasks"]["arithmetic"] == before


def test_other_settings_do_not_mix_into_a_folder_of_results(job: Job, tmp_path: Path) -> None:
    small = replace(job, limit=2, max_tokens=8)
    evaluate(small)
    with pytest.raises(ValueError, match="another max_tokens"), Evaluation(replace(small, max_tokens=9)):
        pass
    with Evaluation(replace(small, limit=3)) as more:
        assert more.missing == 1
        with pytest.raises(ValueError, match="Another process"), Evaluation(small):
            pass
    path = samples_file(small.folder(), "arithmetic")
    path.write_text(path.read_text().replace("+", "-"))
    with pytest.raises(ValueError, match="other questions"), Evaluation(small):
        pass
    assert replace(small, out=None).folder() != replace(small, out=None, max_tokens=9).folder()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 2}, "give a temperature"),
        ({"tasks": ()}, "one or more tasks"),
        ({"tasks": ("gsm8j",)}, "Did you mean gsm8k"),
        ({"adapter": Path("nowhere")}, "There is no folder nowhere"),
        ({"model": "run"}, "name the model it was trained on"),
        ({"tasks": ("mine.jsonl",)}, "brings no reward"),
        ({"tasks": ("mine.jsonl",), "reward": "nothing"}, "no reward 'nothing'"),
        ({"top_p": 2.0, "temperature": 1.0}, "top_p must be"),
        ({"min_p": 0.1}, "whatever the filters: give a temperature"),
        ({"base": "full"}, "There is no base .full.; choose one of bf16"),
    ],
)
def test_bad_jobs_are_refused_before_a_model_is_loaded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=message):
        Evaluation(replace(job, **changes))
    assert not (tmp_path / "results").exists()


def test_scores_of_a_grader_or_data_that_changed_are_not_kept(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    grader, data = tmp_path / "changing_grader.py", tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "12+31=", "answer": "43"}\n{"prompt": "1+1=", "answer": "2"}\n')
    grader.write_text("def always(text, row):\n    return 1.0\n")
    mine = replace(job, tasks=(str(data),), reward="changing_grader:always", limit=None, max_tokens=4)

    def scores() -> tuple[int, list[float], int]:
        """How many were graded, all scores, and how many the grader failed on."""
        with Evaluation(mine) as evaluation:
            monkeypatch.setattr(evaluation, "_engine", None)  # nothing is sampled again
            graded = len(list(evaluation.samples()))
            found = evaluation.results()["tasks"][str(data)]["grading_errors"]
        lines = read_samples(samples_file(mine.folder(), str(data)))
        return graded, [line["score"] for line in lines.values()], found

    evaluate(mine)
    assert scores() == (0, [1.0, 1.0], 0)
    grader.write_text("def always(text, row):\n    return float(row['answer'] == '43')\n")
    assert scores() == (2, [1.0, 0.0], 0)
    data.write_text(data.read_text().replace('"2"', '"43"'))
    assert scores() == (1, [1.0, 1.0], 0)
    grader.write_text("def always(text, row):\n    return 1 / (row['answer'] != '43')\n")
    assert scores() == (2, [0.0, 0.0], 2)
    with Evaluation(mine) as evaluation:
        assert evaluation.missing == evaluation.regraded == 2  # what the grader raised on does not count as done
        list(evaluation.samples())
        assert "division by zero" in evaluation.grading_errors()[str(data)][1]["detail"]


def test_the_default_folder_says_what_is_in_it_and_goes_where_nothing_was_sampled(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = replace(job, out=None, tasks=("a/mine.jsonl", "gsm8k"), k=4, temperature=0.6).folder().name
    assert re.fullmatch(r"tiny-bf16-mine\+gsm8k-t0\.6-[0-9a-f]{8}", name)
    assert "-arithmetic-greedy-" in replace(job, out=None).folder().name
    broken = replace(job, out=None, dtype="float3")
    with pytest.raises(ValueError, match="float3"):
        evaluate(broken)
    assert not broken.folder().exists()


def test_fewer_questions_do_not_replace_the_results_of_more(job: Job) -> None:
    evaluate(replace(job, limit=3, max_tokens=4))
    kept = (job.folder() / "results.json").read_text()
    with pytest.raises(ValueError, match="more samples than are asked for"):
        evaluate(replace(job, limit=2, max_tokens=4))
    assert (job.folder() / "results.json").read_text() == kept
    evaluate(replace(job, limit=2, max_tokens=4, tasks=("countdown",)))
    assert json.loads((job.folder() / "results.json").read_text())["tasks"].keys() == {"arithmetic", "countdown"}


def test_rows_of_ones_own_and_prompts_that_do_not_fit(job: Job, tmp_path: Path) -> None:
    rows = [{"prompt": "12+31=", "answer": "43"}, {"prompt": "1" * 300, "answer": "43"}, {"prompt": "1+1="}]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(replace(job, tasks=(str(file),), reward="math_accuracy"))["tasks"][str(file)]
    assert found["questions"] == 2  # the third has no answer to grade by
    assert found["not_graded"] == 1
    assert found["refused"] == 1
    assert found["pass@1"]["value"] in (0.0, 0.5)


@pytest.mark.skipif(sandbox_available() is not None, reason="no sandbox here")
def test_programs_are_run_and_do_not_vote(job: Job, tmp_path: Path) -> None:
    row = {"task_id": 11, "text": "1", "test_list": ["assert True"], "test_setup_code": ""}
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(row) + "\n")
    code = replace(job, tasks=("mbpp",), data_dir=tmp_path, system_prompt="", k=2, temperature=1.0, max_tokens=4)
    found = evaluate(code)["tasks"]["mbpp"]
    assert "maj@2" not in found
    assert found["pass@2"]["value"] in (0.0, 1.0)  # any text that is Python passes a test that asks for nothing
    lines = read_samples(samples_file(code.folder(), "mbpp"))
    assert all(line["answer"] == line["completion"] for line in lines.values())


def test_the_commands_print_tables_and_end_in_json(tmp_path: Path) -> None:
    words = ["eval", "--model", "tiny", "--task", "arithmetic", "--base", "bf16", "--limit", "4", "--max-tokens", "16"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "a")])
    assert json.loads(done.stdout.splitlines()[-1])["tasks"]["arithmetic"]["questions"] == 4
    assert "pass@1" in done.stdout
    assert "arithmetic" in done.stdout.partition("{")[0]  # whole, on a narrow screen too
    compared = CliRunner().invoke(app, ["eval-compare", str(tmp_path / "a"), str(tmp_path / "a")])
    found = json.loads(compared.stdout.splitlines()[-1])["tasks"]["arithmetic"]
    assert found["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}
    assert "B - A" in compared.stdout
    assert "arithmetic" in compared.stdout.partition("{")[0]

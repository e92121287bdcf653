"""`qerl eval` against lm-eval: the same model, GSM8K questions, prompts and limits, decoded greedily by both.

Three roads: `qerl eval`; lm-eval with our model class; lm-eval with its own `hf` model, which shares no code with us.
Each completion is graded by our GSM8K grader and, on lm-eval's roads, by lm-eval's flexible filter and exact match.
"""

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl.evaluation.job import Job
from qerl.evaluation.questions import load_questions
from qerl.evaluation.results import Line, read_samples, samples_file
from qerl.evaluation.run import evaluate
from qerl.generate import load_tokenizer
from qerl.quant.checkpoint import resolve
from qerl.tasks.math_graders import gsm8k

TASK = "gsm8k"
FLEXIBLE = {  # the last number of the text, as lm-eval's own gsm8k has it
    "name": "flexible",
    "filter": [
        {"function": "regex", "group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"},
        {"function": "take_first"},
    ],
}


def compare(
    model: str,
    data_dir: Path | None,
    limit: int,
    max_tokens: int,
    batch_size: int,
    say: Callable[[str], None],
    system_prompt: str | None = None,
) -> Iterator[dict[str, Any]]:
    """A row a road: its accuracies, and on how many questions its text, its prompt and its score differ from hf's (so
    that rows come at the end; accuracies are said before)."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("There is no lm_eval: pip install 'qerl[eval]'.")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            model=model,
            tasks=(TASK,),
            base="bf16",
            dtype="float32",
            device="cpu",
            limit=limit,
            max_tokens=max_tokens,
            data_dir=data_dir,
            system_prompt=system_prompt,
            out=Path(folder) / "ours",
        )
        say("qerl eval ...")
        evaluate(job)
        lines = read_samples(samples_file(Path(folder) / "ours", TASK))
        ours = [lines[i, 0] for i in range(len(lines))]
        tokenizer = load_tokenizer(resolve(model))
        roads = {"qerl eval": [_ours(line, tokenizer) for line in ours]}
        say(f"accuracy {_accuracy(roads['qerl eval'])}")
        precision = {"pretrained": model, "dtype": "float32", "device": "cpu"}
        for name, arguments in (("qerl", precision | {"base": "bf16"}), ("hf", precision)):
            say(f"lm-eval --model {name} ...")
            found = _lm_eval(job, Path(folder), name, arguments, batch_size)
            for one, line in zip(found, ours, strict=True):
                one["score"] = gsm8k(one["text"], {"answer": line["right"]})
            roads[f"lm-eval {name}"] = found
            say(f"accuracy {_accuracy(found)}")
    judge = roads["lm-eval hf"]
    for road, found in roads.items():
        pairs = list(zip(found, judge, strict=True))
        matched = [one["exact_match"] for one in found if one["exact_match"] is not None]
        yield {
            "model": Path(model).name,
            "max_tokens": max_tokens,
            "road": road,
            "questions": len(found),
            "accuracy": _accuracy(found),
            "exact_match": round(sum(matched) / len(matched), 4) if matched else None,
            "other_prompts": sum(a["prompt"] != b["prompt"] for a, b in pairs),
            "other_texts": sum(a["text"] != b["text"] for a, b in pairs),
            "other_scores": sum(a["score"] != b["score"] for a, b in pairs),
        }


def _accuracy(found: list[dict[str, Any]]) -> float:
    return round(sum(float(one["score"]) for one in found) / len(found), 4)


def _ours(line: Line, tokenizer: Any) -> dict[str, Any]:
    prompt = tokenizer.apply_chat_template(line["prompt"], tokenize=False, add_generation_prompt=True)
    return {"text": line["completion"], "prompt": prompt, "score": line["score"], "exact_match": None}


def _lm_eval(job: Job, folder: Path, name: str, arguments: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """The questions through lm-eval, which makes prompts of them by the chat template itself."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        import qerl.integrations.lm_eval  # noqa: F401 (registers the model)
    except ModuleNotFoundError as error:
        raise ValueError(f"There is no {error.name}: pip install 'qerl[eval]'.") from error

    rows = load_questions(job, TASK).rows
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": r["question"], "answer": r["answer"]}) + "\n" for r in rows))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "max_gen_toks": job.max_tokens, "do_sample": False},
        "filter_list": [FLEXIBLE],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [",", r"\$", r"\.$"],
            }
        ],
    }
    found = simple_evaluate(
        model=name,
        model_args=arguments,
        tasks=[task],
        batch_size=batch_size,
        system_instruction=next((m["content"] for m in rows[0]["prompt"] if m["role"] == "system"), None),
        apply_chat_template=True,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [
        {
            "text": sample["resps"][0][0],
            "prompt": sample["arguments"][0][0],
            "exact_match": sample["exact_match"],
        }
        for sample in samples
    ]

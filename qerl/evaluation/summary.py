"""The samples of a task in a few figures."""

from collections.abc import Sequence
from typing import Any

from qerl.evaluation.estimators import Estimate, estimate, pass_at_k
from qerl.evaluation.results import Line
from qerl.tasks.vote import MAJORITY, plain_majority
from qerl.tasks.workers import Workers


def summary(lines: Sequence[Line], k: int, voters: Workers | None) -> dict[str, Any]:
    """pass@1 averaged over k samples, pass@2, pass@4 .. pass@k, and maj@k where there is somebody to count votes.

    A sample is right if its score is 1 (part marks show in `mean_score` only). Questions that their grader does not
    apply to are left out and counted; a prompt that the engine refused is wrong, and so is a sample that its grader
    failed on (`grading_errors`).
    """
    by_question: dict[int, list[Line]] = {}
    for line in lines:
        by_question.setdefault(line["id"], []).append(line)
    graded = {i: group for i, group in by_question.items() if all(line["score"] is not None for line in group)}
    rights = [sum(right(line) for line in group) for group in graded.values()]
    scores = {f"pass@{j}": estimate([pass_at_k(k, c, j) for c in rights]) for j in _ks(k)}
    if k > 1 and voters is not None:
        scores[f"maj@{k}"] = estimate(_votes(list(graded.values()), voters))
    numbers = [line["score"] for group in graded.values() for line in group]
    return {
        "questions": len(graded),
        "not_graded": len(by_question) - len(graded),
        "grading_errors": sum("grading_error" in line for line in lines),
        "k": k,
        **{name: _columns(found) for name, found in scores.items()},
        "mean_score": sum(numbers) / len(numbers) if numbers else None,
        "mean_tokens": sum(line["tokens"] for line in lines) / len(lines),
        "cut_off": sum(line["finish_reason"] == "length" for line in lines) / len(lines),
        "refused": sum(line["finish_reason"] == "refused" for line in lines),
    }


def right(line: Line) -> bool:
    return line["score"] is not None and line["score"] >= 1.0


def _ks(k: int) -> list[int]:
    """1, 2, 4 .. and k itself."""
    return sorted({1, k} | {2**i for i in range(k.bit_length()) if 2**i <= k})


def _columns(found: Estimate) -> dict[str, float] | None:
    return None if found.value != found.value else {"value": found.value, "low": found.low, "high": found.high}


def _votes(groups: Sequence[Sequence[Line]], voters: Workers) -> list[float]:
    """The score of each question's most frequent answer. Where it can't be told in time which answers are the same, it
    goes by their texts."""
    polls = []
    for group in groups:
        ordered = sorted(group, key=lambda line: line["sample"])
        polls.append({"answers": [line["answer"] for line in ordered], "scores": [float(right(x)) for x in ordered]})
    counted = voters.grade(MAJORITY, [("", poll) for poll in polls])
    return [
        plain_majority(poll["answers"], poll["scores"]) if one.score is None or one.reason else one.score
        for poll, one in zip(polls, counted, strict=True)
    ]

"""Answers that are right and answers that only look it: hand-made cases, reference solutions, hostile texts."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qerl.tasks import math_graders
from qerl.tasks.extract import extract
from qerl.tasks.math_answer import same_answer, too_heavy
from qerl.tasks.number import parse_number
from tests.tasks.references import altered, rows

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES}))
def test_hand_made_cases(kind: str) -> None:
    wrong = []
    for case in (case for case in CASES if case["kind"] == kind):
        grader = getattr(math_graders, case.get("grader", "accuracy"))
        if grader(case["text"], case) != case["right"]:
            wrong.append((case["answer"], case["text"][:100], case["right"]))
    assert not wrong


def test_there_are_hundreds_of_cases_of_both_kinds() -> None:
    right = sum(case["right"] for case in CASES)
    assert right > 300
    assert len(CASES) - right > 300


def check_gsm8k(most: int | None) -> None:
    for row in rows("gsm8k_train", most) + rows("gsm8k_test", most):
        assert math_graders.gsm8k(row["answer"], row) == 1
        assert math_graders.gsm8k(altered(row["answer"]), row) == 0
        number = row["answer"].rpartition("####")[2].strip()
        for form in ("<answer>{}</answer>", "\\boxed{{{}}}", "It makes {} in all.", "Answer: {}", "#### ${}.00"):
            assert math_graders.gsm8k(form.format(number), row) == 1
        assert math_graders.accuracy(f"<think>{number}</think><answer>{number}</answer>", row) == 1


def check_math500(most: int | None) -> None:
    for row in rows("math500_test", most):
        assert math_graders.accuracy(row["solution"], row) == 1, row["answer"]
        assert math_graders.accuracy(f"\\boxed{{{altered(row['answer'])}}}", row) == 0, row["answer"]


def test_reference_solutions_of_gsm8k() -> None:
    check_gsm8k(150)


def test_reference_solutions_of_math500() -> None:
    check_math500(125)


@pytest.mark.slow
def test_all_reference_solutions() -> None:
    check_gsm8k(None)
    check_math500(None)
    for row in rows("math_train"):
        if row["answer"]:
            assert math_graders.accuracy(f"so \\boxed{{{row['answer']}}}", row) == 1, row["answer"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Work.\nAnswer: 34", 1),
        ("Work.\nAnswer: $34$", 1),
        ("Work.\nAnswer: \\boxed{34}\n", 1),
        ("Answer: 33\nAnswer: 34", 1),
        ("<think>Answer: 33</think>Answer: 34.0", 1),
        ("Answer: 34\nAnswer: 33", -1),
        ("\\boxed{34}", -1),
        ("34", -1),
        ("", -1),
        ("<think>Answer: 34", -1),
        ("Answer: 34\n" + "and so on " * 40, -1),
    ],
)
def test_dapo_score(text: str, score: float) -> None:
    assert math_graders.dapo(text, {"answer": "34"}) == score


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": ""}])
def test_a_row_without_an_answer_does_not_apply(row: dict[str, object]) -> None:
    for grader in (math_graders.accuracy, math_graders.gsm8k, math_graders.dapo):
        assert grader("\\boxed{5}", row) is None


@pytest.mark.parametrize(("answer", "text"), [(27.0, "27"), (27, "27.0"), (0.5, "1/2"), ("007", "7")])
def test_an_answer_may_be_a_number(answer: object, text: str) -> None:
    assert math_graders.accuracy(f"\\boxed{{{text}}}", {"answer": answer}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9}}",
        "9^9^9",
        "2**3**4**5",
        "(10^{999})^{999}",
        "10^{99999}",
        "10^{999 \\cdot 999}",
        "10^{100!}",
        "9999!",
        "(9^9)!",
        "\\binom{100000}{50000}",
        "\\sum_{k=1}^{100000} k",
        "{" * 60 + "1" + "}" * 60,
        "x+" * 1000,
        "7" * 500,
    ],
)
def test_what_sympy_would_choke_on_is_not_shown_to_it(text: str) -> None:
    assert too_heavy(text)
    assert not same_answer("x+1", text)
    assert same_answer(text, text)


@pytest.mark.parametrize("text", ["2^{2^{3}}", "e^{-x^{2}}", "x^{100}+y^{100}", "2^{1000}", "(x+1)^{10}", "20!"])
def test_what_it_can_bear_is(text: str) -> None:
    assert not too_heavy(text)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20_000,
        "<answer>" * 50_000,
        "#### " * 50_000,
        "Answer: " * 50_000,
        "the answer is " * 50_000,
        "1," * 100_000,
        "1 " * 100_000,
        "$" * 200_000,
        "**" * 100_000 + "Answer:" + " " * 100_000,
        "<answer>" + "{" * 100_000 + "</answer>",
        "<answer>" + "1 000 " * 30_000 + "x</answer>",
        "\\boxed{" + "\\frac{1}{" * 5_000 + "}" * 5_001,
        "\x00\ud800" * 1000,
    ],
)
def test_hostile_texts_cost_little(text: str) -> None:
    start = time.perf_counter()
    assert math_graders.accuracy(text, {"answer": "\\frac{1}{7}"}) == 0
    assert math_graders.gsm8k(text, {"answer": "12345"}) == 0
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("text", "prose", "answer"),
    [
        ("a \\boxed{\\frac{1}{\\sqrt{2}}} b", False, "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{1} \\boxed{2}", False, "2"),
        ("\\boxed{a\\}b}", False, "a\\}b"),
        ("\\boxed 7", False, "7"),
        ("so 3 and 4", False, None),
        ("so 3 and 4", True, "4"),
        ("<think>\\boxed{1}</think> \\boxed{2}", False, "2"),
        ("<think>\\boxed{1}", True, None),
        ("The answer is $x^2$, as we said.", False, "x^2"),
        ("", True, None),
    ],
)
def test_extract(text: str, prose: bool, answer: str | None) -> None:
    assert extract(text, prose) == answer


@pytest.mark.parametrize(
    "text", ["2x", "3,5", "1,23", "(1,2)", "5m", "5 or 6", "1/0", "e", "", "1e9999", "--5", "1/2/3"]
)
def test_what_is_no_plain_number(text: str) -> None:
    assert parse_number(text) is None


def test_brackets_around_a_number_leave_its_unit_and_power() -> None:
    for text in ("(12 cm^2)", "{12 cm^2}", "12 cm^2"):
        number = parse_number(text)
        assert number is not None
        assert (number.value, number.unit, number.power) == (12, "cm", 2)
    assert math_graders.accuracy("\\boxed{12 cm^3}", {"answer": "(12 cm^2)"}) == 0


def test_tasks_import_no_torch() -> None:
    code = (
        "import sys, qerl.tasks.task, qerl.tasks.math_graders as g\n"
        "assert g.accuracy('\\\\boxed{x+1}', {'answer': '1+x'}) == 1\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

import json
from pathlib import Path

import pytest

from qerl.evaluation.compare import compare


def write(path: Path, scores: dict[int, list[float]], task: str = "sums", asked: str = "1+1=") -> Path:
    lines = [
        {"task": task, "id": i, "sample": s, "prompt": [{"role": "user", "content": asked}], "score": score}
        for i, group in scores.items()
        for s, score in enumerate(group)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_files_are_compared_on_the_questions_that_both_have(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {0: [0.0], 1: [1.0], 2: [1.0], 3: [0.0]})
    b = write(tmp_path / "b.jsonl", {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 1.0], 4: [1.0, 1.0]})
    (found,) = compare(a, b)
    assert (found.questions, found.left_out, found.better, found.worse) == (3, 2, 1, 1)
    assert (found.a, found.b) == pytest.approx((2 / 3, 2.5 / 3))
    assert found.difference.value == pytest.approx(0.5 / 3)


def test_what_can_not_be_compared_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {0: [0.0]})
    with pytest.raises(ValueError, match="compare the same task"):
        compare(a, write(tmp_path / "b.jsonl", {0: [0.0]}, task="others"))
    with pytest.raises(ValueError, match="not the same on both sides"):
        compare(a, write(tmp_path / "c.jsonl", {0: [0.0]}, asked="2+2="))
    with pytest.raises(ValueError, match="no question of sums in common"):
        compare(a, write(tmp_path / "d.jsonl", {1: [0.0]}))
    with pytest.raises(ValueError, match="neither a folder of results"):
        compare(a, tmp_path / "nothing")
    (tmp_path / "e.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="not a file of samples"):
        compare(a, tmp_path / "e.jsonl")

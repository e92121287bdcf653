import pytest

from qerl.tasks import programs
from qerl.tasks.grader import Grader
from qerl.tasks.programs import program_rows, runs_programs
from qerl.tasks.shipped import GSM8K, MBPP


def test_only_graders_of_programs_run_them() -> None:
    assert runs_programs([GSM8K, MBPP])
    assert not runs_programs([GSM8K, Grader("mine", "mine.code:mbpp"), len])


def test_without_a_sandbox_rows_are_refused_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "sandbox_available", lambda: "the kernel has no namespaces")
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ValueError, match=r"none here: the kernel has no namespaces\. docs/sandbox"):
        program_rows(rows, unsafe=False)
    assert list(program_rows(rows, unsafe=True)) == [row | {"_code_unsafe": True} for row in rows]
    assert len(program_rows([], unsafe=True)) == 0

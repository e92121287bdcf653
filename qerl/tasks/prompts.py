"""Rows with prompts: those of a registered data set in its template, and a user's own, checked.

A data set's rows are shaped when they are asked for; before that one pass finds those that have a question and an
answer.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qerl.tasks.catalog import DataSet
from qerl.tasks.source import HubSplit, Row, load_rows


class MadeRows(Sequence[Row]):
    """Rows that are made when they are asked for."""

    def __init__(self, make: Callable[[int], Row], length: int) -> None:
        self.make, self.length = make, length
        if length:
            self[0]  # refuses bad settings now

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.make(index % self.length)


def shaped_rows(data: DataSet, split: str, source: HubSplit, data_dir: Path | None, system: str) -> Sequence[Row]:
    raw, where = load_rows(source, data_dir)
    keep = data.keep.get(split)
    chosen: list[int] = []
    seen: set[str] = set()
    first_bad = None
    left_out = 0
    for index, row in enumerate(raw):
        if keep is not None and not keep(row):
            continue
        question = data.question(row)
        if question is None or (data.answer is not None and data.answer(row) is None):
            first_bad = index + 1 if first_bad is None else first_bad
            left_out += 1
        elif not data.distinct or question not in seen:
            seen.add(question)
            chosen.append(index)
    if not chosen or left_out > len(chosen):
        has = ", ".join(raw[(first_bad or 1) - 1]) if len(raw) else "nothing"
        raise ValueError(
            f"{where} does not fit the task {data.name}: {left_out} rows lack a question or an answer, the first is "
            f"row {first_bad} with the columns {has}. {data.name} reads: {data.columns}."
        )

    def prompt(place: int) -> Row:
        row = dict(raw[chosen[place]])
        text = data.template.format(question=data.question(row))
        shaped = {data.kept_prompt if key == "prompt" else key: value for key, value in row.items()}
        if data.answer is not None:
            shaped["answer"] = data.answer(row)
        return shaped | {"prompt": messages(system, text)}

    return MadeRows(prompt, len(chosen))


def own_rows(rows: Iterable[Row], where: str, system_prompt: str | None) -> list[Row]:
    """A user's rows, each looked at; a system prompt is set before messages that have none."""
    checked = []
    for number, row in enumerate(rows, 1):
        prompt: Any = row.get("prompt")
        talk = isinstance(prompt, list) and bool(prompt)
        if talk and not all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in prompt):
            raise ValueError(f"{where}, row {number}: a message of `prompt` needs `role` and `content`.")
        if not talk and (not isinstance(prompt, str) or not prompt):
            raise ValueError(
                f"{where}, row {number}: a row needs a `prompt`, a text or a list of messages; it has "
                f"{', '.join(row) or 'nothing'}."
            )
        if system_prompt and isinstance(prompt, str):
            raise ValueError(f"{where}, row {number}: system_prompt needs prompts that are messages, not plain text.")
        if system_prompt and prompt[0]["role"] != "system":
            row = row | {"prompt": messages(system_prompt, None) + prompt}
        checked.append(row)
    return checked


def messages(system: str, user: str | None) -> list[dict[str, str]]:
    found = [{"role": "system", "content": system}] if system else []
    return found + ([{"role": "user", "content": user}] if user is not None else [])

"""`qerl eval` as a function: questions through our engine, noise off, graded while others are still being sampled.

Samples are written as they are graded. The same job goes on where an earlier one was broken off; what is complete is
not sampled again, and a job that is complete loads no model at all. Scores of a grader or of data that have changed
since, and samples whose grader raised, are graded again.
"""

import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import Any, Self, TextIO

from qerl.engine.engine import Engine
from qerl.evaluation.answers import given_answer
from qerl.evaluation.grading import Grading, marks
from qerl.evaluation.job import Job
from qerl.evaluation.questions import Questions, load_questions
from qerl.evaluation.results import RESULTS, Line, Lines, claimed, read_samples, samples_file
from qerl.evaluation.summary import summary
from qerl.generate import encode, engine_for, load_tokenizer, stop_ids
from qerl.metrics import drop_torn_line
from qerl.model.loader import load
from qerl.quant.checkpoint import resolve
from qerl.quant.partial import write_json
from qerl.records import Completion, Request, Sampling
from qerl.tasks.rewards import reward_name
from qerl.tasks.workers import Graded, Workers

BATCH = 16  # completions whose scores are asked for together
LAG = 16  # completions that graders may be behind before sampling waits for them


def evaluate(job: Job) -> dict[str, Any]:
    """All of a job: the results, which are also in its folder."""
    with Evaluation(job) as evaluation:
        for _ in evaluation.samples():
            pass
        return evaluation.results()


class Evaluation:
    """A job that was checked: its questions are loaded, and what an earlier run left is read. Use it in `with`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sampling = Sampling(
            max_tokens=job.max_tokens,
            temperature=job.temperature,
            top_p=job.top_p,
            top_k=job.top_k,
            min_p=job.min_p,
            seed=job.seed,
            noise=False,
        )
        self.questions = [load_questions(job, task) for task in job.tasks]
        self.settings, self.folder = job.settings(), job.folder()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(claimed(self.folder, self.settings))
            self.workers = opened.enter_context(Workers(self.job.workers))
            self.gradings = {one.task: Grading(one, self.workers) for one in self.questions}
            earlier = {one.task: self._earlier(one) for one in self.questions}
            self.done = {task: done for task, (done, _) in earlier.items()}
            self.stale = {task: stale for task, (_, stale) in earlier.items()}
            self._open = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    @property
    def total(self) -> int:
        """Samples of the job."""
        return sum(len(questions.rows) for questions in self.questions) * self.job.k

    @property
    def missing(self) -> int:
        return sum(1 for questions in self.questions for _ in self._missing(questions))

    @property
    def regraded(self) -> int:
        """How many of those missing have been sampled, and only need their score."""
        return sum(len(stale) for stale in self.stale.values())

    def samples(self) -> Generator[Line, None, None]:
        """Grades what lacks a score, then samples what is missing: each new line when it has been graded and
        written."""
        for questions in self.questions:
            if self.stale[questions.task]:
                with self._file(questions) as file:
                    yield from self._regrade(questions, file)
        if not self.missing:
            return
        engine, prompt_ids = self._engine()
        for questions in self.questions:
            if next(self._missing(questions), None) is not None:
                with self._file(questions) as file:
                    yield from self._task(questions, engine, prompt_ids[questions.task], file)

    def results(self) -> dict[str, Any]:
        """Scores of the job's tasks, with the settings; written to results.json, beside those of other tasks there."""
        tasks = {}
        for questions in self.questions:
            lines = [self.done[questions.task][key] for key in self._wanted(questions)]
            tasks[questions.task] = summary(lines, self.job.k, self.workers if questions.votes else None)
        results = {"settings": self.settings, "tasks": tasks}
        path = self.folder / RESULTS
        before = json.loads(path.read_text())["tasks"] if path.exists() else {}
        write_json(path, results | {"tasks": before | tasks})
        return results

    def grading_errors(self) -> dict[str, tuple[int, dict[str, str]]]:
        """By task: how many samples its grader failed on, and the first failure's reason and detail."""
        failed = {
            task: [line["grading_error"] for line in done.values() if "grading_error" in line]
            for task, done in self.done.items()
        }
        return {task: (len(lines), lines[0]) for task, lines in failed.items() if lines}

    def _engine(self) -> tuple[Engine, dict[str, list[tuple[int, ...]]]]:
        """The engine on the model with its adapter, and the questions as tokens."""
        job, folder = self.job, resolve(self.job.model)
        tokenizer = load_tokenizer(folder)
        ids = {one.task: [encode(tokenizer, row["prompt"]) for row in one.rows] for one in self.questions}
        self.stop_ids = stop_ids(folder, tokenizer)
        model = load(job.model, job.base, job.device, job.dtype, adapter=job.adapter)
        lengths = [len(one) for task in ids.values() for one in task for _ in range(job.k)]
        return engine_for(model, tokenizer, lengths, job.max_tokens), ids

    def _wanted(self, questions: Questions) -> Iterator[tuple[int, int]]:
        return ((i, sample) for i in range(len(questions.rows)) for sample in range(self.job.k))

    def _missing(self, questions: Questions) -> Iterator[tuple[int, int]]:
        return (key for key in self._wanted(questions) if key not in self.done[questions.task])

    def _file(self, questions: Questions) -> TextIO:
        path = samples_file(self.folder, questions.task)
        drop_torn_line(path)
        return open(path, "a", encoding="utf-8")

    def _earlier(self, questions: Questions) -> tuple[Lines, Lines]:
        """What an earlier run wrote: lines whose score holds, and those to be graded again. Refused where its questions
        are others, or more than are asked for now."""
        path, grading = samples_file(self.folder, questions.task), self.gradings[questions.task]
        lines = read_samples(path) if path.exists() else {}
        wanted = set(self._wanted(questions))
        for key, line in lines.items():
            if key not in wanted:
                raise ValueError(
                    f"{path} holds more samples than are asked for now, so that its results would be replaced by those "
                    f"of fewer. Ask for as many as before (--limit, --k), or name another --out."
                )
            if line["prompt"] != questions.rows[line["id"]]["prompt"]:
                raise ValueError(f"{path} holds other questions than {questions.task} now has. Name another --out.")
        done = {key: line for key, line in lines.items() if grading.holds(line)}
        return done, {key: line for key, line in lines.items() if key not in done} if grading.again else {}

    def _regrade(self, questions: Questions, file: TextIO) -> Iterator[Line]:
        """Scores of completions that are there; the last line of a sample is the one that counts."""
        grading, stale = self.gradings[questions.task], self.stale[questions.task]
        while stale:
            batch = list(islice(stale, BATCH))
            found = grading.grade(batch, [stale[key]["completion"] for key in batch], [()] * len(batch))
            for key, graded in zip(batch, found, strict=True):
                line = {name: value for name, value in stale.pop(key).items() if name != "grading_error"}
                line |= self._graded(questions, key[0], graded, line.get("error", ""))
                self._write(file, line)
                yield line

    def _graded(self, questions: Questions, question: int, graded: Graded, refused: str) -> Line:
        """The part of a line that grading gives. What the engine refused is wrong, whatever its grader says."""
        given = {"score": 0.0} if refused else marks(graded)
        right, mark = questions.rows[question].get("answer"), self.gradings[questions.task].mark(question)
        return {"right": right, "graded_by": mark} | given

    def _write(self, file: TextIO, line: Line) -> None:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        self.done[line["task"]][line["id"], line["sample"]] = line

    def _task(
        self, questions: Questions, engine: Engine, prompt_ids: Sequence[tuple[int, ...]], file: TextIO
    ) -> Iterator[Line]:
        """Completions as they end, to the graders at once and into the file a little later."""
        grading, done = self.gradings[questions.task], self.done[questions.task]
        asked = sorted({i for i, _ in self._missing(questions)})
        requests = [Request(i, prompt_ids[i], self.job.k) for i in asked]
        sampling = replace(self.sampling, stop_ids=self.stop_ids)
        pending: deque[Completion] = deque()

        def graded(count: int) -> list[Line]:
            """The first `count` of those pending, graded, written, and only then pending no more."""
            batch = list(islice(pending, count))
            lines = self._lines(questions, batch)
            for line in lines:
                self._write(file, line)
            file.flush()
            for _ in batch:
                pending.popleft()
            return lines

        try:
            with closing(engine.stream(requests, sampling)) as stream:
                for completion in stream:
                    if _key(completion) in done:  # a question that was broken off is sampled again as a whole
                        continue
                    grading.begin(_key(completion), completion.request, completion.text)
                    pending.append(completion)
                    if len(pending) == BATCH + LAG:
                        yield from graded(BATCH)
            yield from graded(len(pending))
        finally:
            if pending:  # broken off: nothing that was sampled is lost
                graded(len(pending))

    def _lines(self, questions: Questions, batch: list[Completion]) -> list[Line]:
        keys, texts = [_key(one) for one in batch], [one.text for one in batch]
        found = self.gradings[questions.task].grade(keys, texts, [one.token_ids for one in batch])
        name = reward_name(questions.reward)
        return [
            {
                "task": questions.task,
                "id": completion.request,
                "sample": completion.sample,
                "prompt": questions.rows[completion.request]["prompt"],
                "completion": completion.text,
                "answer": given_answer(name, completion.text),
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.token_ids),
            }
            | ({"error": completion.error} if completion.error else {})
            | self._graded(questions, completion.request, graded, completion.error)
            for completion, graded in zip(batch, found, strict=True)
        ]


def _key(completion: Completion) -> tuple[int, int]:
    return completion.request, completion.sample

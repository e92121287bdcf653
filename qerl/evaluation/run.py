"""`qerl eval` as a function: questions through our engine, noise off, graded while others are still being sampled.

Samples are written as they are graded. The same job goes on where an earlier one was broken off; what is complete is
not sampled again, and a job that is complete loads no model at all.
"""

import json
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import Any, Self, TextIO

from qerl.engine.engine import Engine
from qerl.evaluation.answers import given_answer
from qerl.evaluation.job import Job
from qerl.evaluation.questions import Questions, load_questions
from qerl.evaluation.results import RESULTS, Line, Lines, claimed, read_samples, samples_file
from qerl.evaluation.summary import summary
from qerl.generate import encode, engine_for, load_tokenizer, stop_ids
from qerl.metrics import drop_torn_line
from qerl.model.adapter import load_adapter
from qerl.model.loader import load
from qerl.quant.checkpoint import resolve
from qerl.quant.partial import write_json
from qerl.records import Completion, Request, Sampling
from qerl.tasks.rewards import Rewards, TrainerState, reward_name
from qerl.tasks.workers import Workers

BATCH = 16  # completions whose scores are asked for together
LAG = 16  # completions that graders may be behind before sampling waits for them

STATE = TrainerState(0, 0)


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
            seed=job.seed,
            noise=False,
        )
        self.questions = [load_questions(job, task) for task in job.tasks]
        self.settings, self.folder = job.settings(), job.folder()
        self.failures: Counter[str] = Counter()  # samples that graders failed on, by reason
        self.first_failure: dict[str, str] = {}  # what happened to the first of each
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(claimed(self.folder, self.settings))
            self.workers = opened.enter_context(Workers(self.job.workers))
            self.done = {questions.task: self._earlier(questions) for questions in self.questions}
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

    def samples(self) -> Generator[Line, None, None]:
        """Samples what is missing: each new line when it has been graded and written."""
        if not self.missing:
            return
        engine, prompt_ids = self._engine()
        for questions in self.questions:
            if next(self._missing(questions), None) is None:
                continue
            path = samples_file(self.folder, questions.task)
            drop_torn_line(path)
            with open(path, "a", encoding="utf-8") as file:
                yield from self._task(questions, engine, prompt_ids[questions.task], file)

    def results(self) -> dict[str, Any]:
        """Scores of all tasks, with the settings; written to results.json."""
        tasks = {}
        for questions in self.questions:
            lines = [self.done[questions.task][key] for key in self._wanted(questions)]
            tasks[questions.task] = summary(lines, self.job.k, self.workers if questions.votes else None)
        results = {"settings": self.settings, "tasks": tasks}
        write_json(self.folder / RESULTS, results)
        return results

    def _engine(self) -> tuple[Engine, dict[str, list[tuple[int, ...]]]]:
        """The engine on the model with its adapter, and the questions as tokens."""
        job, folder = self.job, resolve(self.job.model)
        tokenizer = load_tokenizer(folder)
        ids = {one.task: [encode(tokenizer, row["prompt"]) for row in one.rows] for one in self.questions}
        self.stop_ids = stop_ids(folder, tokenizer)
        model = load(job.model, job.base, job.device, job.dtype)
        if job.adapter is not None:
            load_adapter(model, job.adapter)
        lengths = [len(one) for task in ids.values() for one in task for _ in range(job.k)]
        return engine_for(model, tokenizer, lengths, job.max_tokens), ids

    def _wanted(self, questions: Questions) -> Iterator[tuple[int, int]]:
        return ((i, sample) for i in range(len(questions.rows)) for sample in range(self.job.k))

    def _missing(self, questions: Questions) -> Iterator[tuple[int, int]]:
        return (key for key in self._wanted(questions) if key not in self.done[questions.task])

    def _earlier(self, questions: Questions) -> Lines:
        """What an earlier run wrote; refused where its questions are others."""
        path = samples_file(self.folder, questions.task)
        lines = read_samples(path) if path.exists() else {}
        for (i, _), line in lines.items():
            if i < len(questions.rows) and line["prompt"] != questions.rows[i]["prompt"]:
                raise ValueError(f"{path} holds other questions than {questions.task} now has. Name another --out.")
        return lines

    def _task(
        self, questions: Questions, engine: Engine, prompt_ids: Sequence[tuple[int, ...]], file: TextIO
    ) -> Iterator[Line]:
        """Completions as they end, to the graders at once and into the file a little later."""
        rewards = Rewards([questions.reward], workers=self.workers)
        done = self.done[questions.task]
        asked = sorted({i for i, _ in self._missing(questions)})
        requests = [Request(i, prompt_ids[i], self.job.k) for i in asked]
        sampling = replace(self.sampling, stop_ids=self.stop_ids)
        pending: deque[Completion] = deque()

        def graded(count: int, begun: bool) -> list[Line]:
            """The first `count` of those pending, graded, written, and only then pending no more."""
            batch = list(islice(pending, count))
            lines = self._lines(questions, rewards, batch, begun)
            for line in lines:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                done[line["id"], line["sample"]] = line
            file.flush()
            for _ in batch:
                pending.popleft()
            return lines

        try:
            with closing(engine.stream(requests, sampling)) as stream:
                for completion in stream:
                    if _key(completion) in done:  # a question that was broken off is sampled again as a whole
                        continue
                    rewards.begin(_key(completion), questions.rows[completion.request], completion.text)
                    pending.append(completion)
                    if len(pending) == BATCH + LAG:
                        yield from graded(BATCH, begun=True)
            yield from graded(len(pending), begun=True)
        finally:
            if pending:  # broken off: nothing that was sampled is lost
                graded(len(pending), begun=False)

    def _lines(self, questions: Questions, rewards: Rewards, batch: list[Completion], begun: bool) -> list[Line]:
        rows = [questions.rows[completion.request] for completion in batch]
        texts, ids = [one.text for one in batch], [one.token_ids for one in batch]
        scores = rewards.score(rows, texts, ids, STATE, [_key(one) for one in batch] if begun else None)
        self.failures.update(scores.failures)
        for failed in (one for samples in scores.failed.values() for one in samples):
            self.first_failure.setdefault(str(failed.reason), failed.detail)
        (values,) = scores.values
        name = reward_name(questions.reward)
        return [
            {
                "task": questions.task,
                "id": completion.request,
                "sample": completion.sample,
                "prompt": row["prompt"],
                "completion": completion.text,
                "answer": given_answer(name, completion.text),
                "right": row.get("answer"),
                "score": 0.0 if completion.error else None if score != score else score,
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.token_ids),
            }
            | ({"error": completion.error} if completion.error else {})
            for completion, row, score in zip(batch, rows, values, strict=True)
        ]


def _key(completion: Completion) -> tuple[int, int]:
    return completion.request, completion.sample

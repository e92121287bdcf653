"""`qerl eval`, `qerl eval-compare` and `qerl lm-eval`."""

import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qerl.cli.words import look_here
from qerl.console import finish, log, say, screen
from qerl.errors import Interrupted


def evaluate(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id; `tiny` is the shipped model.")],
    task: Annotated[str, typer.Option(help="Tasks, with commas: gsm8k,math500,aime24,aime25,amc23,mbpp, ...")],
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter folder; trained norms apply too.")] = None,
    base: Annotated[str, typer.Option(help="bf16, nvfp4, mxfp4 or nf4.")] = "nvfp4",
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="by device")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="a GPU if there is one")] = None,
    k: Annotated[int, typer.Option(help="Samples a question; more than one needs a temperature.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", min=0)] = 0,
    min_p: Annotated[float, typer.Option(help="Of the most likely token's probability; 0 is off.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 1024,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first questions of each task.", min=1)] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Instead of the task's own; '' is none.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with local data files.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Instead of the task's own: a shipped name or an import path.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that grade.", min=1)] = 2,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Run programs without a sandbox, where there is none.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results.", show_default="evals/MODEL-BASE-TASKS-...")
    ] = None,
) -> None:
    """Score a model on tasks' held-out questions: pass@1, pass@k and maj@k with 95 % intervals. Noise is off.

    The same command goes on where it was broken off.
    """
    from qerl.evaluation.job import Job
    from qerl.evaluation.run import Evaluation

    look_here()
    job = Job(
        model=model,
        tasks=tuple(name.strip() for name in task.split(",") if name.strip()),
        adapter=adapter,
        base=base,
        dtype=dtype,
        device=device,
        k=k,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        limit=limit,
        system_prompt=system_prompt,
        data_dir=data_dir,
        reward=reward,
        out=out,
        workers=workers,
        unsafe_code=unsafe_code,
    )
    started, tokens, right, seen = time.monotonic(), 0, 0.0, 0
    columns = (
        TextColumn("{task.description} {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    with Evaluation(job) as evaluation:
        total, missing, regraded = evaluation.total, evaluation.missing, evaluation.regraded
        if missing < total:
            say(f"{total - missing} of {total} samples are in {evaluation.folder} already.")
        if regraded:
            say(f"{regraded} samples are graded again: their grader or data has changed, or it had raised an error.")
        if missing > regraded:
            say(f"Loading {model} as {base} ...")
        bar = Progress(*columns, console=log)
        at = bar.add_task("samples", total=total, completed=total - missing, now="")
        try:
            with bar, closing(evaluation.samples()) as lines:
                for line in lines:
                    tokens, right, seen = tokens + line["tokens"], right + (line["score"] or 0), seen + 1
                    rate = tokens / (time.monotonic() - started)
                    bar.update(at, advance=1, now=f"{line['task']}, {right / seen:.1%} so far, {rate:.0f} tokens/s")
        except KeyboardInterrupt as error:
            kept = total - evaluation.missing
            raise Interrupted(
                f"Interrupted: {kept} of {total} samples are kept in {evaluation.folder}; the same command goes on."
            ) from error
        results = evaluation.results()
        failed = evaluation.grading_errors()
    for name, (count, example) in failed.items():
        say(
            f"{name}: the grader failed on {count} samples, which count as wrong. "
            f"One of them, {example['reason']}: {example['detail']}"
        )
    for name, one in results["tasks"].items():
        if one["refused"]:
            say(f"{name}: {one['refused']} prompts do not fit the model's context and count as wrong.")
        if one["not_graded"]:
            say(f"{name}: {one['not_graded']} questions that the reward does not apply to are left out.")
    screen.print(_table(results["tasks"], job.k))
    say(f"Samples and results are in {evaluation.folder}.")
    seconds = round(time.monotonic() - started, 1)
    finish({"tasks": results["tasks"], "out": evaluation.folder, "sampled": missing - regraded, "seconds": seconds})
    if sum(count for count, _ in failed.values()) == total:
        raise typer.Exit(1)  # nothing at all was graded


def eval_compare(
    a: Annotated[Path, typer.Argument(help="Folder of results, or a file of samples.")],
    b: Annotated[Path, typer.Argument(help="The other one; differences are B - A.")],
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
) -> None:
    """Compare two evaluations question by question: difference, 95 % interval and p-value by a paired bootstrap."""
    from qerl.evaluation.compare import changed_settings, compare
    from qerl.evaluation.estimators import FEW

    found = compare(a, b, seed)
    for key, (one, other) in changed_settings(a, b).items():
        if not key.endswith("sha256") and key != "weights":
            say(f"{key}: {one} -> {other}")
    table = Table(title="pass@1 in %; n questions, B>A: on which B is right more often")
    table.add_column("task", overflow="fold", min_width=10)
    for name in ("n", "A", "B", "B - A", "95 %", "p", "B>A", "B<A"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        delta = one.difference
        interval = f"{100 * delta.low:+.1f}..{100 * delta.high:+.1f}"
        shares = (f"{100 * one.a:.1f}", f"{100 * one.b:.1f}", f"{100 * delta.value:+.1f}")
        table.add_row(
            *(escape(one.task), str(one.questions), *shares, interval),
            *(f"{delta.p_value:.3f}", str(one.better), str(one.worse)),
        )
        if one.questions < FEW:
            say(f"{one.task}: {one.questions} questions are too few for an interval and a p-value that mean much.")
        if one.left_out:
            say(f"{one.task}: {one.left_out} questions that only one of the two answered are left out.")
    screen.print(table)
    finish({"a": a, "b": b, "tasks": {one.task: asdict(one) for one in found}})


def lm_eval(context: typer.Context) -> None:
    """lm-eval's own command, with `--model qerl` in it. All words after it are lm-eval's."""
    try:
        from qerl.integrations.lm_eval import run_command
    except ModuleNotFoundError as error:
        raise ValueError(f"There is no {error.name}: pip install 'qerl[eval]'.") from error
    sys.argv = ["lm-eval", *context.args]  # lm-eval reads its words there
    run_command()


def _table(tasks: dict[str, Any], k: int) -> Table:
    """A row a task; the scores between pass@1 and pass@k are in the JSON only."""
    drawn = f"{k} samples a question" if k > 1 else "one sample a question"
    table = Table(title=f"{drawn}; % and 95 % intervals over n questions")
    table.add_column("task", overflow="fold", min_width=10)
    scores = list(dict.fromkeys(("pass@1", f"pass@{k}", *([f"maj@{k}"] if k > 1 else []))))
    for name in ("n", *scores, "tokens", "cut off"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in tasks.items():
        cells = [_cell(one.get(score)) for score in scores]
        table.add_row(escape(name), str(one["questions"]), *cells, f"{one['mean_tokens']:.0f}", f"{one['cut_off']:.0%}")
    return table


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{100 * found['value']:.1f}\n{100 * found['low']:.1f}..{100 * found['high']:.1f}"

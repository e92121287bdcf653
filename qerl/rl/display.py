"""What a person sees of a run: the plan, a bar, a line a step, warnings, and a table at the end. On stderr."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qerl.config import Config

LINE = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("noise/sigma", "sigma", "{:.1e}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("rollout/tokens_per_s", "tokens/s", "{:.0f}"),
    ("memory/peak_gb", "GB", "{:.2f}"),
    ("step_time", "s", "{:.1f}"),
)


class Display:
    """Shows a run as it goes. Use as a context manager."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeRemainingColumn(),
        )
        self.total = total
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task("", total=total, phase="")

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        self.bar.update(self.task, phase=text)

    def done(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def line(self, step: int, metrics: dict[str, Any]) -> None:
        """One line of the step's main figures, and the time left."""
        parts = [f"{label} {form.format(metrics[key])}" for key, label, form in LINE if metrics.get(key) is not None]
        left = self.bar.tasks[0].time_remaining
        if left:
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        self.say(f"step {step}/{self.total}  " + "  ".join(parts))


def plan(
    config: Config, total_steps: int, rows: int, trained: int, blocks: int, trial: dict[str, float], ranks: int = 1
) -> str:
    """The run in plain words, before step 1."""
    completions = config.prompts_per_step * config.num_generations
    updates = config.steps_per_generation * config.num_iterations
    epochs = f" ({config.num_iterations} passes over them)" if config.num_iterations > 1 else ""
    noise = config.noise
    noisy = {
        "off": "no noise",
        "entropy": f"noise that holds the entropy, from sigma {noise.sigma_start:g}",
    }.get(
        noise.schedule,
        f"{noise.schedule} noise, {noise.num_stages} stages, sigma {noise.sigma_start:g} to {noise.sigma_end:g}",
    )
    peak = f", peak {trial['peak_gb']:.2f} GB" if "peak_gb" in trial else ""
    prompts, tokens = counted(config.prompts_per_step, "prompt"), config.max_completion_length
    each = completions // config.steps_per_generation
    tried = f" Tried {trial['tokens']:.0f} tokens at once: {trial['seconds']:.1f} s{peak}." if trial else ""
    shared = counted(config.prompts_per_step // ranks, "prompt")
    each_rank = f" on each of {ranks} ranks, which take {shared} a step" if ranks > 1 else ""
    return "\n".join(
        (
            f"Plan: {counted(total_steps, 'step')} on {counted(rows, 'prompt')}; {config.model} as {config.base}, "
            f"{trained:,} weights train.",
            f"  A step samples {prompts} x {config.num_generations} = {completions} completions of up to "
            f"{tokens} tokens, then makes {counted(updates, 'update')}{epochs} of {each} completions.",
            f"  Loss {config.loss_type}, {noisy}; learning rate {config.learning_rate:g} ({config.lr_scheduler_type}).",
            f"  Cache of {counted(blocks, 'block')}{each_rank}.{tried}",
        )
    )


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def final_table(before: dict[str, float], after: dict[str, float]) -> Table:
    table = Table("held-out, greedy, no noise", "before", "after", title="Before and after")
    for key in after:
        if key in before:
            table.add_row(key.removeprefix("eval_"), f"{before[key]:.4g}", f"{after[key]:.4g}")
    return table


def stdout() -> Console:
    return Console(file=sys.stdout)

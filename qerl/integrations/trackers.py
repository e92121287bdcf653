"""TensorBoard, wandb and trackio: a run's metrics and completions in them as well, by the key `report_to`.

metrics.jsonl stays the truth. A tracker that fails is dropped, aloud, and the run goes on without it. A resumed run
goes on in the same tracker's run: TensorBoard is told where it was cut back; the others can't take a step back, so that
what they have already is not sent again. `trackers.json` in the run's folder remembers their ids and how far they are.
"""

import importlib.util
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qerl.config import Config
from qerl.quant.partial import write_json

FILE, TENSORBOARD_FOLDER = "trackers.json", "tensorboard"
TABLE = "completions"  # its name in the trackers, as TRL has it
TEXT_ROWS = 16  # of a step's completions in TensorBoard, which has no tables
Columns = dict[str, list[Any]]


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None:
        """Metrics of a step; may be called several times for one."""

    def table(self, columns: Columns, step: int) -> None:
        """A step's completions."""

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    def __init__(self, config: Config, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(config.output_dir / TENSORBOARD_FOLDER), purge_step=first)
        if first == 0:
            self.writer.add_text("config", f"```\n{json.dumps(config.model_dump(mode='json'), indent=1)}\n```", 0)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a run may be killed

    def table(self, columns: Columns, step: int) -> None:
        rows = list(zip(*columns.values(), strict=True))[:TEXT_ROWS]
        lines = [list(columns), ["---"] * len(columns), *rows]
        text = "\n".join("|" + "|".join(_cell(value) for value in line) + "|" for line in lines)
        self.writer.add_text(TABLE, text, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    """Where and whether it uploads is wandb's own business (WANDB_MODE and the like)."""

    def __init__(self, config: Config, run_id: str) -> None:
        import wandb

        self.make_table = wandb.Table
        self.run = wandb.init(
            project=config.project,
            id=run_id,
            name=config.output_dir.name,
            dir=str(config.output_dir),
            config=config.model_dump(mode="json"),
            resume="allow",
            settings=wandb.Settings(console="off"),  # the screen is ours
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def table(self, columns: Columns, step: int) -> None:
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self.run.log({TABLE: self.make_table(columns=list(columns), data=rows)}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio:
    def __init__(self, config: Config, run_id: str) -> None:
        import trackio

        self.make_table = trackio.Table
        name = f"{config.output_dir.name}-{run_id}"  # a name is what trackio resumes by
        settings = config.model_dump(mode="json")
        self.run = trackio.init(project=config.project or "qerl", name=name, config=settings, resume="allow")

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def table(self, columns: Columns, step: int) -> None:
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self.run.log({TABLE: self.make_table(columns=list(columns), data=rows)}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class Resumed:
    """A tracker that has steps already, up to `seen`: those are not sent again."""

    def __init__(self, tracker: Tracker, seen: int) -> None:
        self.tracker, self.seen = tracker, seen

    def log(self, values: dict[str, float], step: int) -> None:
        if step > self.seen:
            self.tracker.log(values, step)

    def table(self, columns: Columns, step: int) -> None:
        if step > self.seen:
            self.tracker.table(columns, step)

    def close(self, failed: bool) -> None:
        self.tracker.close(failed)


class Trackers:
    """All of a run's trackers. One that raises is said aloud once and left out from then on."""

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], None]) -> None:
        self.trackers, self.warn = trackers, warn

    def log(self, values: dict[str, Any], step: int) -> None:
        """Numbers only; what was not measured (None) is left out."""
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        self._each(lambda tracker: tracker.log(numbers, step))

    def table(self, columns: Columns, step: int) -> None:
        self._each(lambda tracker: tracker.table(columns, step))

    def close(self, failed: bool = False) -> None:
        self._each(lambda tracker: tracker.close(failed))
        self.trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not end a run
                del self.trackers[name]
                self.warn(_failed(name, error))


def require_installed(names: Sequence[str]) -> None:
    """Before any work."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"report_to names {name}, which is not installed: pip install 'qerl[{name}]', or drop it.")


def start(config: Config, done: int | None, logged: int, warn: Callable[[str], None]) -> Trackers:
    """The trackers of a run that goes on after step `done` (None: from the start). logged: the last step that
    metrics.jsonl had before it was cut back."""
    path = config.output_dir / FILE
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known = dict(before)
    for name in config.report_to:
        id_ = before[name]["id"] if name in before else uuid.uuid4().hex[:8]
        known[name] = {"id": id_, "seen": max(logged, before[name]["seen"]) if name in before else -1}
    write_json(path, known)
    started: dict[str, Tracker] = {}
    for name in config.report_to:
        id_, seen = known[name]["id"], known[name]["seen"]
        try:
            if name == "tensorboard":
                started[name] = TensorBoard(config, 0 if done is None else done + 1)
            else:
                started[name] = Resumed((Wandb if name == "wandb" else Trackio)(config, id_), seen)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not end a run
            warn(_failed(name, error))
    return Trackers(started, warn)


def _failed(name: str, error: Exception) -> str:
    return f"{name} failed and is left out from now on ({error!r:.300}); metrics.jsonl goes on having everything."


def _cell(value: Any) -> str:
    """Text in a cell of a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")

"""The `qerl` command. One file a subcommand, a few lines of wiring each; they are listed here."""

import errno
import os
import signal
import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from qerl import __version__
from qerl.cli.bench import bench
from qerl.cli.compare import compare
from qerl.cli.eval import eval_compare, evaluate, lm_eval
from qerl.cli.export import export
from qerl.cli.generate import chat, generate
from qerl.cli.plan import plan
from qerl.cli.push import push
from qerl.cli.quantize import quantize
from qerl.cli.shapes import memory, random
from qerl.cli.sweep import sweep
from qerl.cli.train import config, train
from qerl.console import complain, finish
from qerl.errors import Interrupted

PATIENCE = 2.0  # seconds that a rank with an error waits for rank 0 to have the same


class Commands(TyperGroup):
    """A Ctrl-C that a command lets through ends it with a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted("Interrupted.") from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Reinforcement learning for large language models on 4-bit weights.",
)
for command in (quantize, plan, train, generate, chat, export, push, compare, sweep, config, memory, random):
    # where settings are words, an unknown option is one too, and is told how settings are written
    app.command(context_settings={"ignore_unknown_options": command in (plan, train, sweep)})(command)
app.command("eval")(evaluate)
app.command()(eval_compare)
passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=passed_on)(lm_eval)
app.add_typer(bench, name="bench")


def main() -> None:
    """Runs the command; what a user can mend ends in a message, not in a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except Interrupted as error:
        stopped = isinstance(error.__cause__, KeyboardInterrupt)
        if not stopped or _rank() == 0:  # ranks stop together
            complain(error)
        sys.exit(130 if stopped else 1)
    except ValueError as error:
        if not _said_by_rank_0():
            complain(error)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EFBIG):
            raise
        complain(ValueError(f"{error.strerror}: {error.filename or 'the disk'}. What was complete is kept."))
        sys.exit(1)


def _rank() -> int:
    """Among torchrun's processes; 0 without it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def _said_by_rank_0() -> bool:
    """Whether this is another of torchrun's processes and the same is wrong with rank 0, which says it for all.

    torchrun ends all as soon as one has ended: so the others wait a little, and what they live to say is theirs alone.
    """
    if _rank() == 0:
        return False
    try:
        time.sleep(PATIENCE)
    except KeyboardInterrupt:
        return True
    return False


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show:
        finish({"version": __version__})
        raise typer.Exit
    if "TORCHELASTIC_RUN_ID" in os.environ and context.invoked_subcommand != "train":
        raise ValueError(
            f"qerl {context.invoked_subcommand} is one process: start it without torchrun. (qerl train takes several.)"
        )

"""`qerl export`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qerl.console import byte_progress, finish, say, screen
from qerl.errors import Interrupted
from qerl.quant.partial import require_new

FORMS = ("adapter", "merged", "nvfp4")
DTYPES = ("bfloat16", "float16", "float32")


def export(
    source: Annotated[Path, typer.Argument(help="A run's folder, a checkpoint in it, or a PEFT adapter.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    form: Annotated[
        str, typer.Option(help="adapter: PEFT's; merged: a plain model; nvfp4: merged and rounded again, with a loss.")
    ] = "adapter",
    target: Annotated[
        str | None, typer.Option("--for", help="vllm: LoRA alone, and the base with the trained norms.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --form merged: bfloat16, float16 or float32.", show_default="bfloat16"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base.", show_default="what the run says")] = None,
    base: Annotated[
        str | None, typer.Option(help="bf16, nvfp4, mxfp4 or nf4.", show_default="what the run says")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of the check: cpu or cuda.", show_default="a GPU if there is one")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare logits before and after.")] = True,
) -> None:
    """Write what was trained for others to use, checked against it.

    The newest whole checkpoint of a run is taken. Weights are streamed; OUT appears whole or not at all.
    """
    if form not in FORMS:
        raise ValueError(f"There is no form {form!r}; choose one of {', '.join(FORMS)}.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"There is no dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if target not in (None, "vllm"):
        raise ValueError(f"There is no --for {target}; vllm is what needs help.")
    if target and form != "adapter":
        raise ValueError(f"vLLM loads --form {form} as it is; drop --for vllm.")
    if not check and form == "nvfp4":
        raise ValueError("--form nvfp4 loses something, and measures what: drop --no-check.")
    require_new(out)
    from qerl.export import forms
    from qerl.export.trained import find_trained

    trained = find_trained(source, model, base)
    if trained.weights is not None and form == "adapter" and target is None:
        say("It was trained in full: exporting its weights (--form merged).")
        form = "merged"
    if dtype is not None and form != "merged":
        raise ValueError(f"--form {form} has no dtype of its own: drop --dtype, or ask for --form merged.")
    say(f"Exporting {trained.origin} ...")
    try:
        with byte_progress("writing") as (on_plan, on_bytes):
            watch = forms.Watch(say, on_plan, on_bytes)
            if target == "vllm":
                made = forms.export_for_vllm(trained, out, device, check, watch)
            elif form == "adapter":
                made = forms.export_adapter(trained, out, watch)
            elif form == "merged":
                made = forms.export_merged(trained, out, dtype or DTYPES[0], device, check, watch)
            else:
                made = forms.export_nvfp4(trained, out, device, watch)
    except KeyboardInterrupt as error:
        raise Interrupted(f"Interrupted; {out} was not made. The same command starts over.") from error
    _show(made)
    finish(made.summary())


def _show(made: Any) -> None:
    if (found := made.difference) is not None:
        table = Table("against the model that was trained", "", title=f"{made.out}: {made.form}")
        table.columns[1].justify = "right"
        table.add_row("largest difference of logits", f"{found.largest:.3g}")
        table.add_row("the same, relative and on average", f"{found.relative:.3g}")
        table.add_row("KL (nats a token)", f"{found.kl:.3g}")
        table.add_row("KL of the base: what training changed", f"{found.effect_kl:.3g}")
        table.add_row(
            "lost, as a share of that change of log-probs", "-" if found.lost is None else f"{found.lost:.2%}"
        )
        table.add_row("the same likeliest token", f"{found.same_token:.1%} of {found.positions} places")
        screen.print(table)
    for note in made.notes:
        say(note)

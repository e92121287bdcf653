"""`qerl bench ...`: a few lines of wiring for each measurement."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qerl.cli.measured import measured
from qerl.console import finish, say, screen

bench = typer.Typer(no_args_is_help=True, help="Measure: a table, then one line of JSON.")

Csv = Annotated[Path | None, typer.Option(help="Append the rows to this CSV file, with GPU and commit.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="a GPU if there is one")]
OneShape = Annotated[
    str | None, typer.Option(help="Shape of the random model.", show_default="qwen2.5-7b on a GPU, toy on a CPU")
]


@bench.command("quantize")
def bench_quantize(
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "qwen2.5-0.5b",
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the models.", show_default="the temporary folder")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each; the best counts.", min=1)] = 2,
    csv: Csv = None,
) -> None:
    """qerl's rtn against llm-compressor's data-free NVFP4A16: seconds and peak memory."""
    from qerl.bench.quantize import compare, ratios

    columns = ("contender", "cores", "seconds", "gb_per_s", "peak_gb", "output_gb")
    title = f"{shape} to NVFP4 on the CPU, folder to folder"
    measured(compare(shape, folder, repeats, say), columns, title, csv, summary=ratios)


@bench.command("rollout")
def bench_rollout(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="Shape of the random model; with --batch a list.")] = "toy",
    prompts: Annotated[
        int | None, typer.Option(help="Without --batch: how many prompts.", min=1, show_default="32, on a CPU 8")
    ] = None,
    samples: Annotated[int, typer.Option(help="Without --batch: samples of each.", min=1)] = 8,
    max_tokens: Annotated[
        str | None,
        typer.Option(help="New tokens at most; with --batch a list.", show_default="256, on a CPU without --batch 128"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cpu; with --batch a GPU if there is one")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes, as 1,8,32: speed of prefill and decoding with LoRA.")
    ] = None,
    base: Annotated[
        str, typer.Option(help="With --batch: nvfp4, bf16, mxfp4, nf4 or bitsandbytes (its NF4 kernels); a list.")
    ] = "nvfp4",
    rank: Annotated[str, typer.Option(help="With --batch: LoRA's rank, a list; 0: none.")] = "32",
    prompt: Annotated[int, typer.Option(help="With --batch: tokens of a prompt.", min=1)] = 256,
    run_up_to: Annotated[
        int, typer.Option(help="With --batch: longer traces are timed at five contexts and integrated.", min=1)
    ] = 512,
    kv_cache_dtype: Annotated[str, typer.Option(help="With --batch: auto or fp8.")] = "auto",
    csv: Csv = None,
) -> None:
    """Our engine against transformers.generate: tokens a second on samples of mixed lengths.

    With --batch, the engine alone: every combination of the lists, all samples as long as --max-tokens.

    On a CPU the defaults are small: done within about a minute.

    On a GPU, of_floor compares with an H200, which reads weights and cache at 4.0 TB/s, whatever GPU this is.

    JSON and CSV have more columns than the table.
    """
    _refuse_unread(
        context,
        "batch",
        with_it=("base", "rank", "prompt", "run_up_to", "kv_cache_dtype"),
        without_it=("prompts", "samples"),
    )
    lengths = tuple(_numbers("256" if max_tokens is None else max_tokens))
    if batch is not None:
        from qerl.bench import decode

        work = decode.Table(
            shapes=_words(shape),
            bases=_words(base),
            ranks=tuple(_numbers(rank, least=0)),
            batches=tuple(_numbers(batch)),
            new_tokens=lengths,
            prompt=prompt,
            run_up_to=run_up_to,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
        )
        shown = ("model", "base", "rank", "batch", "new_tokens", "prefill_ms", "step_ms", "tokens_per_s", "of_floor")
        title = f"Prefill and decoding, prompts of {prompt} tokens{_note(device, '; of floor: an H200, 4.0 TB/s')}"
        measured(decode.measure(work, say), shown, title, csv)
        return
    if len(lengths) > 1:
        raise ValueError("Several --max-tokens belong to --batch.")
    from qerl.bench.rollout import ON_A_CPU, ON_A_GPU, compare, speedup

    where = device or "cpu"
    prompts, most = _sizes((prompts, None if max_tokens is None else lengths[0]), where, ON_A_GPU, ON_A_CPU)
    rows = compare(shape, prompts, samples, most, where, say)
    title = f"{shape}, {prompts} prompts x {samples} samples, up to {most} tokens, {where}"
    measured(rows, ("contender", "tokens", "seconds", "tokens_per_s"), title, csv, summary=speedup)


@bench.command("linear")
def bench_linear(
    shape: Annotated[str, typer.Option(help="Whose linear layers.")] = "qwen2.5-7b",
    rows: Annotated[str, typer.Option(help="Rows of x, that is, sequences in a decode step.")] = "1,8,16,32,64,128,256",
    rank: Annotated[int, typer.Option(help="LoRA's rank.", min=1)] = 32,
    format: Annotated[str, typer.Option(help="nvfp4, or nf4 (beside bitsandbytes where that is installed).")] = "nvfp4",
    csv: Csv = None,
) -> None:
    """4-bit linears on our kernels, alone and with LoRA, against cuBLAS in bf16: microseconds, on a GPU.

    with_lora_us of gate_up includes SwiGLU, as in a decode step; us does not.

    of_floor compares with an H200 (4.0 TB/s, 780 TFLOP/s), whatever GPU this is.
    """
    from qerl.bench.linear import measure

    columns = ("layer", "rows", "us", "with_lora_us", "bf16_us", "x_bf16", "bitsandbytes_us", "of_floor", "tb_per_s")
    title = (
        f"{shape}: linear layers as {format}, LoRA r = {rank} (gate_up with LoRA: SwiGLU too); of floor: an H200, "
        "4.0 TB/s and 780 TFLOP/s"
    )
    measured(measure(shape, _numbers(rows), rank, say, format), columns, title, csv)


@bench.command("prefill")
def bench_prefill(
    shape: OneShape = None,
    base: Annotated[str, typer.Option(help="nvfp4, bf16, mxfp4, nf4 or bitsandbytes.")] = "nvfp4",
    rank: Annotated[int, typer.Option(help="LoRA's rank; 0: none.", min=0)] = 32,
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=1)] = 16,
    samples: Annotated[int, typer.Option(help="Samples of each.", min=1)] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=2)] = 512,
    device: Device = None,
    csv: Csv = None,
) -> None:
    """Groups: prompts x samples against as many separate prompts, until every sample has its second token."""
    from qerl.bench.prefill import measure

    shape = _shape(shape, device)
    rows = measure(shape, base, rank, (prompts, samples), prompt, device, say)
    measured(rows, ("prompts", "samples", "prompt", "ms"), f"{shape} as {base}, LoRA r = {rank}: prefill", csv)


@bench.command("startup")
def bench_startup(
    shape: OneShape = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the model.", show_default="the temporary folder")
    ] = None,
    device: Device = None,
    csv: Csv = None,
) -> None:
    """From a local NVFP4 checkpoint to the first token: seconds since the process was started, in two runs."""
    from qerl.bench.startup import measure

    shape = _shape(shape, device)
    columns = ("run", "imported_s", "loaded_s", "engine_s", "first_token_s", "decoding_s")
    measured(measure(shape, folder, device, say), columns, f"{shape} as nvfp4: start-up", csv)


@bench.command("logprobs")
def bench_logprobs(
    shape: OneShape = None,
    base: Annotated[str, typer.Option(help="nvfp4, bf16, mxfp4, nf4 or bitsandbytes.")] = "nvfp4",
    rank: Annotated[int, typer.Option(help="LoRA's rank.", min=1)] = 32,
    sigma: Annotated[float, typer.Option(help="Noise.", min=0)] = 0.01,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 256,
    max_tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 256,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    device: Device = None,
    csv: Csv = None,
) -> None:
    """The sampler's log-probs against the trainer's, LoRA and noise on: mean and largest difference."""
    from qerl.bench.logprobs import measure

    shape = _shape(shape, device)
    lengths, columns = (prompt, max_tokens), ("trainer", "tokens", "mean", "max")
    rows = measure(shape, base, rank, sigma, batch, lengths, kv_cache_dtype, device, say)
    title = f"{shape} as {base}, LoRA r = {rank}, sigma {sigma:g}, cache {kv_cache_dtype}: |difference| of log-probs"
    measured(rows, columns, title, csv)


@bench.command("step")
def bench_step(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="Shapes of the random models, as qwen2.5-3b,qwen2.5-7b.")] = "toy",
    base: Annotated[
        str, typer.Option(help="Bases: bf16, nvfp4, mxfp4, nf4, bitsandbytes (NF4 on its own kernels, as in QLoRA).")
    ] = "bf16,nvfp4",
    tokens: Annotated[
        str | None, typer.Option(help="Packed tokens, as 8192,16384,32768: the training pass alone.")
    ] = None,
    segment: Annotated[int, typer.Option(help="With --tokens: tokens of a sequence.", min=2)] = 768,
    repeats: Annotated[int, typer.Option(help="With --tokens: passes; the median counts.", min=1)] = 3,
    profile: Annotated[bool, typer.Option("--profile", help="With --tokens: the GPU's time by kernel.")] = False,
    prompts: Annotated[
        int | None, typer.Option(help="Without --tokens: prompts of a step.", min=1, show_default="16, on a CPU 4")
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Without --tokens: completions of each.", min=2, show_default="8, on a CPU 4")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Without --tokens: tokens of a prompt.", min=1, show_default="256, on a CPU 64")
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(help="Without --tokens: tokens of a completion.", min=1, show_default="512, on a CPU 64"),
    ] = None,
    running: Annotated[str, typer.Option(help="Without --tokens: sequences in flight at most, as 8,32,128.")] = "128",
    micro_batch: Annotated[
        int, typer.Option(help="Without --tokens: packed tokens of a forward and backward pass.", min=1)
    ] = 16384,
    updates: Annotated[
        int, typer.Option(help="Without --tokens: updates a step; above 1 with old log-probs.", min=1)
    ] = 1,
    steps: Annotated[int, typer.Option(help="Without --tokens: steps; the first does not count.", min=2)] = 3,
    rank: Annotated[int, typer.Option(help="LoRA's rank.", min=1)] = 32,
    recompute: Annotated[str, typer.Option(help="Blocks that are recomputed: auto, all, none, a number.")] = "auto",
    limit_gb: Annotated[
        float | None, typer.Option(help="Without --tokens: leave only so much of the GPU, context included.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    csv: Csv = None,
) -> None:
    """A whole step of RL on random weights, part by part, with memory beside the plan's.

    With --tokens, the training pass alone: tokens/s, TFLOP/s, time of layers and log-probs, memory.

    On a CPU the defaults are small: done within about a minute.

    On a GPU, of_peak compares with an H200's 989 TFLOP/s in bf16, whatever GPU this is.
    """
    _refuse_unread(
        context,
        "tokens",
        with_it=("segment", "repeats", "profile"),
        without_it=("prompts", "group", "prompt", "new", "running", "micro_batch", "updates", "steps", "limit_gb"),
    )
    shapes, bases = list(_words(shape)), list(_words(base))
    if tokens is not None:
        from qerl.bench.training import Passes
        from qerl.bench.training import measure as passes

        job = Passes(shapes, bases, _numbers(tokens), segment, rank, recompute, repeats, device, profile)
        figures = ("shape", "base", "tokens", "recomputed", "tokens_per_s", "tflops", "of_peak", "x_bf16",
                   "x_bitsandbytes", "forward_ms", "logprob_ms", "head_products_ms", "backward_ms", "peak_gb",
                   "plan_gb", "plan_off")  # fmt: skip
        title = f"Forward and backward, LoRA r = {rank}{_note(device, '; of_peak: an H200, 989 TFLOP/s')}"
        measured(passes(job, say), figures, title, csv, turned=3)
        return
    from qerl.bench.step import ON_A_CPU, ON_A_GPU, Steps
    from qerl.bench.step import measure as whole

    prompts, group, prompt, new = _sizes((prompts, group, prompt, new), device, ON_A_GPU, ON_A_CPU)
    work = Steps(shapes, bases, _numbers(running), prompts, group, prompt, new, rank, recompute, micro_batch, steps,
                 updates, limit_gb, device)  # fmt: skip
    shown = ("shape", "base", "running", "step_s", "x_bf16", "x_bitsandbytes", "decode", "rollout_s", "reward_s",
             "old_logprobs_s", "forward_s", "backward_s", "optimizer_s", "switch_ms", "other_s",
             "rollout_tokens_per_s", "train_tokens_per_s", "recomputed", "peak_gb", "plan_gb", "plan_off", "device_gb",
             "plan_device_gb", "cache_gb", "last_s", "allocated_gb_step3", "allocated_gb_last")  # fmt: skip
    title = f"A step: {prompts} x {group} completions of {new} tokens, prompts of {prompt}"
    measured(whole(work, say), shown, title, csv, turned=3)


def _refuse_unread(context: typer.Context, switch: str, with_it: tuple[str, ...], without_it: tuple[str, ...]) -> None:
    """A command that measures two things, by whether `switch` is given, has options that only one of them reads: those
    of the other are refused where a person wrote them, even with their default."""
    given = context.params[switch] is not None
    written = [
        f"--{name.replace('_', '-')}"
        for name in (without_it if given else with_it)
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    ]
    if written and given:
        raise ValueError(f"With --{switch}, nothing reads {', '.join(written)}: leave out the one or the other.")
    if written:
        raise ValueError(f"Without --{switch}, nothing reads {', '.join(written)}: add --{switch}, or leave that out.")


def _numbers(text: str, least: int = 1) -> list[int]:
    words = _words(text)
    if not all(word.isdigit() and int(word) >= least for word in words):
        raise ValueError(f"{text!r} is no list of numbers from {least} up; write them as 1,8,32.")
    return [int(word) for word in words]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _shape(shape: str | None, device: str | None) -> str:
    from qerl.bench.machine import default_shape
    from qerl.device import resolve_device

    return shape or default_shape(resolve_device(device))


def _sizes(
    asked: tuple[int | None, ...], device: str | None, on_a_gpu: tuple[int, ...], on_a_cpu: tuple[int, ...]
) -> list[int]:
    """What was asked for, and else what is usual on the device."""
    from qerl.device import resolve_device

    usual = on_a_gpu if resolve_device(device).type == "cuda" else on_a_cpu
    return [usual[i] if size is None else size for i, size in enumerate(asked)]


def _note(device: str | None, about_a_gpu: str) -> str:
    """Part of a title that a CPU's table has no use for."""
    from qerl.device import resolve_device

    return about_a_gpu if resolve_device(device).type == "cuda" else ""


@bench.command("parity")
def bench_parity(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id, with a chat template.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with gsm8k_test.jsonl.")] = None,
    limit: Annotated[int, typer.Option(help="Only the first questions.", min=1)] = 100,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 256,
    batch_size: Annotated[int, typer.Option(help="Of lm-eval's hf model.", min=1)] = 1,
    csv: Csv = None,
) -> None:
    """`qerl eval` against lm-eval on GSM8K: greedy, float32, on the CPU, the same prompts and limits."""
    from qerl.bench.parity import compare

    columns = ("road", "questions", "accuracy", "exact_match", "other_prompts", "other_texts", "other_scores")
    title = f"GSM8K, first {limit} questions, {max_tokens} tokens; differences are from hf"
    measured(compare(model, data_dir, limit, max_tokens, batch_size, say), columns, title, csv)


@bench.command("formats")
def bench_formats() -> None:
    """Mean squared error of each format, rtn against mse, on three kinds of weights."""
    from qerl.bench.formats import measure

    table = Table("weights", "format", "bits", "rtn", "mse", "less", title="Mean squared error / variance")
    result = {}
    try:
        for row in measure():
            table.add_row(row.weights, row.format, f"{row.bits}", f"{row.rtn:.5f}", f"{row.mse:.5f}", f"{row.gain:.1%}")
            result[f"{row.weights}/{row.format}"] = {"rtn": row.rtn, "mse": row.mse}
    finally:  # after a Ctrl-C too
        if result:
            screen.print(table)
            finish(result)

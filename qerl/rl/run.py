"""A run from its configuration: everything checked and built before step 1, trained, and told about at the end."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl.config import Config
from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE, encode, load_tokenizer, stop_ids
from qerl.metrics import Listener, Metrics, last_step
from qerl.model.adapter import add_lora, load_adapter, read_settings, trained_parameters
from qerl.model.architecture import PROJECTIONS
from qerl.model.decoder import Decoder
from qerl.model.layers import LoraSettings
from qerl.model.loader import architecture_in, load
from qerl.model.shapes import shape_of
from qerl.quant.checkpoint import resolve
from qerl.recipe import build_config, default_recipe, load_config
from qerl.records import Sampling
from qerl.report import plot_run
from qerl.rl import checkpoint
from qerl.rl.card import PLOTS, share_run
from qerl.rl.checkpoint import RunState
from qerl.rl.data import PromptSource
from qerl.rl.display import Display, final_table, plan, stdout
from qerl.rl.folder import CHECKPOINTS, METRICS, claimed, cut_back, require_same, write_config
from qerl.rl.footprint import trained_weights
from qerl.rl.guard import optimizer_bytes, preflight
from qerl.rl.plan import recomputed_blocks, workload
from qerl.rl.push import require_login, require_repo_id, upload
from qerl.rl.ranks import ALONE, Ranks, join
from qerl.rl.schedule import layer_sigmas
from qerl.rl.sizes import longest_sequence, penalizes, require_context, running_sequences, total_steps
from qerl.rl.trainer import Trainer
from qerl.rl.update import Updater, make_optimizer, require_optimizer
from qerl.tasks.grader import Grader
from qerl.tasks.programs import program_rows, runs_programs
from qerl.tasks.rewards import RewardFunction, Rewards, reward_name
from qerl.tasks.shipped import reward_named
from qerl.tasks.task import FROM_PYTHON, task_named
from qerl.tasks.workers import Workers


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    output_dir: Path
    checkpoint: Path  # the last; its folder `adapter` is a PEFT adapter
    steps: int
    seconds: float  # of this call, loading and evaluation included
    before: dict[str, float]  # evaluation before and after, where there was one
    after: dict[str, float]
    pushed: str | None = None  # the adapter's address on the hub, where it was pushed

    def summary(self) -> dict[str, Any]:
        found = {
            "accuracy_before": self.before.get("eval_accuracy"),
            "accuracy_after": self.after.get("eval_accuracy"),
            "reward_before": self.before.get("eval_reward"),
            "reward_after": self.after.get("eval_reward"),
        }
        return found | {
            "seconds": round(self.seconds, 1),
            "steps": self.steps,
            "output_dir": str(self.output_dir),
            "checkpoint": str(self.checkpoint),
            "pushed": self.pushed,
        }


def train(
    config: Config | dict[str, Any] | str | Path | None = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction | str] | None = None,
    train_dataset: Sequence[dict[str, Any]] | None = None,
    eval_dataset: Sequence[dict[str, Any]] | None = None,
    resume: bool = False,
) -> Result:
    """Train by a configuration (a Config, nested values, or a recipe's path), on a task's data and rewards or on yours.

    reward_funcs and rows follow TRL's contract (`qerl.tasks.rewards`); a data set is any sequence of rows with
    `prompt`. Started by torchrun, this process is one of several that do the run together (docs/multi_gpu.md).
    """
    if not isinstance(config, Config | dict | str | Path | None):
        raise ValueError(
            f"Settings are a dict, a recipe's path or a qerl Config, not {type(config).__name__}. From TRL's "
            "GRPOConfig write the ones you set as a dict: most names are the same (docs/from_trl.md)."
        )
    if not isinstance(config, Config):
        recipe = Path(config) if isinstance(config, str | Path) else default_recipe() if train_dataset is None else None
        config = build_config(config) if isinstance(config, dict) else load_config(recipe)
    output, started, pushed = Path(config.output_dir), time.monotonic(), None
    ranks = join(config)
    with claimed(output, resume) if ranks.first else nullcontext():
        trainer = build(config, reward_funcs, train_dataset, eval_dataset, resume, ranks)
        with trainer.metrics, trainer.rewards.workers or nullcontext():
            trainer.train()
        ranks.leave()
        if ranks.first:
            plots = plot_run(output / METRICS, output / PLOTS)
            pushed = _share(config, plots, trainer.display)
    state = trainer.state
    if state.after and ranks.first:
        stdout().print(final_table(state.before, state.after))
    last = checkpoint.path_of(output / CHECKPOINTS, state.step)
    return Result(output, last, state.step, time.monotonic() - started, state.before, state.after, pushed)


def build(
    config: Config,
    reward_funcs: RewardFunction | Sequence[RewardFunction | str] | None = None,
    train_dataset: Sequence[dict[str, Any]] | None = None,
    eval_dataset: Sequence[dict[str, Any]] | None = None,
    resume: bool = False,
    ranks: Ranks = ALONE,
) -> Trainer:
    """Everything checked, loaded and tried; what is left is the loop."""
    config = _with_adapter(config)
    require_optimizer(config.optim)
    if resume:
        require_same(config, Path(config.output_dir))
    if config.report_to and ranks.first:
        from qerl.integrations.trackers import require_installed

        require_installed(config.report_to)
    if config.push_to_hub and ranks.first:
        require_repo_id(config.hub_model_id or config.output_dir.name)
        require_login()
    rewards, rows, eval_rows = _task(config, reward_funcs, train_dataset, eval_dataset)
    try:
        return _trainer(config, rewards, rows, eval_rows, resume, train_dataset is not None, ranks)
    except BaseException:
        if rewards.workers is not None:
            rewards.workers.close()
        raise


def _trainer(
    config: Config,
    rewards: Rewards,
    rows: Sequence[dict[str, Any]],
    eval_rows: Sequence[dict[str, Any]],
    resume: bool,
    from_python: bool,
    ranks: Ranks,
) -> Trainer:
    output = Path(config.output_dir)
    total = total_steps(config, len(rows))
    display = Display(total, Console(stderr=True, quiet=not ranks.first))
    begun = (config.model_dump_json(), len(rows), len(eval_rows), rewards.names)
    ranks.require_same(begun, "settings, data or rewards. Start all with the same command.")
    saved = _newest(output, resume, ranks, display)
    done = 0 if saved is None else int(saved.name.removeprefix("step-"))
    if saved is not None:
        display.say(f"Going on after step {done} of {total}.")
    display.say(f"Loading {config.model} as {config.base} ...")
    folder = resolve(config.model, partial(_require_fitting, config))
    tokenizer = load_tokenizer(folder)
    sampling = _sampling(config, stop_ids(folder, tokenizer))
    source = PromptSource(rows, tokenizer, config.seed, config.max_prompt_length)
    if config.eval_size and not eval_rows:
        display.say("There are no held-out rows, so nothing is evaluated (in Python, eval_dataset brings some).")
    eval_rows = _short_enough(eval_rows, tokenizer, config, display)
    shape, model = shape_of(str(folder)), _load(config)
    optimizer = make_optimizer(config, list(trained_parameters(model).values()))
    again = recomputed_blocks(config, shape, model.device)
    updater = Updater(config, model, optimizer, ranks, again)
    trial = preflight(config, updater, display.say) if done < total else {}
    state = RunState(rows=len(rows), rewards=rewards.names)
    if saved is not None:
        state = checkpoint.restore(saved, model, optimizer)
        if (state.rows, state.rewards) != (len(rows), rewards.names):
            raise ValueError(
                f"The run was begun on {state.rows} rows with the rewards {', '.join(state.rewards)}; these are "
                f"{len(rows)} with {', '.join(rewards.names)}. Resume it as it was begun, with the same arguments."
            )
        if state.step > total:
            raise ValueError(
                f"The run has done {state.step} steps already; max_steps={total} would undo some. Raise it."
            )
        if state.step == total:
            display.say(f"All {total} steps are done. To go on, raise max_steps.")
    updater.require_same_weights()
    logged = last_step(output / METRICS)
    if saved is None and ranks.first:
        cut_back(output, -1, -1)  # killed before the first checkpoint, a run starts over
    elif ranks.first:
        cut_back(output, state.step, state.evaluated)
    engine = _engine(config, model, tokenizer, state, len(eval_rows), optimizer_bytes(config, updater), ranks)
    trained = sum(p.numel() for p in trained_parameters(model).values())
    display.say(plan(config, total, len(rows), trained, state.cache_blocks, trial, ranks.world))
    if ranks.first:
        output.mkdir(parents=True, exist_ok=True)
        write_config(config.model_copy(update={"task": FROM_PYTHON}) if from_python else config, output)
        metrics = Metrics(output / METRICS, _trackers(config, state.step if saved else None, logged, display))
    else:
        metrics = Metrics(Path(os.devnull))
    return Trainer(
        config=config,
        model=model,
        tokenizer=tokenizer,
        sampler=engine,
        sampling=sampling,
        source=source,
        eval_rows=eval_rows,
        rewards=rewards,
        updater=updater,
        state=state,
        total_steps=total,
        metrics=metrics,
        display=display,
        ranks=ranks,
    )


def _newest(output: Path, resume: bool, ranks: Ranks, display: Display) -> Path | None:
    """The checkpoint to go on from, found by rank 0, which may put damaged ones aside."""
    saved = None
    if ranks.first:
        saved = checkpoint.newest_whole(output / CHECKPOINTS, display.warn) if resume else None
        if saved is None:
            checkpoint.require_some(output / CHECKPOINTS)
    saved = ranks.gather(saved)[0]
    if saved is not None and not saved.is_dir():
        raise ValueError(f"Rank {ranks.rank} can't see {saved}. Name an output_dir on a disk that all ranks share.")
    return saved


def _share(config: Config, plots: list[Path], display: Display) -> str | None:
    """The adapter with its card, and on the hub if that was asked for. A push that fails is said; the run is whole."""
    if config.base == "full":
        return None
    output = Path(config.output_dir)
    folder = share_run(output, plots, checkpoint.checkpoints(output / CHECKPOINTS)[-1])
    if not config.push_to_hub:
        return None
    try:
        return upload(folder, config.hub_model_id or output.name, config.hub_private_repo)
    except ValueError as error:
        display.warn(str(error))
        return None


def _trackers(config: Config, done: int | None, logged: int, display: Display) -> Listener | None:
    """Trackers that the configuration names. done: the step that a run goes on from."""
    if not config.report_to:
        return None
    from qerl.integrations.trackers import start

    return start(config, done, logged, display.warn)


def _task(
    config: Config,
    reward_funcs: RewardFunction | Sequence[RewardFunction | str] | None,
    train_dataset: Sequence[dict[str, Any]] | None,
    eval_dataset: Sequence[dict[str, Any]] | None,
) -> tuple[Rewards, Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Rewards, training rows and held-out rows: the arguments, else the task's."""
    asked: Any = reward_funcs if reward_funcs is not None else config.reward_funcs
    functions = [asked] if callable(asked) or isinstance(asked, str) else asked
    if functions is None and train_dataset is not None:
        raise ValueError("Your own train_dataset needs reward_funcs.")
    task = task_named(config) if train_dataset is None else None
    own = {reward_name(function): function for function in task.rewards} if task else {}
    if not functions and not own:
        raise ValueError(f"The task {config.task} brings no rewards: name some in reward_funcs.")
    found = [
        reward_named(f, own, config.max_completion_length, config.reward_timeout) if isinstance(f, str) else f
        for f in functions or own.values()
    ]
    graders = [function for function in found if isinstance(function, Grader)]
    rewards = Rewards(found, config.reward_weights, None, config.reward_timeout)
    rewards.accuracy_index(config.dynamic_sampling.metric)  # refuses a name that is not there
    rows: Any = task.train if task else train_dataset
    held_out: Any = eval_dataset if eval_dataset is not None else task.test if task else []
    if task and not len(rows):
        raise ValueError(f"The task {config.task} is for evaluation only: it has no training rows.")
    if runs_programs(found):
        rows, held_out = program_rows(rows, config.code.unsafe), program_rows(held_out, config.code.unsafe)
    for name, data in (("train_dataset", rows), ("eval_dataset", held_out)):
        if isinstance(data, dict):
            raise ValueError(
                f"{name} must be a sequence of rows, not a dict of {', '.join(map(str, data))}. Of a data set's splits "
                "give one, such as data['train']."
            )
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(f"{name} must be a sequence of rows with a length (a list, a datasets.Dataset).")
        first_rows = data if isinstance(data, list) else [data[i] for i in range(min(1, len(data)))]  # may be costly
        for number, row in enumerate(first_rows, 1):
            if "prompt" not in row:
                raise ValueError(f"A row of {name} needs a `prompt` column; row {number} has {', '.join(row)}.")
    if not len(rows):
        raise ValueError("train_dataset has no rows.")
    rewards.require_columns(rows)
    if graders:  # started last, when nothing of the above is refused
        rewards.workers = Workers(config.reward_workers, config.reward_memory_mb, graders)
    return rewards, rows, [dict(held_out[i]) for i in range(min(len(held_out), config.eval_size))]


def _short_enough(
    rows: Sequence[dict[str, Any]], tokenizer: Any, config: Config, display: Display
) -> list[dict[str, Any]]:
    """Held-out rows that training would take too."""
    kept = [row for row in rows if 0 < len(encode(tokenizer, row["prompt"])) <= config.max_prompt_length]
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        display.warn(f"{dropped} of the held-out prompts are empty or longer than max_prompt_length: left out.")
    return kept


def _with_adapter(config: Config) -> Config:
    """The settings with those of init_adapter in them; others that were given are refused."""
    if config.init_adapter is None:
        return config
    found = read_settings(config.init_adapter)
    targets = "all-linear" if set(found.target_modules) == set(PROJECTIONS) else found.target_modules
    own = {
        "lora_r": found.r,
        "lora_alpha": float(found.lora_alpha),
        "lora_target_modules": targets,
        "train_norms": found.train_norms,
    }
    for key, value in own.items():
        given = getattr(config, key)
        if key in config.model_fields_set and given != value:
            raise ValueError(
                f"{key}={given} is not that of init_adapter, which a run goes on with. Drop it, or write {key}={value}."
            )
    return config.model_copy(update=own)


def _require_fitting(config: Config, folder: Path) -> None:
    """What the model's configuration can refuse of the settings, before weights are fetched or read."""
    architecture_in(folder)
    shape = shape_of(str(folder))
    require_context(config, shape.context)
    layer_sigmas(config.noise, 0.0, shape.layers)
    trained_weights(shape, workload(config, shape, 0))  # by blocks to recompute and LoRA's targets


def _load(config: Config) -> Decoder:
    """The model with what is trained."""
    device = None if config.device == "auto" else config.device
    dtype = None if config.dtype == "auto" else config.dtype
    model = load(config.model, "bf16" if config.base == "full" else config.base, device, dtype)
    if config.base == "full":
        model.train_in_full()
    elif config.init_adapter is not None:
        load_adapter(model, config.init_adapter)
    else:
        targets = config.lora_target_modules
        add_lora(
            model,
            LoraSettings(config.lora_r, config.lora_alpha, targets, train_norms=config.train_norms),
            seed=config.seed,
        )
    return model


def _sampling(config: Config, ends: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop_ids=ends,
        seed=config.seed,
        noise=config.noise.schedule != "off",
    )


def _engine(
    config: Config, model: Decoder, tokenizer: Any, state: RunState, eval_rows: int, reserve: int, ranks: Ranks
) -> Engine:
    """The block count is found once for a number of ranks and recorded in the state. reserve: what the optimizer will
    hold."""
    running = running_sequences(config, eval_rows, ranks.world)
    if not state.cache_blocks or state.ranks != ranks.world:
        lengths = [longest_sequence(config)] * running
        blocks = blocks_that_fit(model, BLOCK_SIZE, lengths, reserve, config.kv_cache_dtype, penalizes(config))
        state.cache_blocks, state.ranks = min(ranks.gather(blocks)), ranks.world
    options: dict[str, Any] = {"max_running": running, "tokenizer": tokenizer, "kv_cache_dtype": config.kv_cache_dtype}
    return Engine(model, state.cache_blocks, BLOCK_SIZE, **options)

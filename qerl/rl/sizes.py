"""How large the pieces of a run are, from its settings alone."""

from qerl.config import Config
from qerl.engine.engine import MAX_RUNNING

OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2}  # two moments a weight, in 4 bytes or in one


def longest_sequence(config: Config) -> int:
    return config.max_prompt_length + config.max_completion_length


def total_steps(config: Config, rows: int) -> int:
    if config.max_steps > 0:
        return config.max_steps
    if config.max_steps == 0:
        raise ValueError("max_steps is 0: there is nothing to train. Give a number, or -1 to go by num_train_epochs.")
    return max(1, round(config.num_train_epochs * rows / config.prompts_per_step))


def running_sequences(config: Config, eval_rows: int, ranks: int = 1) -> int:
    """How many the engine decodes at a time, at most; with several ranks each of their engines."""
    prompts, rows = -(-config.prompts_per_step // ranks), -(-eval_rows // ranks)
    return min(MAX_RUNNING, max(prompts * config.num_generations, rows))


def largest_micro_batch(config: Config) -> int:
    """Tokens: an update's, up to micro_batch_tokens; but one sequence is never cut."""
    longest = longest_sequence(config)
    update = longest * config.prompts_per_step * config.num_generations // config.steps_per_generation
    return max(longest, min(config.micro_batch_tokens, update))

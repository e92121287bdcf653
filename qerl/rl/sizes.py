"""How large the pieces of a run are, from its settings alone."""

from qerl.config import Config
from qerl.engine.engine import MAX_RUNNING

OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2}  # two moments a weight, in 4 bytes or in one


def longest_sequence(config: Config) -> int:
    return config.max_prompt_length + config.max_completion_length


def require_context(config: Config, context: int) -> None:
    """The model must be able to see a prompt and its completion at their longest."""
    longest = longest_sequence(config)
    if longest > context:
        prompt = min(config.max_prompt_length, context // 2)
        raise ValueError(
            f"max_prompt_length={config.max_prompt_length} and max_completion_length={config.max_completion_length} "
            f"make {longest} tokens; the model's context is {context}. Write for example max_prompt_length={prompt} "
            f"max_completion_length={context - prompt}."
        )


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


def penalizes(config: Config) -> bool:
    """Whether repetition is penalized in sampling."""
    return config.repetition_penalty != 1.0


def largest_micro_batch(config: Config) -> int:
    """Tokens: an update's, up to micro_batch_tokens; but one sequence is never cut."""
    groups = config.prompts_per_step // config.steps_per_generation
    return max(longest_sequence(config), min(config.micro_batch_tokens, groups * group_tokens(config)))


def longest_groups(config: Config, tokens: int) -> list[tuple[int, list[int]]]:
    """The lengths of prompts and of their completions, at their longest, that are so many tokens together; the last
    group is what is left."""
    groups = []
    while tokens > 1:
        prompt = min(config.max_prompt_length, tokens - 1)
        tokens -= prompt
        completions: list[int] = []
        while tokens and len(completions) < config.num_generations:
            completions.append(min(config.max_completion_length, tokens))
            tokens -= completions[-1]
        groups.append((prompt, completions))
    return groups


def copied_keys(config: Config) -> int:
    """Of the largest micro-batch: every completion has its prompt's and its own. 0 where no prompt has several."""
    groups = longest_groups(config, largest_micro_batch(config))
    if all(len(completions) == 1 for _, completions in groups):
        return 0
    return sum(prompt + completion for prompt, completions in groups for completion in completions)


def group_tokens(config: Config) -> int:
    """That an update computes of a prompt and its completions at their longest: the prompt once in each of the micro-
    batches over which they are cut."""
    prompt, completion = config.max_prompt_length, config.max_completion_length
    together = max(1, (config.micro_batch_tokens - prompt) // completion)
    return -(-config.num_generations // together) * prompt + config.num_generations * completion

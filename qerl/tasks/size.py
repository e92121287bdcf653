"""How many training rows a task has, without a download."""

from qerl.config import Config
from qerl.tasks import reasoning
from qerl.tasks.source import local_file
from qerl.tasks.task import GENERATED_LENGTH, load_task, registered


def training_rows(config: Config) -> int | None:
    """None: not known before the data is there. What can't be trained on is refused."""
    name = config.task
    if name in ("arithmetic", "countdown"):
        return GENERATED_LENGTH
    if name.startswith(reasoning.PREFIX):
        return reasoning.LENGTH
    data = registered(name)
    if data is None:
        return len(load_task(name, splits=()).train) or None  # a file's rows; refuses a name that means nothing
    if data.train is None:
        raise ValueError(f"The task {name} is for evaluation only: it has no training rows.")
    if local_file(data.train, config.data_dir) is not None:
        return len(load_task(name, data_dir=config.data_dir, splits=("train",)).train)
    return data.train_rows

"""An adapter on the hub: which folder that is, and its upload. A push that fails leaves the folder for another try."""

import json
import shutil
from pathlib import Path

from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.report import plot_run
from qerl.rl.card import CARD, PLOTS, REPOSITORY, adapter_card, share_run
from qerl.rl.checkpoint import checkpoints, find_checkpoint
from qerl.rl.folder import CHECKPOINTS, CONFIG, METRICS

LOGIN = "Log in by `hf auth login`, or set HF_TOKEN"


def shared_folder(place: Path, into: Path | None = None) -> Path:
    """The folder to upload, with its card, for a run, one of its checkpoints, or a PEFT adapter's folder. into: where
    it is written (dry runs), so that the place stays as it is."""
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    for folder in (place, place.parent):  # a checkpoint, or its folder `adapter`
        if folder.parent.name == CHECKPOINTS and (folder.parent.parent / CONFIG).is_file():
            run = folder.parent.parent
            return share_run(run, plot_run(run / METRICS, (into or run) / PLOTS), find_checkpoint(folder), into)
    if (place / ADAPTER_CONFIG).is_file():
        return _adapter_folder(place, into)
    if not (place / CONFIG).is_file():
        raise ValueError(f"{place} is neither a run's folder nor a PEFT adapter ({ADAPTER_CONFIG}).")
    if not checkpoints(place / CHECKPOINTS):
        raise ValueError(f"{place} has no checkpoint yet: there is nothing to share. The first comes after save_steps.")
    return share_run(place, plot_run(place / METRICS, (into or place) / PLOTS), find_checkpoint(place), into)


def _adapter_folder(place: Path, into: Path | None) -> Path:
    folder = place if into is None else shutil.copytree(place, into / place.resolve().name)
    if not (folder / CARD).exists():
        base = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or "unknown"
        (folder / CARD).write_text(adapter_card(folder, base), encoding="utf-8")
    return folder


def name_repository(folder: Path, repo_id: str) -> None:
    """Write into the card where it goes."""
    path = folder / CARD
    path.write_text(path.read_text(encoding="utf-8").replace(REPOSITORY, repo_id), encoding="utf-8")


def require_repo_id(repo_id: str) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"{repo_id!r} is no name for a repository; write owner/name or name. {error}") from error


def require_login() -> None:
    """Before a run that is to be pushed at its end."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(f"push_to_hub needs an account on the hub. {LOGIN}; or drop push_to_hub and push later.")


def upload(folder: Path, repo_id: str, private: bool | None = None) -> str:
    """Make the repository if there is none, upload the folder in one commit; returns its address."""
    import httpx
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        name_repository(folder, made.repo_id)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Adapter trained with qerl")
    except (OSError, httpx.HTTPError, ValueError) as error:  # the hub's own errors are among these
        hidden = " --private" if private else ""
        away = isinstance(error, httpx.TransportError | ConnectionError)
        advice = "See that there is a way to the hub from here," if away else f"{LOGIN} where that is missing,"
        raise ValueError(
            f"Could not push to {repo_id}: {str(error).strip() or repr(error)}\nNothing is lost: {folder} is ready. "
            f"{advice} and try again: qerl push {folder} {repo_id}{hidden}"
        ) from error
    return str(made)

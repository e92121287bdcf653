"""An adapter on the hub: which folder that is, and its upload. A push that fails leaves the folder for another try."""

import json
from pathlib import Path

from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.report import plot_run
from qerl.rl.card import CARD, PLOTS, adapter_card, share_run
from qerl.rl.folder import CHECKPOINTS, CONFIG, METRICS

LOGIN = "Log in by `hf auth login`, or set HF_TOKEN"


def shared_folder(place: Path) -> Path:
    """The folder to upload, with its card, for a run, one of its checkpoints, or a PEFT adapter's folder."""
    for folder in (place, place.parent):  # a checkpoint, or its folder `adapter`
        if folder.parent.name == CHECKPOINTS and (folder.parent.parent / CONFIG).is_file():
            run = folder.parent.parent
            return share_run(run, plot_run(run / METRICS, run / PLOTS), folder)
    if (place / CONFIG).is_file() and (place / CHECKPOINTS).is_dir():
        return share_run(place, plot_run(place / METRICS, place / PLOTS))
    if not (place / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{place} is neither a run's folder nor a PEFT adapter ({ADAPTER_CONFIG}).")
    if not (place / CARD).exists():
        base = json.loads((place / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or "unknown"
        (place / CARD).write_text(adapter_card(place, base), encoding="utf-8")
    return place


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
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Adapter trained with qerl")
    except (OSError, httpx.HTTPError, ValueError) as error:  # the hub's own errors are among these
        hidden = " --private" if private else ""
        raise ValueError(
            f"Could not push to {repo_id}: {str(error).strip() or repr(error)}\nNothing is lost: {folder} is ready. "
            f"{LOGIN} where that is missing, and try again: qerl push {folder} {repo_id}{hidden}"
        ) from error
    return str(made)

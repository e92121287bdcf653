"""`qerl push`."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qerl.console import finish, say, screen


def push(
    place: Annotated[Path, typer.Argument(help="A run's folder, one of its checkpoints, or a PEFT adapter.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the hub, as owner/name or name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder and its card to a temporary place; upload nothing.")
    ] = False,
) -> None:
    """Upload a trained adapter with its model card to the Hugging Face hub."""
    from qerl.rl.push import name_repository, require_repo_id, shared_folder, upload

    require_repo_id(repo_id)
    folder = shared_folder(place, Path(tempfile.mkdtemp(prefix="qerl-push-")) if dry_run else None)
    if dry_run:
        name_repository(folder, repo_id)
    table = Table("file", "bytes", title=str(folder))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        table.add_row(str(path.relative_to(folder)), f"{path.stat().st_size:,}")
    screen.print(table)
    if not dry_run:
        say(f"Uploading to {repo_id} ...")
    address = None if dry_run else upload(folder, repo_id, private or None)
    finish({"folder": folder, "repo_id": repo_id, "address": address})

"""The films of an evaluation: some of its episodes as a person would watch them.

Film        one episode: its screenshots, texts and actions; FilmFrame one step of it
read_films  those of an evaluation; films_dir is where they are, with their screenshots
write_shot  keeps one screenshot
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from bus.errors import RunDirectoryError
from bus.messages import Outcome, PointerMap
from dart_cli.evaluation.results import eval_dir
from dart_cli.runtime.work_folder import StoredModel
from envs.contract.blobs import content_hash, image_suffix


class FilmFrame(StoredModel):
    """One step of a film."""

    screenshot: str  # file name
    text: str  # the completion
    action: dict[str, Any] | None = None  # None where the text was none
    pointed: list[PointerMap] = Field(default_factory=list)  # where the policy looked to point


class Film(StoredModel):
    """One episode as a person would watch it."""

    task_id: str
    seed: int
    instruction: str
    outcome: Outcome
    reason: str
    frames: list[FilmFrame]
    last: str  # file name of the screenshot after the last action


class Films(StoredModel):
    """The films of one evaluation; their screenshots are beside the file."""

    films: list[Film]


def read_films(run_dir: Path, name: str) -> list[Film]:
    """Return the films of the evaluation called `name`; none if it kept none. Raises RunDirectoryError."""
    path = films_dir(run_dir, name) / "films.json"
    try:
        return Films.model_validate_json(path.read_bytes()).films if path.exists() else []
    except ValidationError:
        raise RunDirectoryError(
            f"{path}: films of another version of dart; remove its folder, or evaluate again"
        ) from None


def films_dir(run_dir: Path, name: str) -> Path:
    """Where the films and screenshots of one evaluation are kept."""
    return eval_dir(run_dir) / f"{name}-films"


def write_shot(folder: Path, shot: bytes) -> str:
    """Keep an encoded screenshot under its content's name, which is returned."""
    path = folder / f"{content_hash(shot)}.{image_suffix(shot)}"
    if not path.exists():
        path.write_bytes(shot)
    return path.name

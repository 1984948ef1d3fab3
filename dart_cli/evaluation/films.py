"""The stored films of an evaluation: the screenshots, texts and actions of some of its episodes.

Film        one episode
FilmFrame   one step of a film
Films       all films of one evaluation, as one file
read_films  reads the films of an evaluation
films_dir   the folder of the films and their screenshots
write_shot  writes one screenshot
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
    action: dict[str, Any] | None = None  # None if the text was not an action
    # Where the pointers of the policy looked.
    pointed: list[PointerMap] = Field(default_factory=list)
    # The actions that were performed after it, in order.
    more_actions: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def actions(self) -> list[dict[str, Any]]:
        """All actions of the step, in order."""
        return [] if self.action is None else [self.action, *self.more_actions]


class Film(StoredModel):
    """One episode as a film."""

    task_id: str
    seed: int
    instruction: str
    outcome: Outcome
    reason: str
    frames: list[FilmFrame]
    last: str  # file name of the screenshot after the last action


class Films(StoredModel):
    """The films of one evaluation. Their screenshots are files in the same folder."""

    films: list[Film]


def read_films(run_dir: Path, name: str) -> list[Film]:
    """Return the films of the evaluation `name`, which may have none. Raises RunDirectoryError."""
    path = films_dir(run_dir, name) / "films.json"
    try:
        return Films.model_validate_json(path.read_bytes()).films if path.exists() else []
    except ValidationError:
        raise RunDirectoryError(
            f"{path}: another version of dart wrote these films; remove the folder, or evaluate again"
        ) from None


def films_dir(run_dir: Path, name: str) -> Path:
    """Return the folder of the films and screenshots of one evaluation."""
    return eval_dir(run_dir) / f"{name}-films"


def write_shot(folder: Path, shot: bytes) -> str:
    """Write an encoded screenshot, named by the hash of its content, and return the file name."""
    path = folder / f"{content_hash(shot)}.{image_suffix(shot)}"
    if not path.exists():
        path.write_bytes(shot)
    return path.name

"""Reads and checks the training data, before a model is loaded.

ItemData     items of grounding sets, or rows for a verifier
ActionData   episodes that were played elsewhere
read_data    reads what `tune.data` names: items, episodes or trajectories
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bus.errors import UserError
from dart_cli.config.model_folder import VERIFIER
from dart_cli.config.schema import Config
from dart_cli.grounding.items import Item, pictures_digest
from dart_cli.grounding.reader import read_set
from dart_cli.policy.verifier import VerifierSpec
from dart_cli.tune.episodes import EPISODES, Demonstration, read_episodes
from dart_cli.tune.trajectories import Trajectories, is_parquet, is_run, read_trajectories
from dart_cli.tune.verifier_rows import ROWS, read_rows
from envs.contract.actions import action_to_dict
from envs.contract.blobs import content_hash


@dataclass(frozen=True)
class ItemData:
    """Items of grounding sets, or rows for a verifier."""

    items: list[Item]
    digest: str  # of all that was read
    description: str  # what was read, and what was left out
    verifier: VerifierSpec | None = None  # how the pictures of a verifier's rows were made

    def __len__(self) -> int:
        return len(self.items)

    @property
    def names(self) -> list[str]:
        """The screenshot of each item [N]."""
        return [str(item.image) for item in self.items]


@dataclass(frozen=True)
class ActionData:
    """Episodes that were played elsewhere."""

    demonstrations: list[Demonstration]
    digest: str  # of all that was read
    description: str

    def __len__(self) -> int:
        """Return the number of learned steps."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """The episode of each learned step [N]."""
        steps = (
            (demonstration.id, step)
            for demonstration in self.demonstrations
            for step in demonstration.steps
        )
        return [name for name, step in steps if step.learned]


def read_data(config: Config) -> ItemData | ActionData | Trajectories:
    """Read what `tune.data` names. The caller must close Trajectories.

    Raises UserError; for a malformed row it names the file and the place.
    """
    folders = [Path(name) for name in config.tune.data]
    kinds = [_kind_of(folder) for folder in folders]
    for folder, kind in zip(folders, kinds, strict=True):
        if kind != kinds[0]:
            raise UserError(
                f"tune.data: {folders[0]} has {kinds[0]} and {folder} has {kind}; learn them one after the other"
            )
    if kinds[0] == "trajectories":
        return read_trajectories(folders, config)
    if kinds[0] == "episodes":
        return _actions(folders)
    if kinds[0] == "items":
        return _grounding(folders)
    if len(folders) > 1:
        raise UserError(f"tune.data: {folders[0]} has rows for a verifier, which are learned alone")
    read = read_rows(folders[0])
    spec = VerifierSpec.of(folders[0])
    digest = f"{read.digest}{pictures_digest(read.items)}"
    return ItemData(read.items, digest, f"{len(read.items)} rows for a verifier", spec)


def _kind_of(folder: Path) -> str:
    """Return the kind of training data in a folder or file, by the files that it has."""
    if is_run(folder):
        return "trajectories"
    if (folder / EPISODES).is_file():
        return "episodes"
    if (folder / ROWS).is_file() and (folder / VERIFIER).is_file():
        return "rows for a verifier"
    return "trajectories" if is_parquet(folder) else "items"


def _grounding(folders: Sequence[Path]) -> ItemData:
    """Return the items of grounding sets that name a place. Raises UserError for malformed rows."""
    items: list[Item] = []
    without = 0
    digests: list[str] = []
    for folder in folders:
        grounding_set = read_set(folder)
        if malformed := grounding_set.malformed:
            raise UserError(
                f"{len(malformed)} of {len(malformed) + len(grounding_set.items)} rows of {folder} are malformed, "
                f"the first is {malformed[0]}; correct the files"
            )
        items += [item for item in grounding_set.items if item.region is not None]
        without += grounding_set.refusals
        digests += [grounding_set.digest, pictures_digest(grounding_set.items)]
    if not items:
        raise UserError(f"{folders[0]} has no items that name a place; is it the whole set?")
    description = f"{len(items)} items of grounding sets"
    description += f"; {without} that name no place are left out" if without else ""
    digest = hashlib.blake2b("\n".join(digests).encode()).hexdigest()
    return ItemData(items, digest, description)


def _actions(folders: Sequence[Path]) -> ActionData:
    """Return the episodes of folders. Raises UserError if there is no step to learn."""
    rows = [row for folder in folders for row in read_episodes(folder)]
    data = ActionData(rows, _digest_of(rows), f"{len(rows)} episodes")
    if not len(data):
        raise UserError(f"{folders[0]} has no step to learn; is it the whole set?")
    return data


def _digest_of(rows: Sequence[Demonstration]) -> str:
    """Return a digest of everything that some episodes teach, pictures included, but not of their paths."""
    digest = hashlib.blake2b(digest_size=16)
    hashes: dict[Path, str] = {}
    for row in rows:
        digest.update(json.dumps([row.instruction, len(row.steps)]).encode())
        for step in row.steps:
            if step.screenshot not in hashes:
                hashes[step.screenshot] = content_hash(step.screenshot.read_bytes())
            action, *more = map(action_to_dict, step.actions)
            parts = [hashes[step.screenshot], action, step.thought, step.learned]
            if more:
                parts.append(more)
            digest.update(json.dumps(parts, sort_keys=True).encode())
    return digest.hexdigest()

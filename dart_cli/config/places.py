"""Mistakes of a configuration's places: folders, files, sockets, and how weights travel.

Mistake   a key, and what is wrong with it
cannot_be_made   why a directory cannot be made
refuse_out  the error where a folder cannot be new
closed    paths that the system does not let us read
places    run.dir and weights.directory: a file, or nowhere that they could be made
pool      folders of data.pool that are not there
bus       keys and addresses that do not fit
weights   settings of the channel that exclude each other
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bus.errors import UserError
from bus.loopback import is_loopback
from dart_cli.config.endpoints import KEY_FILE
from dart_cli.config.load import shown
from dart_cli.config.models import model_folder
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    from bus.messages import Role


class Mistake(NamedTuple):
    """`key` and the rest of a sentence that begins with it."""

    key: str
    text: str


def closed(config: Config, role: Role | None) -> Iterator[Mistake]:
    """Paths that the system does not let us read: a name too long, a folder of another user."""
    paths = {
        "run.dir": config.run.dir,
        "weights.directory": config.weights.directory,
        "bus.keys": config.bus.keys,
    }
    if role in (None, "data"):
        paths |= {f"data.pool[{index}]": path for index, path in enumerate(config.data.pool)}
    if role in (None, "rollout", "train", "eval"):
        paths["model.path"] = model_folder(config.model.path)
    for key, path in paths.items():
        if path is None:
            continue
        try:
            path.exists()
        except OSError as error:
            yield Mistake(key, f"cannot be read: {error.strerror}; choose another, got {path}")


def places(config: Config) -> Iterator[Mistake]:
    """A run directory or folder of weights that is a file, cannot be made, or is around us."""
    directories = {"run.dir": config.run.dir, "weights.directory": config.weights.directory}
    for key, path in directories.items():
        if path is None:
            continue
        if path.exists() and not path.is_dir():
            yield Mistake(key, f"is a file, want a directory: {path}; choose another")
        elif not path.exists() and (problem := cannot_be_made(path)):
            yield Mistake(key, f"= {shown(path)} cannot be made: {problem}; choose another")
    if Path.cwd().resolve().is_relative_to(config.run.dir.resolve()):
        yield Mistake(
            "run.dir",
            f"contains the current directory, got {shown(config.run.dir)}; "
            "choose one for this run alone, e.g. runs/a",
        )


def cannot_be_made(path: Path) -> str:
    """Why a directory that is not there cannot be made; empty if it can, as far as is known."""
    whole = path.absolute()
    place = next(each for each in whole.parents if each.exists())
    if not place.is_dir():
        return f"{place} is a file"
    system = [each.stat().st_dev for each in (Path("/proc"), Path("/sys")) if each.exists()]
    if place.stat().st_dev in system:
        return f"{place} is the kernel's"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not yours to write"
    return ""


def pool(config: Config) -> Iterator[Mistake]:
    """Folders of data.pool that are not there."""
    for index, folder in enumerate(config.data.pool):
        if not folder.exists():
            yield Mistake(
                f"data.pool[{index}]",
                f"does not exist: {folder}; `dart data collect` and `dart data export` write such "
                "folders",
            )


def bus(config: Config) -> Iterator[Mistake]:
    """Keys without tcp, tcp beyond loopback without keys, keys that are not there."""
    bus = config.bus
    if bus.keys is not None and bus.transport == "ipc":
        yield Mistake(
            "bus.keys", 'needs bus.transport = "tcp": ipc sockets are private already; remove it'
        )
    elif bus.keys is not None and not (bus.keys / KEY_FILE).is_file():
        yield Mistake(
            "bus.keys", f"has no {KEY_FILE}: {bus.keys}; make it with `dart keys {bus.keys}`"
        )
    if bus.transport == "tcp" and bus.keys is None and not is_loopback(bus.host):
        yield Mistake(
            "bus.host",
            f"= {shown(bus.host)} is beyond loopback and needs CURVE keys; set bus.keys, "
            'or bus.host = "127.0.0.1"',
        )


def weights(config: Config) -> Iterator[Mistake]:
    """Settings of the channel that exclude each other."""
    channel = config.weights.channel
    if channel != "file" and config.weights.delta:
        yield Mistake(
            "weights.delta",
            f'works with weights.channel = "file" alone; "{channel}" sends only what workers lack anyway; '
            "set it to false",
        )


def refuse_out(out: Path) -> None:
    """Raise UserError where `out` exists or has no parent."""
    if out.exists():
        raise UserError(f"{out} exists; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.absolute().parent}")

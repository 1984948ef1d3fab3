"""A folder for long work that a second start continues: settings, a lock, and results line by line.

WorkFolder     opens the folder, if it has the same settings, for one process or for several at the same work
JsonLines      a file of JSON lines to which each piece of work adds a line; a half-written line is dropped
WorkSettings   the settings on which the content of a folder depends, and the words for errors
StoredModel    base class of values that are stored as JSON
lock           opens and locks a file for this process
write_whole    writes a file that exists only when it is complete
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path
from typing import IO, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from bus.errors import UserError

SETTINGS, LOCK = "settings.json", "lock"

Piece = TypeVar("Piece")


class StoredModel(BaseModel):
    """Base class of values that are stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkSettings(StoredModel):
    """The settings on which the content of a folder depends. Each kind of work has a subclass."""

    what: ClassVar[str]  # the kind of work in errors: `training`
    verb: ClassVar[str]  # the command: `dart tune`
    option: ClassVar[str]  # the option that names the folder: `tune.out`
    may_differ: ClassVar[Collection[str]] = ()  # fields that may change between two starts
    can_begin_anew: ClassVar[bool] = True  # whether the command has --fresh

    def difference(self, before: Self) -> str:
        """Return the first difference in words; empty if there is none."""
        for name in type(self).model_fields:
            is_now, was = getattr(self, name), getattr(before, name)
            if name not in self.may_differ and is_now != was:
                return f"{name} was {_short(was)} and is {_short(is_now)}"
        return ""


class WorkFolder:
    """A folder for long work, which this process has locked until `close`."""

    def __init__(
        self,
        folder: Path,
        settings: WorkSettings,
        *,
        fresh: bool = False,
        aside: bool = False,
        shared: bool = False,
    ) -> None:
        """Begin the folder, or continue it.

        A folder with other settings is refused, or moved aside if `aside` is True. With `fresh` any folder is
        moved aside. Processes that do parts of the same work pass `shared`. Raises UserError if the folder
        has other settings, holds something else, or is in use.
        """
        self.folder = folder
        self.moved: Path | None = None  # the new path of an older folder
        self.why = ""  # why the older folder was moved
        refuse_foreign(folder, settings)
        folder.mkdir(parents=True, exist_ok=True)
        self.busy = (
            f"{folder} is in use by another `{settings.verb}`; wait for it, or choose another "
            f"{settings.option}"
        )
        self._lock = lock(folder / LOCK, self.busy, shared=shared)
        try:
            if fresh and (folder / SETTINGS).is_file():
                self.why = "--fresh"
            elif aside:
                self.why = _difference_in(folder, settings)
            else:
                refuse_other(folder, settings)
            if self.why:
                # Other processes may be doing parts of the older work.
                _take(self._lock, self.busy)
                self.moved = _free_name(folder)
                folder.rename(self.moved)
                folder.mkdir()
                self._lock.close()
                self._lock = lock(folder / LOCK, self.busy, shared=shared)
            write_whole(folder / SETTINGS, settings.model_dump_json(indent=1).encode())
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()


class JsonLines(Generic[Piece]):
    """A file of JSON lines, to read and to append to. A line is safe from a kill once `add` has returned."""

    def __init__(self, path: Path, kind: TypeAdapter[Piece], busy: str) -> None:
        """Open or create the file.

        Raises UserError for an unreadable line, or with `busy` if another process has it.
        """
        self.path = path
        self._kind = kind
        self._file = lock(path, busy)
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the process was killed while it wrote
            os.ftruncate(self._file.fileno(), len(whole))
        try:
            self.pieces = read_lines(path, kind, whole)
        except UserError:
            self.close()
            raise

    def add(self, piece: Piece) -> None:
        """Append a line."""
        self.pieces.append(piece)
        self._file.write(self._kind.dump_json(piece) + b"\n")
        self._file.flush()

    @property
    def size(self) -> int:
        """The bytes of the lines so far."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path, kind: TypeAdapter[Piece], content: bytes) -> list[Piece]:
    """Return the pieces in the lines of a file's `content`.

    Raises UserError for a line that cannot be read.
    """
    pieces = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            pieces.append(kind.validate_json(line))
        except ValidationError:
            raise UserError(
                f"{path} line {number} cannot be read; remove the line, or begin anew with --fresh"
            ) from None
    return pieces


def lock(path: Path, busy: str, *, shared: bool = False) -> IO[bytes]:
    """Open a file, which is created if missing, and lock it until it is closed.

    Raises UserError with the text `busy` if another process has locked it.
    """
    file = path.open("a+b")
    try:
        _take(file, busy, shared=shared)
    except UserError:
        file.close()
        raise
    return file


def _take(file: IO[bytes], busy: str, *, shared: bool = False) -> None:
    """Lock an open file. Raises UserError with the text `busy` if another process has locked it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(busy) from None


def refuse_foreign(folder: Path, settings: WorkSettings | type[WorkSettings]) -> None:
    """Raise UserError if the folder exists and holds something else than this kind of work."""
    ours = (folder / SETTINGS).is_file() or (folder / LOCK).is_file()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists and is no {settings.what}; name another folder with {settings.option}"
        )


def refuse_other(folder: Path, settings: WorkSettings) -> None:
    """Raise UserError if the folder was begun with other settings."""
    if changed := _difference_in(folder, settings):
        anew = ", or begin anew with --fresh" if settings.can_begin_anew else ""
        raise UserError(
            f"{folder} was begun with other settings ({changed}); set them back, choose another {settings.option}{anew}"
        )


def _difference_in(folder: Path, now: WorkSettings) -> str:
    """Return the first difference from the folder's settings in words; empty if there is none."""
    path = folder / SETTINGS
    if not path.is_file():
        return ""
    try:
        return now.difference(type(now).model_validate_json(path.read_bytes()))
    except ValidationError as error:
        is_json = all(detail["type"] != "json_invalid" for detail in error.errors())
        return "another version of dart began it" if is_json else f"{SETTINGS} is damaged"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by renaming a complete draft, so that it never exists in part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    partial.replace(path)


def _free_name(folder: Path) -> Path:
    """Return `FOLDER.1`, or the first number that is free."""
    number = 1
    while any(folder.parent.glob(f"{folder.name}.{number}*")):
        number += 1
    return folder.with_name(f"{folder.name}.{number}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""The folder of long work that a second start goes on with: settings, a lock, and what is done, line by line.

WorkFolder     the folder: begun, or gone on with by the same settings; one process at a time, or parts of one work
JsonLines      a file of it that grows by a line for each piece of work; a line that was cut off is dropped
WorkSettings   what its content depends on, and how errors name it
StoredModel    base of what is kept on disk
lock           a file, open and locked for this process
write_whole    a file that is there only when it is complete
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
    """Base of what is kept on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkSettings(StoredModel):
    """What the content of a folder depends on; of each kind of work its own."""

    what: ClassVar[str]  # how errors name it: `training`
    verb: ClassVar[str]  # `dart tune`
    option: ClassVar[str]  # `tune.out`
    may_differ: ClassVar[Collection[str]] = ()  # fields that may differ
    can_begin_anew: ClassVar[bool] = True  # the verb has --fresh

    def difference(self, before: Self) -> str:
        """Return the first thing that differs, in words; empty for none."""
        for name in type(self).model_fields:
            is_now, was = getattr(self, name), getattr(before, name)
            if name not in self.may_differ and is_now != was:
                return f"{name} was {_short(was)} and is {_short(is_now)}"
        return ""


class WorkFolder:
    """A folder that is this process's until it is closed."""

    def __init__(
        self,
        folder: Path,
        settings: WorkSettings,
        *,
        fresh: bool = False,
        aside: bool = False,
        shared: bool = False,
    ) -> None:
        """Begin the folder, or go on with it.

        One of other settings is refused, or with `aside` set aside; with `fresh` any is set aside. Processes that
        do parts of one work have it `shared`. Raises UserError where it is of other settings, holds something
        else, or is in use.
        """
        self.folder = folder
        self.moved: Path | None = None  # where an older folder is now
        self.why = ""  # it was moved
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
                _take(self._lock, self.busy)  # also where others do parts of it
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
        """Free the folder."""
        self._lock.close()


class JsonLines(Generic[Piece]):
    """A file of JSON lines: those that are there, and more of them. What `add` has returned is there after a kill."""

    def __init__(self, path: Path, kind: TypeAdapter[Piece], busy: str) -> None:
        """Open or begin it. Raises UserError for a line that cannot be read, and `busy` where it is another's."""
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
        """One more line."""
        self.pieces.append(piece)
        self._file.write(self._kind.dump_json(piece) + b"\n")
        self._file.flush()

    @property
    def size(self) -> int:
        """Bytes of the lines so far."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path, kind: TypeAdapter[Piece], content: bytes) -> list[Piece]:
    """Return the pieces in some whole lines of a file. Raises UserError for a line that cannot be read."""
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            found.append(kind.validate_json(line))
        except ValidationError:
            raise UserError(
                f"{path} line {number} cannot be read; remove the line, or begin anew with --fresh"
            ) from None
    return found


def lock(path: Path, busy: str, *, shared: bool = False) -> IO[bytes]:
    """Return the file, locked until it is closed; made if need be. Raises UserError(`busy`) where another process has it."""
    file = path.open("a+b")
    try:
        _take(file, busy, shared=shared)
    except UserError:
        file.close()
        raise
    return file


def _take(file: IO[bytes], busy: str, *, shared: bool = False) -> None:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(busy) from None


def refuse_foreign(folder: Path, settings: WorkSettings | type[WorkSettings]) -> None:
    """Raise UserError for a folder that holds something else."""
    ours = (folder / SETTINGS).is_file() or (folder / LOCK).is_file()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists and is no {settings.what}; name another folder with {settings.option}"
        )


def refuse_other(folder: Path, settings: WorkSettings) -> None:
    """Raise UserError where a folder was begun with other settings."""
    if changed := _difference_in(folder, settings):
        anew = ", or begin anew with --fresh" if settings.can_begin_anew else ""
        raise UserError(
            f"{folder} was begun with other settings ({changed}); set them back, choose another {settings.option}{anew}"
        )


def _difference_in(folder: Path, now: WorkSettings) -> str:
    """Return the first thing that differs from what a folder was begun with, in words; empty for none."""
    path = folder / SETTINGS
    if not path.is_file():
        return ""
    try:
        return now.difference(type(now).model_validate_json(path.read_bytes()))
    except ValidationError as error:
        is_json = all(each["type"] != "json_invalid" for each in error.errors())
        return "another version of dart began it" if is_json else f"{SETTINGS} is damaged"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there only when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content)
    partial.replace(path)


def _free_name(folder: Path) -> Path:
    """`FOLDER.1`, or the first number that is free."""
    number = 1
    while any(folder.parent.glob(f"{folder.name}.{number}*")):
        number += 1
    return folder.with_name(f"{folder.name}.{number}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

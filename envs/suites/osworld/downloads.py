"""Fetches files from the web that task files name: set-up files and the references of evaluators.

    Downloads           a folder of fetched files, which slots and processes share, bounded in size
    default_downloads   returns the folder that is used unless an option names another one

A file is kept under the hash of its address, so that all episodes of a task, and all tasks that name the same
file, share one copy. It is not fetched again while it is kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, InvalidURL
from pathlib import Path

from bus.errors import EnvError
from envs.contract.blobs import content_hash
from envs.contract.queueing import queueing

logger = logging.getLogger(__name__)

FETCH_S = 300.0  # limit for one file, all tries together
TRIES = 3  # as in OSWorld
AGAIN_S = 1.0  # pause between two tries
ANSWER_S = 60.0  # longest silence of the web server
_POLL_S = 0.1
_LATER = frozenset({408, 425, 429})  # error statuses after which a later try may succeed
_BLOCK = 1 << 16
_FILE_NAME = re.compile(r"[0-9a-f]{32}(\.[^.]+\.part)?")  # a whole file, or one being written


class Downloads:
    """A folder of fetched files. Any number of slots and processes may use it at once."""

    def __init__(self, folder: Path, *, most_gb: float = 20.0) -> None:
        self.folder = folder
        self._most_bytes = int(most_gb * 1e9)

    def fetch(self, url: str) -> bytes:
        """Return the contents of the file at `url`, from the folder if it is there. Raises EnvError."""
        path = self.folder / content_hash(url.encode())
        data = _read(path)
        if data is not None:
            return data
        if not url.startswith(("https://", "http://")):
            raise EnvError(f"{url} is not a web address")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "no permission to write")
        except OSError as error:
            raise EnvError(
                f"{self.folder} cannot keep fetched files: {error.strerror}; name another with "
                "env.options.downloads"
            ) from error
        with _only_one(path.with_suffix(".lock"), FETCH_S):
            data = _read(path)  # another slot may have fetched it meanwhile
            if data is None:
                data = _fetch(url)
                self._keep(path, data)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        """Write a file, so that others see all of it or nothing, and make room for it."""
        try:
            with tempfile.NamedTemporaryFile(
                dir=self.folder, prefix=f"{path.name}.", suffix=".part", delete=False
            ) as partial:
                try:
                    partial.write(data)
                    partial.flush()
                    os.fsync(partial.fileno())
                    Path(partial.name).replace(path)
                except BaseException:
                    Path(partial.name).unlink(missing_ok=True)
                    raise
            self._make_room(path)
        except OSError as error:  # this episode has its file; the next one fetches it again
            logger.warning("cannot keep a fetched file in %s: %s", self.folder, error.strerror)

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used files until the rest fits."""
        files = []
        for path in self.folder.iterdir():
            if path == newest or not _FILE_NAME.fullmatch(path.name):
                continue
            with suppress(FileNotFoundError):  # another process made room
                stat = path.stat()
                stale = path.suffix == ".part" and stat.st_mtime < time.time() - 2 * FETCH_S
                files.append((0.0 if stale else stat.st_mtime, stat.st_size, path))
        room = self._most_bytes - newest.stat().st_size - sum(size for _, size, _ in files)
        for used_at, size, path in sorted(files):
            if room >= 0 and used_at:
                return
            path.unlink(missing_ok=True)
            room += size


def default_downloads() -> Path:
    """Return a folder below $XDG_CACHE_HOME, or below ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "dart" / "osworld"


def _read(path: Path) -> bytes | None:
    """Return a file's contents, None if there is no file; set its time of modification to now."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    with suppress(OSError):
        os.utime(path)
    return data


@contextmanager
def _only_one(lock: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock file against other threads and processes; go on without it after `deadline_s`."""
    descriptor = _try_lock(lock)
    if descriptor is None:
        with queueing("a file that another slot fetches", deadline_s) as place:
            while place.pause(_POLL_S) and (descriptor := _try_lock(lock)) is None:
                pass
    try:
        yield
    finally:
        if descriptor is not None:
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _try_lock(lock: Path) -> int | None:
    """Take the lock and return its file descriptor; None if another holds it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file after it was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
    os.close(descriptor)
    return None


def _fetch(url: str) -> bytes:
    """Return the contents of the file at `url`, after at most TRIES tries. Raises EnvError."""
    until = time.monotonic() + FETCH_S
    for tries_left in reversed(range(TRIES)):
        try:
            return _fetch_once(url, until)
        except (OSError, HTTPException, ValueError) as error:
            is_final = isinstance(error, ValueError | InvalidURL) or (
                isinstance(error, urllib.error.HTTPError)
                and error.code < 500
                and error.code not in _LATER
            )
            if is_final or not tries_left or time.monotonic() + AGAIN_S > until:
                raise EnvError(f"cannot fetch {url}: {error}") from error
            logger.warning("%s: %s; trying again", url, error)
        time.sleep(AGAIN_S)
    raise AssertionError  # the last try returns or raises


def _fetch_once(url: str, until: float) -> bytes:
    """Return the contents of the file at `url`. Raises EnvError if it takes too long.

    Raises OSError, HTTPException and ValueError as urllib does.
    """
    blocks = []
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - a web address
        while block := answer.read1(_BLOCK):
            blocks.append(block)
            if time.monotonic() > until:
                raise EnvError(f"{url} was not fetched in {FETCH_S:g} s")
        if answer.length:  # reading does not report missing bytes
            raise ConnectionError(f"the answer broke off {answer.length} bytes before its end")
    return b"".join(blocks)

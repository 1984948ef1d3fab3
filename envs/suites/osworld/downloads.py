"""Files from the web that task files name: set-up files and the references of evaluators.

    Downloads           a folder of fetched files, shared by slots and processes, bounded in size
    default_downloads   where it is unless an option names another folder

A file is kept under the hash of its address, so all episodes of a task, and all tasks that name the
same file, share one copy. It is never fetched again while it is kept.
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

FETCH_S = 300.0  # for one file, all tries together
TRIES = 3  # OSWorld's
AGAIN_S = 1.0  # between two tries
ANSWER_S = 60.0  # of silence from the web server
_POLL_S = 0.1
_LATER = frozenset({408, 425, 429})  # refusals that a later try may not meet
_BLOCK = 1 << 16
_KEPT = re.compile(r"[0-9a-f]{32}(\.[^.]+\.part)?")  # a whole file, or one being written


class Downloads:
    """A folder of fetched files. Any number of slots and processes may use it at once."""

    def __init__(self, folder: Path, *, most_gb: float = 20.0) -> None:
        self.folder = folder
        self._most_bytes = int(most_gb * 1e9)

    def fetch(self, url: str) -> bytes:
        """Return a file from the web, from the folder if it is kept there. Raises EnvError."""
        kept = self.folder / content_hash(url.encode())
        data = _read(kept)
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
        with _only_one(kept.with_suffix(".lock"), FETCH_S):
            data = _read(kept)  # another slot may have fetched it meanwhile
            if data is None:
                data = _fetched(url)
                self._keep(kept, data)
        return data

    def _keep(self, kept: Path, data: bytes) -> None:
        """Write it so that others see all of it or nothing, and make room for it."""
        try:
            with tempfile.NamedTemporaryFile(
                dir=self.folder, prefix=f"{kept.name}.", suffix=".part", delete=False
            ) as partial:
                try:
                    partial.write(data)
                    partial.flush()
                    os.fsync(partial.fileno())
                    Path(partial.name).replace(kept)
                except BaseException:
                    Path(partial.name).unlink(missing_ok=True)
                    raise
            self._make_room(kept)
        except OSError as error:  # the episode has its file, the next must fetch it again
            logger.warning("cannot keep a fetched file in %s: %s", self.folder, error.strerror)

    def _make_room(self, newest: Path) -> None:
        """Remove the files that were not used for longest, until the rest fits."""
        found = []
        for path in self.folder.iterdir():
            if path == newest or not _KEPT.fullmatch(path.name):
                continue
            with suppress(FileNotFoundError):  # another process made room
                stat = path.stat()
                stale = path.suffix == ".part" and stat.st_mtime < time.time() - 2 * FETCH_S
                found.append((0.0 if stale else stat.st_mtime, stat.st_size, path))
        room = self._most_bytes - newest.stat().st_size - sum(size for _, size, _ in found)
        for used, size, path in sorted(found):
            if room >= 0 and used:
                return
            path.unlink(missing_ok=True)
            room += size


def default_downloads() -> Path:
    """Below $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(root) / "dart" / "osworld"


def _read(kept: Path) -> bytes | None:
    """Return a kept file, or None; its time of modification becomes that of its last use."""
    try:
        data = kept.read_bytes()
    except FileNotFoundError:
        return None
    with suppress(OSError):
        os.utime(kept)
    return data


@contextmanager
def _only_one(lock: Path, deadline_s: float) -> Iterator[None]:
    """Hold `lock` against other threads and processes; go on without it after `deadline_s`."""
    held = _locked(lock)
    if held is None:
        with queueing("a file that another slot fetches", deadline_s) as place:
            while place.pause(_POLL_S) and (held := _locked(lock)) is None:
                pass
    try:
        yield
    finally:
        if held is not None:
            lock.unlink(missing_ok=True)
            os.close(held)


def _locked(lock: Path) -> int | None:
    """Return the file descriptor of the lock, which is then held; None where another holds it."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed it after it was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(lock.stat(), os.fstat(held)):
                return held
    os.close(held)
    return None


def _fetched(url: str) -> bytes:
    """Return the file at `url`, in at most TRIES tries. Raises EnvError."""
    until = time.monotonic() + FETCH_S
    for left in reversed(range(TRIES)):
        try:
            return _fetch_once(url, until)
        except (OSError, HTTPException, ValueError) as error:
            final = isinstance(error, ValueError | InvalidURL) or (
                isinstance(error, urllib.error.HTTPError)
                and error.code < 500
                and error.code not in _LATER
            )
            if final or not left or time.monotonic() + AGAIN_S > until:
                raise EnvError(f"cannot fetch {url}: {error}") from error
            logger.warning("%s: %s; trying again", url, error)
        time.sleep(AGAIN_S)
    raise AssertionError  # the last try returns or raises


def _fetch_once(url: str, until: float) -> bytes:
    """Return the file at `url`. Raises EnvError if it takes too long, OSError, HTTPException, ValueError."""
    blocks = []
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - a web address
        while block := answer.read1(_BLOCK):
            blocks.append(block)
            if time.monotonic() > until:
                raise EnvError(f"{url} was not fetched in {FETCH_S:g} s")
        if answer.length:  # bytes missing; reading does not report them
            raise ConnectionError(f"it broke off {answer.length} bytes before its end")
    return b"".join(blocks)

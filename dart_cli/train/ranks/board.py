"""What each rank of a trainer is doing, in a folder that all of them can read.

    Membership    which rank this process is, of how many, and where the board is
    RankState     one rank: its process, how far it is in the run's common work, what it does now
    RankBoard     the folder: one small file a rank, and one with the reason why all must end
    new_folder    makes it

Files, because they outlive the process that wrote them and need no connection: the last words of a rank
that was killed can still be read. Each is replaced as a whole. Each start has a folder of its own, so that
nothing an earlier one left is taken for this one's. Without room for files, or hard links, the ranks still
end, by what each sees for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bus.endpoints import make_private_dir
from bus.errors import ConfigError
from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import process_liveness
from dart_cli.runtime.logs import log_dir

FOLDER_VARIABLE = "DART_RANKS"
"""Environment variable by which `dart train` passes the board's folder to ranks that it starts."""
CONFIG = "config.json"
"""The configuration, in the board's folder, for ranks that rank 0 starts."""
_VERDICT = "verdict"


@dataclass(frozen=True)
class Membership:
    """Which rank of a trainer this process is."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host: its GPU
    folder: Path  # the board's, of this start; under torchrun RUN/ranks, until rank 0 has made it
    is_ours: bool  # ranks above 0 are started by rank 0, not by torchrun

    @property
    def name(self) -> str:
        """Its name in logs: `train`, `train-1`, ..."""
        return "train" if self.rank == 0 else f"train-{self.rank}"

    def log_file(self, run_dir: Path, rank: int) -> Path:
        """The log of a rank."""
        return log_dir(run_dir) / f"{replace(self, rank=rank).name}.log"


def is_ranked(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the trainer has several ranks: by `train.ranks`, or because torchrun started several."""
    return config.train.ranks > 1 or _started(environment)[1] > 1


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """Which rank torchrun, or the `dart train` that started it, made this process."""
    return _started(environment)[0]


def _started(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) by the variables that torchrun sets together; (0, 1) without both.

    Raises ConfigError for what is not such a pair.
    """
    texts = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if not all(texts):
        return 0, 1
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise ConfigError(
            f"the environment has RANK={texts[0]} and WORLD_SIZE={texts[1]}, which is no rank of "
            "torchrun's: unset them, or start the trainer by torchrun"
        )
    return int(texts[0]), int(texts[1])


def membership(config: Config, environment: Mapping[str, str] = os.environ) -> Membership:
    """Which rank this process is, by torchrun's variables or those of the `dart train` that started it.

    Raises ConfigError where torchrun started another number of processes than `train.ranks`.
    """
    parent = config.run.dir / "ranks"
    asked = config.train.ranks
    rank, size = _started(environment)
    if size == 1:
        return Membership(0, asked, 0, new_folder(parent), is_ours=True)
    if asked not in (1, size):
        raise ConfigError(
            f"train.ranks = {asked}, and torchrun started {size} processes: make both the same, or "
            "leave train.ranks at 1"
        )
    local = int(environment.get("LOCAL_RANK", rank))
    ours = environment.get(FOLDER_VARIABLE)
    if ours:
        return Membership(rank, size, local, Path(ours), is_ours=True)
    make_private_dir(config.run.dir)  # this rank may be here before rank 0
    return Membership(rank, size, local, make_private_dir(parent), is_ours=False)


def new_folder(parent: Path) -> Path:
    """A folder for the board of one start, below `parent`."""
    return Path(tempfile.mkdtemp(prefix="start-", dir=make_private_dir(parent)))


@dataclass(frozen=True)
class RankState:
    """One rank, as it last wrote it down."""

    rank: int
    pid: int
    host: str
    turn: int = 0  # commands of rank 0 that it has begun
    part: int = 0  # parts of the turn that it has begun
    doing: str = "starting"
    waits: bool = False  # for other ranks, in a collective call
    seen: float = 0.0  # unix seconds when it was written
    ended: bool = False  # as it was told to
    error: str = ""  # what ended it

    @property
    def is_gone(self) -> bool:
        """Whether its process ended without being told to; False for one of another host."""
        if self.ended or self.host != socket.gethostname():
            return False
        return bool(self.error) or process_liveness(self.pid, self.seen) == "gone"


class RankBoard:
    """Where the ranks of one start of a trainer tell each other what they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_removed(self) -> bool:
        """Whether the folder is gone, as after a later start of the trainer."""
        with contextlib.suppress(OSError):
            return not self._folder.is_dir()
        return False

    def write(self, state: RankState) -> None:
        """Replace what this rank has told."""
        text = json.dumps(asdict(replace(state, seen=time.time())))
        self._replace(f"rank-{state.rank}", text)

    def states(self) -> dict[int, RankState]:
        """What each rank told last; ranks that have told nothing are absent."""
        found = {}
        with contextlib.suppress(OSError):
            for path in self._folder.glob("rank-*"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    state = RankState(**json.loads(path.read_text(encoding="utf-8")))
                    found[state.rank] = state
        return dict(sorted(found.items()))

    def judge(self, reason: str) -> str:
        """Say why all ranks must end, unless one has said it before; the reason that stands.

        If the folder cannot be written, the reason tells that too: other ranks may name another one.
        """
        try:
            if not self.verdict():
                self._settle(reason)
        except OSError as error:
            reason += f" ({self._folder} cannot be written: {error.strerror})"
        return self.verdict() or reason

    def _settle(self, reason: str) -> None:
        target, draft = self._folder / _VERDICT, self._draft(reason)
        try:
            os.link(draft, target)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            with contextlib.suppress(FileExistsError), target.open("x", encoding="utf-8") as file:
                file.write(reason)
        finally:
            draft.unlink(missing_ok=True)

    def verdict(self) -> str:
        """Why all must end; empty while they need not."""
        with contextlib.suppress(OSError):
            return (self._folder / _VERDICT).read_text(encoding="utf-8")
        return ""

    def remove_others(self) -> None:
        """Remove the boards of earlier starts."""
        for other in self._folder.parent.glob("start-*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def _replace(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, or the run was removed: nothing to tell
            self._draft(text).replace(self._folder / name)

    def _draft(self, text: str) -> Path:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".draft-")
        path = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

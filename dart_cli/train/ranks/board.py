"""What each rank of a trainer is doing, in a folder that all of them can read.

    Membership    which rank this process is, of how many, and where the board is
    RankState     one rank: its process, how far it is in the run's common work, what it does now
    RankBoard     the folder: one small file a rank, and one with the reason why all must end

Files, because they outlive the process that wrote them and need no connection: what a killed rank
wrote last can still be read. Each is replaced as a whole. Ranks on hosts that do not share the run
directory are not seen; their end is noticed all the same, by connections that break.
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
    folder: Path  # the board's, of this start of the trainer
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

    Raises ConfigError where torchrun started another number of processes than `train.ranks`, or where
    this start has the name of one that has ended.
    """
    parent = config.run.dir / "ranks"
    asked = config.train.ranks
    rank, size = _started(environment)
    if size == 1:
        made = Path(tempfile.mkdtemp(prefix="start-", dir=make_private_dir(parent)))
        return Membership(0, asked, 0, made, is_ours=True)
    if asked not in (1, size):
        raise ConfigError(
            f"train.ranks = {asked}, and torchrun started {size} processes: make both the same, or "
            "leave train.ranks at 1"
        )
    local = int(environment.get("LOCAL_RANK", rank))
    ours = environment.get(FOLDER_VARIABLE)
    if ours:
        return Membership(rank, size, local, Path(ours), is_ours=True)
    start = "-".join(
        environment.get(name, "0") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    )
    name = f"torchrun-{start}-{environment.get('MASTER_PORT', '0')}"
    make_private_dir(parent)
    folder = make_private_dir(parent / name)
    if reason := RankBoard(folder).verdict():
        raise ConfigError(
            f"{folder} is of ranks that have ended ({reason}): start torchrun with another --rdzv-id, or "
            "with --rdzv-backend c10d"
        )
    return Membership(rank, size, local, folder, is_ours=False)


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

    def is_silent(self, after_s: float) -> bool:
        """Whether it has written nothing for that long: it is stopped, or its machine is."""
        return not self.ended and time.time() - self.seen > after_s


class RankBoard:
    """Where the ranks of one start of a trainer tell each other what they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, state: RankState) -> None:
        """Replace what this rank has told."""
        text = json.dumps(asdict(replace(state, seen=time.time())))
        self._replace(f"rank-{state.rank}", text)

    def states(self) -> dict[int, RankState]:
        """What each rank told last; ranks that have told nothing are absent."""
        found = {}
        for path in self._folder.glob("rank-*"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                state = RankState(**json.loads(path.read_text(encoding="utf-8")))
                found[state.rank] = state
        return dict(sorted(found.items()))

    def judge(self, reason: str) -> str:
        """Say why all ranks must end, unless one has said it before; the reason that stands."""
        if not self.verdict():
            draft = self._draft(reason)
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._folder / _VERDICT)
            draft.unlink(missing_ok=True)
        return self.verdict() or reason

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
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=".draft-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return Path(path)

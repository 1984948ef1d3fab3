"""Which rank this process is, what each rank does, and the end of all when one has died or hangs.

    Membership   which rank of a trainer this process is, of how many, and where the board is
    RankState    one rank: its process, how far it is in the run's common work, what it does now
    RankBoard    a folder that all ranks see: one small file a rank, and one with the reason why all must end
    RankWatch    a thread: writes down what this rank does, reads what the others do
    culprit      which rank the others wait for

Torch's own time limits end a process from C, or after a trace of a hundred lines, and name no rank. The
watch needs no cooperation of the thread that computes: it looks at processes of this host, at the files
of the board, and at how long this rank has been doing one thing. The rank that first sees what is
wrong writes the reason to the board; all others take it from there, log it and end.

The board is files, because they outlive the process that wrote them and need no connection: the last words
of a rank that was killed can still be read. Each is replaced as a whole. Each start has a folder of its own,
so that nothing an earlier one left is taken for this one's. Without room for files the ranks still end, by
what each sees for itself.

Rank 0 also works alone, for longer than any command takes: it publishes, it reads checkpoints. Its own
watch has the deadline of that. The others, who wait for its next command, need only know that it runs:
its watch writes to the board each second, whatever its computing thread does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from bus.endpoints import make_private_dir
from bus.errors import ConfigError, RankError
from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import process_liveness, start_ticks
from dart_cli.runtime.logs import log_dir

log = logging.getLogger(__name__)

POLL_S = 0.2
WRITE_S = 1.0
SILENT_S = 3.0
"""A rank that has written nothing for so long, past a deadline, does not run at all."""
RAISE_S = 2.0
"""Seconds that the computing thread has to end by itself, by the error of its broken connection."""
_WAITING = f"{os.sep}torch{os.sep}distributed{os.sep}"
"""A thread with code of this folder on its stack waits for other ranks, as FSDP2's hooks do."""
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
        """Return the log of a rank."""
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
    """Return a folder for the board of one start, below `parent`."""
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
    ticks: int = 0  # `start_ticks`: which process of this pid it is
    seen: float = 0.0  # unix seconds when it was written
    ended: bool = False  # as it was told to
    error: str = ""  # what ended it

    @property
    def is_gone(self) -> bool:
        """Whether its process ended without being told to; False for one of another host."""
        if self.ended or self.host != socket.gethostname():
            return False
        return bool(self.error) or process_liveness(self.pid, ticks=self.ticks) == "gone"


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
        with contextlib.suppress(OSError):  # a full disk, or the run was removed: nothing to tell
            self._draft(text).replace(self._folder / f"rank-{state.rank}")

    def states(self) -> dict[int, RankState]:
        """Return what each rank told last; ranks that have told nothing are absent."""
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
        if found := self.verdict():
            return found
        target = self._folder / _VERDICT
        try:
            draft = self._draft(reason)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(draft, target)
                draft.unlink()
            except OSError:  # a file system without hard links: of two at once the later one stands
                draft.replace(target)
        except OSError as error:
            reason += f" ({self._folder} cannot be written: {error.strerror})"
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

    def _draft(self, text: str) -> Path:
        """Return a file of this thread alone, whole before it gets its name."""
        path = self._folder / f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return path


# --- the watch ----------------------------------------------------------------------------------


class RankWatch:
    """A context manager around all that a rank does. `doing` is for the computing thread."""

    def __init__(
        self,
        member: Membership,
        run_dir: Path,
        deadline_s: float,
        end: Callable[[str], None],
        look: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` ends this process with a reason, from the watch's thread.

        `look` says what else is wrong, seen from this rank: of a process that it started, and that
        ended before it could tell anything.
        """
        self._member = member
        self._run_dir = run_dir
        self.deadline_s = deadline_s
        self._end = end
        self._look = look
        self._clock = clock
        self.board = RankBoard(member.folder)
        self._state = RankState(
            member.rank, os.getpid(), socket.gethostname(), ticks=start_ticks(os.getpid())
        )
        self._limit_s = float("inf")  # for what it does
        self._until = float("inf")  # the clock's seconds by which it has done what it does
        self._awaits_rank_0 = False  # or by which rank 0 must have written something
        # By rank: the time that it last wrote, and when that was first seen here.
        self._seen: dict[int, tuple[float, float]] = {}
        self._working = threading.get_ident()
        self._written = 0.0
        self._closing = threading.Event()
        self._raising = threading.Event()  # the computing thread ends the process itself
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Say how this rank ended; the others then know."""
        self.close()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._state = replace(self._state, ended=error is None, error=text[:300])
        self._write()

    def close(self) -> None:
        """Watch no more: the ranks are about to end as they were told to."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(POLL_S * 10)

    def doing(
        self,
        what: str,
        *,
        within_s: float | None = None,
        turn: int | None = None,
        awaits_rank_0: bool = False,
    ) -> None:
        """Note that this thread begins `what`, for which it has `within_s`, by default the deadline.

        `turn` counts the commands of rank 0; in one turn every rank begins the same parts. With
        `awaits_rank_0` the time is up only if rank 0 has written nothing to the board for as long.
        """
        before = self._state
        new = turn is not None and turn != before.turn
        self._limit_s = self.deadline_s if within_s is None else within_s
        self._until = self._clock() + self._limit_s
        self._awaits_rank_0 = awaits_rank_0
        self._working = threading.get_ident()
        self._state = replace(
            before,
            turn=before.turn if turn is None else turn,
            part=0 if new else before.part + 1,
            doing=what,
        )
        self._write()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise an error inside the block as RankError, with the reason, if it comes from another rank's end.

        Others pass, and end this rank alone: the next to see that writes it to the board.
        """
        try:
            yield
        except RuntimeError as error:
            if reason := self._reason(RAISE_S):
                self._raising.set()
                raise RankError(reason) from error
            raise

    def _reason(self, within_s: float) -> str:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if reason := self.board.verdict():
                return reason
            time.sleep(POLL_S)
        return ""

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                if self._clock() - self._written > WRITE_S:
                    self._write()
                reason = self.board.verdict() or self.wrong()
            except Exception as error:  # a rank that is not watched must not go on
                log.exception("the watch of rank %d failed", self._member.rank)
                reason = f"the watch of rank {self._member.rank} failed: {error}; all ranks end"
            if reason:
                reason = self.board.judge(reason)
                if not (self._raising.wait(RAISE_S) or self._closing.is_set()):
                    self._log_stack()
                    self._end(reason)
                return

    def _write(self) -> None:
        self._written = self._clock()
        self._state = replace(self._state, waits=self._is_waiting())
        self.board.write(self._state)

    def wrong(self) -> str:
        """Why all must end, as far as this rank can see; empty if nothing is wrong."""
        states = self._states()
        for rank, state in states.items():
            if rank != self._member.rank and state.is_gone:
                how = f" failed: {state.error}" if state.error else " ended unexpectedly"
                return self._line(state, how)
        if found := self._look():
            return found
        if self.board.is_removed:
            return f"{self._member.folder} was removed: has the trainer been started again?"
        if self._clock() <= self._until:
            return ""
        if self._awaits_rank_0 and self._silent_s(0) <= self.deadline_s:
            return ""
        self._write()
        states = self._states()
        missing = sorted(set(range(self._member.size)) - states.keys())
        limit = f"train.rank_deadline_s = {self.deadline_s:g} s"
        how = f" does not answer within {limit if self._limit_s == self.deadline_s else f'{self._limit_s:g} s'}"
        if missing:
            return f"rank {missing[0]}{how}: it has never started"
        silent = {rank for rank in states if self._silent_s(rank) > SILENT_S}
        return self._line(culprit(states, silent), how)

    def _states(self) -> dict[int, RankState]:
        """Return what each rank told last; notes when this rank saw that it had changed."""
        states = self.board.states()
        for rank, state in states.items():
            if self._seen.get(rank, (-1.0, 0.0))[0] != state.seen:
                self._seen[rank] = (state.seen, self._clock())
        return states

    def _silent_s(self, rank: int) -> float:
        """For how long a rank has written nothing, by this rank's clock: hosts' clocks may differ."""
        return self._clock() - self._seen[rank][1] if rank in self._seen else float("inf")

    def _line(self, state: RankState, how: str) -> str:
        where = self._member.log_file(self._run_dir, state.rank)
        return (
            f"rank {state.rank} of {self._member.size} (pid {state.pid} on {state.host}){how}; "
            f"it was doing: {state.doing}; its log is {where}; all ranks end"
        )

    def _is_waiting(self) -> bool:
        """Whether the computing thread is in a collective call."""
        frame = sys._current_frames().get(self._working)  # noqa: SLF001 - documented by its name only
        while frame is not None:
            if _WAITING in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False

    def _log_stack(self) -> None:
        frame = sys._current_frames().get(self._working)  # noqa: SLF001
        if frame is not None:
            lines = "".join(traceback.format_stack(frame)[-12:])
            log.info("rank %d was at:\n%s", self._member.rank, lines)


def culprit(states: Mapping[int, RankState], silent: Collection[int] = ()) -> RankState:
    """Return the rank that the others wait for: one that does not run, else the least advanced that computes.

    `silent` are ranks that have written nothing for `SILENT_S`. Where all wait in a collective call, the
    least advanced of them.
    """
    stopped = [state for rank, state in states.items() if rank in silent and not state.ended]
    computing = [state for state in states.values() if not state.waits and not state.ended]
    return min(
        stopped or computing or states.values(),
        key=lambda state: (state.turn, state.part, state.rank),
    )

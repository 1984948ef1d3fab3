"""Which rank this process is, what each rank does, and the end of all when one has died or hangs.

    Membership   the rank of this process, the number of ranks, and the place of the board
    RankState    one rank: its process, its progress in the common work, what it does now
    RankBoard    a folder that all ranks see: a small file for each rank, and one with the reason to end
    RankWatch    a thread that writes what this rank does to the board, and reads what the others do
    culprit      finds the rank for which the others wait

Torch's own time limits end a process from C, or after a trace of a hundred lines, and name no rank. The
watch needs no cooperation of the thread that computes: it looks at the processes of this host, at the files
of the board, and at how long this rank has been doing one thing. The rank that first sees a problem
writes the reason to the board; all others read it there, log it and end.

The board consists of files, because files outlive the process that wrote them and need no connection: the
last state of a rank that was killed can still be read. Each file is replaced as a whole. Each start has its
own folder, so that files of an earlier start cannot be mistaken for files of this one. If there is no space
for files, the ranks still end, each by what it sees itself.

Rank 0 also works alone, for longer than any command takes: it publishes, and it reads checkpoints. Its own
watch has a deadline for that work. The other ranks, which wait for its next command, only need to see that it
runs: its watch writes to the board each second, whatever its computing thread does.
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
"""A rank that has missed a deadline and has written nothing for this long does not run at all."""
RAISE_S = 2.0
"""Seconds for the computing thread to end by the error of its broken connection, before the watch ends it."""
_WAITING = f"{os.sep}torch{os.sep}distributed{os.sep}"
"""A thread with code of this folder on its stack waits for other ranks; so do FSDP2's hooks."""
FOLDER_VARIABLE = "DART_RANKS"
"""Environment variable with the board's folder, which `dart train` sets for the ranks that it starts."""
CONFIG = "config.json"
"""File in the board's folder with the configuration, for ranks that rank 0 starts."""
_END_REASON = "end-reason"
"""File in the board's folder with the reason why all ranks must end."""


@dataclass(frozen=True)
class Membership:
    """The rank of this process in its trainer."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host: its GPU
    folder: Path  # of this start's board; under torchrun RUN/ranks, until rank 0 has made a folder in it
    is_ours: bool  # True if rank 0 starts the other ranks, False if torchrun does

    @property
    def name(self) -> str:
        """The name of the process in logs: `train`, `train-1`, ..."""
        return "train" if self.rank == 0 else f"train-{self.rank}"

    def log_file(self, run_dir: Path, rank: int) -> Path:
        """Return the log file of a rank."""
        return log_dir(run_dir) / f"{replace(self, rank=rank).name}.log"


def is_ranked(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the trainer has several ranks, by `train.ranks` or because torchrun started several."""
    return config.train.ranks > 1 or _started(environment)[1] > 1


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """Return the rank that torchrun, or the `dart train` that started it, gave this process."""
    return _started(environment)[0]


def _started(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, number of ranks) from torchrun's variables RANK and WORLD_SIZE.

    Return (0, 1) unless both are set. Raises ConfigError if they are no such pair.
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
    """Return the membership of this process.

    It follows from the variables of torchrun, or of the `dart train` that started this process. Raises
    ConfigError if torchrun started another number of processes than `train.ranks`.
    """
    parent = config.run.dir / "ranks"
    ranks = config.train.ranks
    rank, size = _started(environment)
    if size == 1:
        return Membership(0, ranks, 0, new_folder(parent), is_ours=True)
    if ranks not in (1, size):
        raise ConfigError(
            f"train.ranks = {ranks}, and torchrun started {size} processes: make both the same, or "
            "leave train.ranks at 1"
        )
    local = int(environment.get("LOCAL_RANK", rank))
    ours = environment.get(FOLDER_VARIABLE)
    if ours:
        return Membership(rank, size, local, Path(ours), is_ours=True)
    make_private_dir(config.run.dir)  # this rank may get here before rank 0 does
    return Membership(rank, size, local, make_private_dir(parent), is_ours=False)


def new_folder(parent: Path) -> Path:
    """Make a folder for the board of one start below `parent`, and return it."""
    return Path(tempfile.mkdtemp(prefix="start-", dir=make_private_dir(parent)))


@dataclass(frozen=True)
class RankState:
    """The state of a rank, as it last wrote it to the board."""

    rank: int
    pid: int
    host: str
    turn: int = 0  # number of commands of rank 0 that it has begun
    part: int = 0  # number of parts of the turn that it has begun
    doing: str = "starting"
    is_waiting: bool = False  # for other ranks, in a collective call
    ticks: int = 0  # `start_ticks`, which tells processes with the same pid apart
    written_at: float = 0.0  # unix seconds
    has_ended: bool = False  # in the regular way
    error: str = ""  # the error that ended it

    @property
    def is_gone(self) -> bool:
        """True if its process ended in another than the regular way; False for a process of another host."""
        if self.has_ended or self.host != socket.gethostname():
            return False
        return bool(self.error) or process_liveness(self.pid, ticks=self.ticks) == "gone"


class RankBoard:
    """The folder in which the ranks of one start of a trainer write what they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_removed(self) -> bool:
        """True if the folder was removed; a later start of the trainer removes it."""
        with contextlib.suppress(OSError):
            return not self._folder.is_dir()
        return False

    def write(self, state: RankState) -> None:
        """Replace the state of a rank."""
        text = json.dumps(asdict(replace(state, written_at=time.time())))
        with contextlib.suppress(OSError):  # the disk is full, or the run was removed
            self._draft(text).replace(self._folder / f"rank-{state.rank}")

    def states(self) -> dict[int, RankState]:
        """Return the last state of each rank, by rank; ranks that have written nothing are absent."""
        states = {}
        with contextlib.suppress(OSError):
            for path in self._folder.glob("rank-*"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    state = RankState(**json.loads(path.read_text(encoding="utf-8")))
                    states[state.rank] = state
        return dict(sorted(states.items()))

    def set_end_reason(self, reason: str) -> str:
        """Write why all ranks must end, and return the reason that counts: the first one.

        If the folder cannot be written, the returned reason says so: other ranks may then name another
        reason.
        """
        if earlier := self.end_reason():
            return earlier
        target = self._folder / _END_REASON
        try:
            draft = self._draft(reason)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(draft, target)
                draft.unlink()
            except OSError:  # a file system without hard links: of two at once the later one counts
                draft.replace(target)
        except OSError as error:
            reason += f" ({self._folder} cannot be written: {error.strerror})"
        return self.end_reason() or reason

    def end_reason(self) -> str:
        """Return why all ranks must end; empty while they need not."""
        with contextlib.suppress(OSError):
            return (self._folder / _END_REASON).read_text(encoding="utf-8")
        return ""

    def remove_others(self) -> None:
        """Remove the boards of earlier starts."""
        for other in self._folder.parent.glob("start-*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def _draft(self, text: str) -> Path:
        """Write a file that belongs to this thread alone, and return it; the caller then renames it."""
        path = self._folder / f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return path


# --- the watch ----------------------------------------------------------------------------------


class RankWatch:
    """The watch of a rank: a context manager around the rank's work. The computing thread calls `doing`."""

    def __init__(
        self,
        member: Membership,
        run_dir: Path,
        deadline_s: float,
        end: Callable[[str], None],
        look: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` ends this process with a reason; the watch's thread calls it.

        `look` returns another problem that this rank sees, in words, or an empty string: a process that it
        started may end before it writes to the board.
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
        self._limit_s = float("inf")  # seconds for the present work
        self._until = float("inf")  # the clock's time by which the present work must be done
        self._awaits_rank_0 = False  # then rank 0 must only have written to the board by that time
        # By rank: its newest `written_at`, and this clock's time when that was first read here.
        self._changes: dict[int, tuple[float, float]] = {}
        self._working = threading.get_ident()
        self._last_write = 0.0
        self._closing = threading.Event()
        self._raising = threading.Event()  # set if the computing thread ends the process
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Write to the board how this rank ended, for the other ranks."""
        self.close()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._state = replace(self._state, has_ended=error is None, error=text[:300])
        self._write()

    def close(self) -> None:
        """Stop watching: the ranks are about to end in the regular way."""
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
        """Record that this thread begins `what`, for which it has `within_s`, by default the deadline.

        `turn` counts the commands of rank 0; in one turn every rank begins the same parts. With
        `awaits_rank_0`, the deadline is missed only if rank 0 has written nothing to the board for as long.
        """
        before = self._state
        is_new_turn = turn is not None and turn != before.turn
        self._limit_s = self.deadline_s if within_s is None else within_s
        self._until = self._clock() + self._limit_s
        self._awaits_rank_0 = awaits_rank_0
        self._working = threading.get_ident()
        self._state = replace(
            before,
            turn=before.turn if turn is None else turn,
            part=0 if is_new_turn else before.part + 1,
            doing=what,
        )
        self._write()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise RankError with the reason if an error inside the block comes from the end of another rank.

        Other errors pass unchanged and end this rank; a rank that sees this writes it to the board.
        """
        try:
            yield
        except RuntimeError as error:
            if reason := self._reason(RAISE_S):
                self._raising.set()
                raise RankError(reason) from error
            raise

    def _reason(self, within_s: float) -> str:
        """Return the reason on the board, once it is there; empty if there is none after `within_s`."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if reason := self.board.end_reason():
                return reason
            time.sleep(POLL_S)
        return ""

    def _run(self) -> None:
        """Write this rank's state and look for a problem until `close`; end the process if there is one."""
        while not self._closing.wait(POLL_S):
            try:
                if self._clock() - self._last_write > WRITE_S:
                    self._write()
                reason = self.board.end_reason() or self.find_problem()
            except Exception as error:  # a rank must not go on without its watch
                log.exception("the watch of rank %d failed", self._member.rank)
                reason = f"the watch of rank {self._member.rank} failed: {error}; all ranks end"
            if reason:
                reason = self.board.set_end_reason(reason)
                if not (self._raising.wait(RAISE_S) or self._closing.is_set()):
                    self._log_stack()
                    self._end(reason)
                return

    def _write(self) -> None:
        self._last_write = self._clock()
        self._state = replace(self._state, is_waiting=self._is_waiting())
        self.board.write(self._state)

    def find_problem(self) -> str:
        """Return a problem that this rank sees and for which all ranks must end; empty if there is none."""
        states = self._states()
        for rank, state in states.items():
            if rank != self._member.rank and state.is_gone:
                how = f" failed: {state.error}" if state.error else " ended unexpectedly"
                return self._line(state, how)
        if problem := self._look():
            return problem
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
        """Return the last state of each rank; record when this rank first saw each change."""
        states = self.board.states()
        for rank, state in states.items():
            if self._changes.get(rank, (-1.0, 0.0))[0] != state.written_at:
                self._changes[rank] = (state.written_at, self._clock())
        return states

    def _silent_s(self, rank: int) -> float:
        """Return for how long a rank has written nothing, by this rank's clock: hosts' clocks may differ."""
        if rank not in self._changes:
            return float("inf")
        return self._clock() - self._changes[rank][1]

    def _line(self, state: RankState, how: str) -> str:
        """Return the line about a rank: `how` it failed, what it was doing, and where its log is."""
        where = self._member.log_file(self._run_dir, state.rank)
        return (
            f"rank {state.rank} of {self._member.size} (pid {state.pid} on {state.host}){how}; "
            f"it was doing: {state.doing}; its log is {where}; all ranks end"
        )

    def _is_waiting(self) -> bool:
        """Return True if the computing thread is in a collective call."""
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
    """Return the rank for which the others wait.

    That is a rank that does not run: `silent` are the ranks that have written nothing for `SILENT_S`. If
    all run, it is the least advanced rank that computes; if all wait in a collective call, the least
    advanced of all.
    """
    hanging = [state for rank, state in states.items() if rank in silent and not state.has_ended]
    computing = [state for state in states.values() if not state.is_waiting and not state.has_ended]
    return min(
        hanging or computing or states.values(),
        key=lambda state: (state.turn, state.part, state.rank),
    )

"""Ends a rank when another has died or hangs, with one line that says which and what it was doing.

    RankWatch    a thread: writes down what this rank does, reads what the others do
    culprit      which rank the others wait for

Torch's own time limits end a process from C, or after a trace of a hundred lines, and name no rank. The
watch needs no cooperation of the thread that computes: it looks at processes of this host, at the files
of the board, and at how long this rank has been doing one thing. The rank that first sees what is
wrong writes the reason to the board; all others take it from there, log it and end.

Rank 0 also works alone, for longer than any command takes: it publishes, it reads checkpoints. Its own
watch has the deadline of that. The others, who wait for its next command, need only know that it runs:
its watch writes to the board each second, whatever its computing thread does.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from bus.errors import RankError
from dart_cli.train.ranks.board import Membership, RankBoard, RankState

log = logging.getLogger(__name__)

POLL_S = 0.2
WRITE_S = 1.0
SILENT_S = 3.0
"""A rank that has written nothing for so long, past a deadline, does not run at all."""
RAISE_S = 2.0
"""Seconds that the computing thread has to end by itself, by the error of its broken connection."""
_WAITING = f"{os.sep}torch{os.sep}distributed{os.sep}"
"""A thread with code of this folder on its stack waits for other ranks, as FSDP2's hooks do."""


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
        self._state = RankState(member.rank, os.getpid(), socket.gethostname())
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
        """This thread begins `what`, for which it has `within_s`, by default the deadline.

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
        """An error inside that is another rank's end is raised as RankError, with the reason.

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
        """What each rank told last; notes when this rank saw that it had changed."""
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
    """The rank that the others wait for: one that does not run, else the least advanced that computes.

    `silent` are ranks that have written nothing for `SILENT_S`. Where all wait in a collective call, the
    least advanced of them.
    """
    stopped = [state for rank, state in states.items() if rank in silent and not state.ended]
    computing = [state for state in states.values() if not state.waits and not state.ended]
    return min(
        stopped or computing or states.values(),
        key=lambda state: (state.turn, state.part, state.rank),
    )

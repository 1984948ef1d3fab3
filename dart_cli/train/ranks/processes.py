"""The processes of a trainer with several ranks: started, watched and ended as one.

    Ranks           a rank's membership in the trainer: its watch and group; on rank 0 the other processes
    RankProcesses   the ranks that rank 0 started on this host
    refuse_other_settings   raises an error if torchrun started a rank with other settings than rank 0

`dart train` with `train.ranks = N` is rank 0 and starts the others (follower.py); torchrun starts all
ranks itself, each with the same `dart train`. Only rank 0 has the connection to the bus, the loop, the weight
channel and the metrics. Other ranks hold nothing that the run could lose. When a rank ends or hangs, all end
within `train.rank_deadline_s`, rank 0 with exit code 1, so that `dart up` starts `dart train` again, which
resumes from its checkpoint (docs/box.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from bus.errors import ConfigError
from dart_cli.config.readers import Settings, differences, row_of
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.run_dir import leave_error
from dart_cli.runtime.streams import say_error
from dart_cli.train.ranks.distributed import (
    Command,
    DistributedGroup,
    device_of,
    join,
    meet_torchrun,
    memory_mb,
)
from dart_cli.train.ranks.watch import (
    CONFIG,
    FOLDER_VARIABLE,
    RAISE_S,
    Membership,
    RankBoard,
    RankWatch,
    membership,
)

log = logging.getLogger(__name__)

PROGRAM = ("-m", "dart_cli.train.ranks.follower")
"""Arguments of Python for a rank above 0."""
START_S = 300.0
"""Least deadline in seconds for the start of all ranks; `train.rank_deadline_s` if that is more."""
LAST_WORDS_S = 2 * RAISE_S
"""Seconds for ranks to log why they end, before they are killed."""
END_S = 10.0
"""Seconds for ranks to end after STOP, before they are killed."""


class RankProcesses:
    """Ranks 1 to N - 1 of this host, children of rank 0 and of its process group."""

    def __init__(self, config: Config, member: Membership) -> None:
        """Start the processes. Their output goes to their logs."""
        (member.folder / CONFIG).write_text(config.model_dump_json(), encoding="utf-8")
        log_dir(config.run.dir).mkdir(exist_ok=True)
        self._member, self._run_dir = member, config.run.dir
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, member.size):
                self._children[rank] = self._start(rank)
        except BaseException:
            self.end(0.0)
            raise

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        """Start the process of a rank; its output goes to its log."""
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._member.size),
            "LOCAL_RANK": str(rank),
            FOLDER_VARIABLE: str(self._member.folder.absolute()),
        }
        with self._member.log_file(self._run_dir, rank).open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def look(self) -> str:
        """Return which process has ended, and how, in words; empty if none has."""
        for rank, child in self._children.items():
            code = child.poll()
            if code is None:
                continue
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            state = RankBoard(self._member.folder).states().get(rank)
            doing = f"; it was doing: {state.doing}" if state else ""
            failed = f": {state.error}" if state and state.error else ""
            return (
                f"rank {rank} of {self._member.size} (pid {child.pid}) {how}{failed}{doing}; its log is "
                f"{self._member.log_file(self._run_dir, rank)}; all ranks end"
            )
        return ""

    def end(self, within_s: float) -> None:
        """Wait `within_s` for the processes to end, then kill the remaining ones."""
        until = time.monotonic() + within_s
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(until - time.monotonic(), 0.0))
        for child in self._children.values():
            child.kill()
            child.wait()


_SETTINGS = "dart-settings"
_PER_RANK = ("train.device", "train.threads")
"""Keys of a trainer that may differ between ranks, as their hosts need it."""


def refuse_other_settings(config: Config, member: Membership, store: Any) -> None:
    """Raise ConfigError if this rank was started with other settings of the trainer than rank 0.

    Torchrun's ranks meet by `store`; rank 0 writes its settings there.
    """
    mine = Settings.of(config)
    if member.rank == 0:
        store.set(_SETTINGS, json.dumps(asdict(mine)))
        return
    first = Settings(**json.loads(store.get(_SETTINGS)))
    for key in differences(mine, first):
        row = row_of(key)
        if "train" in row.readers and "train" not in row.free and key not in _PER_RANK:
            raise ConfigError(
                f"{key} is {short_value(mine.value(key))} for rank {member.rank} of the trainer and "
                f"{short_value(first.value(key))} for rank 0; start all ranks with the same file and the same --set"
            )


class Ranks:
    """A rank's membership in a trainer of several ranks: a context manager for the computing thread."""

    def __init__(self, config: Config, member: Membership | None = None) -> None:
        """Find out the membership of this process, unless it is given.

        Raises ConfigError if torchrun started another number of ranks than the configuration has.
        """
        self._config = config
        self.member = member or membership(config)
        self._stack = contextlib.ExitStack()
        self._processes: RankProcesses | None = None
        self._rank_group: DistributedGroup | None = None

    @property
    def rank_group(self) -> DistributedGroup:
        """The group of this rank; only after it has met the others."""
        assert self._rank_group is not None
        return self._rank_group

    @property
    def start_s(self) -> float:
        """Seconds within which all ranks must have started, and again to load the model."""
        return max(START_S, self._config.train.rank_deadline_s)

    def __enter__(self) -> Self:
        """Start the other ranks, unless torchrun did, and meet them. Raises RankError, ConfigError."""
        config, member, store = self._config, self.member, None
        device = device_of(member, config.train.device)
        if not member.is_ours:
            member, store = meet_torchrun(member, self.start_s)
            refuse_other_settings(config, member, store)
            self.member = member
        with contextlib.ExitStack() as stack:
            if member.rank == 0:
                RankBoard(member.folder).remove_others()
            if member.rank == 0 and member.is_ours:
                self._processes = RankProcesses(config, member)
                stack.callback(self._processes.end, LAST_WORDS_S)
            watch = stack.enter_context(
                RankWatch(
                    member, config.run.dir, config.train.rank_deadline_s, self._end, self._look
                )
            )
            watch.doing("meeting the other ranks", within_s=self.start_s)
            with watch.raising():
                stack.enter_context(join(member, device, config.train.rank_deadline_s, store))
                self._rank_group = DistributedGroup(member, watch, device)
            self._stack = stack.pop_all()
        log.info("rank %d of %d, %s", member.rank, member.size, device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End together with the other ranks."""
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the other ranks: after STOP if there is no error, else at once.

        Before the start, do nothing.
        """
        if self._rank_group is None:
            return
        if self.member.rank == 0 and error is None:
            self._rank_group.tell(Command.STOP)
            if self._processes is not None:
                self._rank_group.watch.close()
                self._processes.end(END_S)
        log.info(
            "most memory of rank %d: %.0f MB", self.member.rank, memory_mb(self._rank_group.device)
        )
        self._rank_group = None
        self._stack.__exit__(type(error) if error else None, error, None)

    def _look(self) -> str:
        return self._processes.look() if self._processes is not None else ""

    def _end(self, reason: str) -> None:
        """End this process from the watch's thread, while the computing thread waits for a lost rank."""
        log.error("%s", reason)
        try:
            if self.member.rank == 0:
                leave_error(self._config.run.dir, self.member.name, reason)
                say_error(reason)
                if self._processes is not None:
                    self._processes.end(LAST_WORDS_S)
        finally:
            os._exit(1)

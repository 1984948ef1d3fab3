"""Promises of a rank's watch: it finds ranks that died or hang, whatever the disk does."""

from __future__ import annotations

import errno
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from dart_cli.config.schema import Config
from dart_cli.train.ranks import processes
from dart_cli.train.ranks import watch as watching
from dart_cli.train.ranks.watch import SILENT_S, Membership, RankBoard, RankWatch, new_folder
from tests.waiting import PATIENCE_S, wait_until

DEADLINE_S = 60.0
OWN_S = 900.0


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_folder(tmp_path / "ranks")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(folder: Path, clock: Clock, tmp_path: Path) -> Callable[[int], RankWatch]:
    """Return watch(rank) -> the watch of one of two ranks, without its thread."""
    return lambda rank: RankWatch(
        Membership(rank, 2, rank, folder, is_ours=True),
        tmp_path,
        DEADLINE_S,
        lambda _reason: None,
        clock=clock,
    )


def test_work_of_rank_0_alone_may_take_longer_than_the_deadline(
    watch: Callable[[int], RankWatch], clock: Clock
) -> None:
    lead, other = watch(0), watch(1)
    lead.doing("publishing its weights", within_s=OWN_S)
    other.doing("waiting for a command of rank 0", awaits_rank_0=True)
    began = clock.now
    while clock.now < began + OWN_S:
        lead._write()  # as its thread does
        assert other.find_problem() == lead.find_problem() == ""
        clock.now += DEADLINE_S / 2
    clock.now += 1
    other._write()
    line = lead.find_problem()
    assert line.startswith("rank 0 of 2")
    assert "does not answer within 900 s; it was doing: publishing its weights" in line


def test_a_rank_0_that_does_not_run_is_named_by_the_deadline(
    watch: Callable[[int], RankWatch], clock: Clock
) -> None:
    lead, other = watch(0), watch(1)
    lead.doing("publishing its weights", within_s=OWN_S)
    other.doing("waiting for a command of rank 0", awaits_rank_0=True)
    assert other.find_problem() == ""
    clock.now += DEADLINE_S
    assert other.find_problem() == ""
    clock.now += 1
    line = other.find_problem()
    assert line.startswith("rank 0 of 2")
    assert "within train.rank_deadline_s = 60 s; it was doing: publishing its weights" in line


def test_of_two_that_wait_the_one_that_does_not_run_is_named(
    watch: Callable[[int], RankWatch], clock: Clock
) -> None:
    lead, other = watch(0), watch(1)
    other.doing("pack 3 of 9")
    lead.doing("pack 3 of 9")
    assert lead.find_problem() == ""
    clock.now += DEADLINE_S + 1
    lead._write()  # as its thread does; the other's does not
    assert DEADLINE_S > SILENT_S
    assert lead.find_problem().startswith("rank 1 of 2")


def test_a_rank_whose_board_was_removed_ends(
    watch: Callable[[int], RankWatch], folder: Path
) -> None:
    shutil.rmtree(folder)
    assert "was removed" in watch(1).find_problem()


def refuse(number: int) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise OSError(number, "refused")

    return call


def test_without_hard_links_the_first_reason_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching.os, "link", refuse(errno.EPERM))
    assert RankBoard(folder).set_end_reason("rank 1 hangs") == "rank 1 hangs"
    assert RankBoard(folder).set_end_reason("rank 2 hangs") == "rank 1 hangs"
    assert [path.name for path in folder.iterdir()] == ["end-reason"]


def test_a_hang_is_noticed_and_told_where_nothing_can_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: queue.Queue[str] = queue.Queue()
    member = Membership(0, 2, 0, folder, is_ours=True)
    watch = RankWatch(member, tmp_path, 0.01, ends.put)
    watch.__enter__()
    monkeypatch.setattr(watching.Path, "write_text", refuse(errno.ENOSPC))
    watch.doing("pack 1 of 2")
    line = ends.get(timeout=PATIENCE_S)
    assert "does not answer" in line
    assert f"{folder} cannot be written: refused" in line


def test_a_watch_that_fails_ends_its_rank(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankWatch, "find_problem", refuse(errno.EIO))
    ends: queue.Queue[str] = queue.Queue()
    member = Membership(1, 2, 1, folder, is_ours=True)
    RankWatch(member, tmp_path, DEADLINE_S, ends.put).__enter__()
    assert "the watch of rank 1 failed" in ends.get(timeout=PATIENCE_S)


def test_a_child_that_is_killed_is_named_with_what_it_was_doing(
    watch: Callable[[int], RankWatch],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "PROGRAM", ("-S", "-c", "import time; time.sleep(600)"))
    config = Config.model_validate({"run": {"dir": tmp_path}})
    ranks = processes.RankProcesses(config, Membership(0, 2, 0, folder, is_ours=True))
    try:
        watch(1).doing("pack 3 of 9")
        assert ranks.look() == ""
        [child] = ranks._children.values()
        child.kill()
        wait_until(ranks.look, "the end of the child")
        line = ranks.look()
    finally:
        ranks.end(0.0)
    assert line.startswith(
        f"rank 1 of 2 (pid {child.pid}) was ended by SIGKILL; it was doing: pack 3 of 9; its log is "
    )
    assert line.endswith("train-1.log; all ranks end")

"""A process is found below another one, and read, whatever it calls itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from envs.suites.desktop import keeper
from envs.suites.osworld.container import _started
from envs.tools.process_tree import descendants, kill_below, kill_tree

pytestmark = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")

OWN_NAME = """
open("/proc/self/comm", "wb").write(b"sl\\xe9\\xe9p) Z 1")
print(flush=True)
input()
"""


@pytest.fixture
def foreign() -> Iterator[int]:
    """A child whose name is no UTF-8, and looks like the rest of the line it is in."""
    with subprocess.Popen(
        [sys.executable, "-c", OWN_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_a_name_that_is_no_utf8_hides_no_process(foreign: int) -> None:
    assert foreign in descendants(os.getpid())
    assert foreign in keeper.descendants(os.getpid())
    kill_below(foreign)  # nothing is there: it returns


def test_a_name_that_is_no_utf8_hides_neither_memory_nor_age(foreign: int) -> None:
    assert keeper.anonymous_mb(foreign) > 0
    assert int(_started(foreign)) > 0


def test_a_process_that_may_not_be_read_hides_none_of_ours(
    foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(process: psutil.Process, **_: bool) -> list[psutil.Process]:
        raise psutil.AccessDenied(1)  # as on a host whose /proc is mounted with hidepid=1

    monkeypatch.setattr(psutil.Process, "children", refused)
    assert foreign in descendants(os.getpid())
    assert descendants(foreign) == []


def test_below_a_process_that_is_gone_there_is_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        assert descendants(child.pid) == []
        kill_tree(child.pid)  # no such process: it returns

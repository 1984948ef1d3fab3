"""A browser is started once for all that wait for it; a slot that has left starts none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bus.errors import EnvError
from envs.contract.queueing import GivenUpError, PendingCall, SharedWait, answering
from envs.suites.miniwob.browser import BrowserHost
from tests.waiting import wait_until

BROWSER = """#!/bin/sh
echo started >> {folder}/starts
while [ ! -e {folder}/end ]; do sleep 0.01; done
exit 1
"""


def test_a_slot_that_has_left_does_not_wait_for_a_browser_and_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.contract.queueing.UNSAID_S", 0.0)
    monkeypatch.setattr("envs.contract.queueing.POLL_S", 0.005)
    binary, starts = tmp_path / "browser", tmp_path / "starts"
    binary.write_text(BROWSER.format(folder=tmp_path))
    binary.chmod(0o755)
    host = BrowserHost(lambda: binary, lambda: tmp_path, 1.0, "png", 60.0)
    host.join()
    waits: list[SharedWait | None] = []
    call = PendingCall(waits.append)

    def in_a_call() -> None:
        with answering(call):
            host.browser()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(host.browser)
        wait_until(starts.exists)
        second = pool.submit(in_a_call)
        wait_until(lambda: waits)
        call.given_up.set()
        with pytest.raises(GivenUpError):
            second.result()
        assert not first.done()
        (tmp_path / "end").touch()
        with pytest.raises(EnvError, match="did not start"):
            first.result()
    assert waits == [SharedWait("the start of a shared browser", 248.0), None]
    assert starts.read_text() == "started\n"
    host.leave()

"""Promises of set-up steps: they have their effects in the guest, and fail as OSWorld's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EnvError
from envs.suites.osworld import setup
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.evaluator_process import EvaluatorProcess
from envs.suites.osworld.guest import Guest, RefusalError, read_address
from envs.suites.osworld.setup import EpisodeContext, prepare
from envs.tools.taskfile import SetupStep


@pytest.fixture
def context(tmp_path: Path) -> Iterator[EpisodeContext]:
    evaluator = EvaluatorProcess("", 5.0)
    yield EpisodeContext(tmp_path, Downloads(tmp_path / "kept"), (800, 600), "secret", evaluator)
    evaluator.close()


def test_steps_have_their_documented_effects(
    xguest: Any, web: Any, context: EpisodeContext
) -> None:
    guest = Guest(read_address(xguest.url))
    path = str(xguest.home / "fruit.txt")
    filled = ["echo", "{SCREEN_WIDTH}x{SCREEN_HEIGHT_HALF} {CLIENT_PASSWORD}"]
    steps = [
        SetupStep("download", {"files": [{"url": f"{web.url}/whole", "path": path}]}),
        SetupStep("execute", {"command": filled, "stdout": "../../said.txt"}),
        SetupStep("sleep", {"seconds": 0}),
    ]
    prepare(steps, guest, context)
    assert guest.read_file(path) == b"pears"
    # Only its name counts: a task file writes only into the episode's folder.
    assert (context.folder / "said.txt").read_text() == "800x300 secret\n"
    guest.close()


def test_a_refusal_is_fatal_where_osworlds_own_step_raises(
    xguest: Any, context: EpisodeContext, caplog: pytest.LogCaptureFixture
) -> None:
    guest = Guest(read_address(xguest.url))
    logged = [
        SetupStep("activate_window", {"window_name": "none"}),
        SetupStep("close_window", {"window_name": "none"}),
        SetupStep("launch", {"command": ["no-such-program"]}),
        SetupStep("execute", {"command": ["no-such-program"]}),
        SetupStep("change_wallpaper", {"path": "/none"}),
    ]
    prepare(logged, guest, context)
    assert [record.args[1] for record in caplog.records] == [step.type for step in logged]  # type: ignore[index]
    opens = [SetupStep("open", {"path": "/none"})]
    with pytest.raises(EnvError, match=r"set-up step 0 \(open\): .*404"):
        prepare(opens, guest, context)
    prepare(opens, guest, context, lenient=True)  # before an evaluation
    guest.close()


def test_a_command_that_runs_until_something_holds_outlasts_refusals(
    xguest: Any, tmp_path: Path, context: EpisodeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "AGAIN_S", 0)
    guest, commands = Guest(read_address(xguest.url)), []
    execute = guest.execute

    def refused(*command: Any, **how: Any) -> Any:
        commands.append(command)
        if len(commands) < 3:
            raise RefusalError("busy")
        return execute(*command, **how)

    monkeypatch.setattr(guest, "execute", refused)
    step = SetupStep("execute", {"command": ["true"], "until": {"returncode": 0}})
    prepare([step], guest, context)
    assert len(commands) == 3
    guest.close()

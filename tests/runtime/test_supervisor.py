"""Child processes that belong together, with real `dart` children."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.run_dir import claim, leave_signal
from dart_cli.runtime.supervisor import Child, ChildError, Supervisor, _append_to
from tests.waiting import PATIENCE_S


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A run of its own."""
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    return path


def supervisor(
    tmp_path: Path,
    commands: Mapping[str, Sequence[str]],
    leaders: Sequence[str],
    *,
    restarts: int = 0,
    on_kill: Callable[[str, int], None] = lambda _name, _number: None,
    is_over: bool = False,
) -> tuple[Supervisor, list[str]]:
    """A supervisor and its notices."""
    messages: list[str] = []
    made = Supervisor(
        commands,
        leaders=leaders,
        restarts=restarts,
        log_file=tmp_path / "logs" / "up.log",
        notice=messages.append,
        on_kill=on_kill,
        is_over=lambda: is_over,
    )
    return made, messages


async def _alive(config: Config, worker: str) -> int:
    """The pid of a worker, once it lives."""
    path = config.run.dir / "workers" / f"{worker}.lock"
    while not (path.exists() and path.read_text()):  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])


async def test_it_is_done_when_its_leaders_are(tmp_path: Path) -> None:
    made, output = supervisor(tmp_path, {"one": ["--version"]}, ["one"])
    await asyncio.wait_for(made.run(asyncio.Event()), PATIENCE_S)
    assert output == []
    assert (tmp_path / "logs" / "up.log").read_text().startswith("one | dart ")


@pytest.mark.parametrize(("follow_s", "is_ended"), [(None, False), (0.0, True)])
async def test_a_leader_is_ended_after_another_only_where_it_shall_follow(
    follow_s: float | None, is_ended: bool, tmp_path: Path, config_path: Path
) -> None:
    commands = {"one": ["--version"], "two": ["data", str(config_path)]}
    made = Supervisor(
        commands,
        leaders=list(commands),
        restarts=0,
        log_file=tmp_path / "up.log",
        notice=lambda _: None,
        follow_s=follow_s,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    await asyncio.wait_for(made._children["one"].has_ended.wait(), PATIENCE_S)
    for _ in range(100):
        await asyncio.sleep(0)
    assert made._ending.is_set() is is_ended
    stop.set()
    await asyncio.wait_for(running, PATIENCE_S)


async def test_every_character_of_a_child_is_kept_however_it_arrives(tmp_path: Path) -> None:
    made, _ = supervisor(tmp_path, {"one": []}, ["one"])
    stream, child, log = asyncio.StreamReader(), Child("one", []), io.StringIO()
    reading = asyncio.create_task(made._read(child, stream, log))
    for (
        byte
    ) in "50 %\rdone ▇\n\nKilled ▂".encode():  # without a line's end, as a crash may leave it
        stream.feed_data(bytes([byte]))
        await asyncio.sleep(0.001)
    stream.feed_eof()
    await reading
    assert log.getvalue().splitlines() == ["one | 50 %", "one | done ▇", "one | Killed ▂"]
    assert child.last_line == "Killed ▂"


async def test_a_child_is_read_from_though_the_disk_of_the_log_is_full(tmp_path: Path) -> None:
    made, output = supervisor(tmp_path, {"one": []}, ["one"])
    stream, child = asyncio.StreamReader(), Child("one", [])
    with _append_to(Path("/dev/full")) as log:
        reading = asyncio.create_task(made._read(child, stream, log))
        for number in range(3):
            stream.feed_data(b"WARNING %d\n" % number + b"x" * 20000 + b"\n")
        stream.feed_data(b"progress: all\n")
        stream.feed_eof()
        await reading
    assert output == [
        f"one: {words}" for words in ("WARNING 0", "WARNING 1", "WARNING 2", "progress: all")
    ]
    assert child.last_line == "progress: all"


async def test_the_address_of_an_endpoint_is_shown_once_with_its_name(tmp_path: Path) -> None:
    made, output = supervisor(tmp_path, {"one": []}, ["one"])
    stream = asyncio.StreamReader()
    stream.feed_data(b"serve-0: http://127.0.0.1:8480/v1\nother words\n")
    stream.feed_eof()
    await made._read(Child("serve-0", []), stream, io.StringIO())
    assert output == ["serve-0: http://127.0.0.1:8480/v1"]


async def test_what_a_child_still_finishes_is_shown_once(tmp_path: Path) -> None:
    made, output = supervisor(tmp_path, {"one": []}, ["one"])
    stream = asyncio.StreamReader()
    for doing in ("in its update", "in its update", "writing its last checkpoint"):
        stream.feed_data(f"progress: train is still {doing}\n".encode())
    stream.feed_eof()
    await made._read(Child("train", []), stream, io.StringIO())
    assert output == [
        "train: progress: train is still in its update",
        "train: progress: train is still writing its last checkpoint",
    ]


async def test_a_full_disk_of_the_log_hides_no_childs_end() -> None:
    commands = {"data": ["data", "no.toml"]}
    made = Supervisor(
        commands, leaders=["data"], restarts=0, log_file=Path("/dev/full"), notice=lambda _: None
    )
    with pytest.raises(ChildError, match="data ended with 2: no such file"):
        await asyncio.wait_for(made.run(asyncio.Event()), PATIENCE_S)


async def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    made, output = supervisor(tmp_path, {"data": ["data", "no.toml"]}, ["data"], restarts=3)
    with pytest.raises(ChildError, match=r"data ended with 2: no such file: no\.toml") as info:
        await asyncio.wait_for(made.run(asyncio.Event()), PATIENCE_S)
    assert info.value.exit_code == 2
    assert not any("starting it again" in each for each in output)


async def test_a_killed_child_is_started_again_and_stop_ends_all(
    tmp_path: Path, config_path: Path
) -> None:
    config = load_config(config_path)
    commands = {
        "env-0": ["env", str(config_path), "--worker", "env-0"],
        "data": ["data", str(config_path)],
    }
    made, output = supervisor(tmp_path, commands, ["data"], restarts=1)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        await _alive(config, "env-0")
        first = await _alive(config, "data")
        os.kill(first, signal.SIGKILL)
        while await _alive(config, "data") == first:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
        stop.set()
        await running
    assert any("data was ended by SIGKILL" in each and "(1/1)" in each for each in output)
    for worker in ("env-0", "data"):
        with claim(config, worker, worker):
            pass  # no process is left


async def test_once_the_run_is_over_only_the_process_that_the_others_talk_to_is_started_again(
    tmp_path: Path, config_path: Path
) -> None:
    config = load_config(config_path)
    commands = {
        "env-0": ["env", str(config_path), "--worker", "env-0"],
        "data": ["data", str(config_path)],
    }
    made, output = supervisor(tmp_path, commands, ["data"], restarts=1, is_over=True)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        for worker in ("env-0", "data"):
            os.kill(await _alive(config, worker), signal.SIGKILL)
        while len(output) < 2:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)
        stop.set()
        await running
    [env] = [line for line in output if line.startswith("env-0")]
    assert env.startswith("env-0 was ended by SIGKILL")
    assert env.endswith("the run is over, so it is not started again")
    assert any("data was ended by SIGKILL" in line and "(1/1)" in line for line in output)


async def test_a_stop_does_not_hang_on_a_child_that_is_to_start_again_later(
    tmp_path: Path, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.runtime.supervisor._BACKOFF_S", 1000.0)
    monkeypatch.setattr("dart_cli.runtime.supervisor._MAX_BACKOFF_S", 1000.0)
    made, output = supervisor(tmp_path, {"data": ["data", str(config_path)]}, ["data"], restarts=1)
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        os.kill(await _alive(load_config(config_path), "data"), signal.SIGKILL)
        while not any("starting it again" in each for each in output):  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)
        stop.set()
        await running


async def test_a_child_that_keeps_dying_ends_the_others(tmp_path: Path, config_path: Path) -> None:
    config = load_config(config_path)
    commands = {
        "data": ["data", str(config_path)],
        "env-0": ["env", str(config_path), "--worker", "env-0"],
    }
    on_kill = partial(leave_signal, config.run.dir)
    made, _ = supervisor(tmp_path, commands, ["data"], on_kill=on_kill)
    running = asyncio.create_task(made.run(asyncio.Event()))
    async with asyncio.timeout(PATIENCE_S):
        await _alive(config, "data")
        os.kill(await _alive(config, "env-0"), signal.SIGKILL)
        with pytest.raises(ChildError, match="env-0 was ended by SIGKILL"):
            await running
    ends = {each.name: (each.is_ended, each.error) for each in workers_of(config.run.dir)}
    assert ends == {"data": (True, ""), "env-0": (False, "killed by signal 9")}
    with claim(config, "data"):
        pass


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_child_that_reports_progress_as_it_ends_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    monkeypatch.setattr("dart_cli.runtime.supervisor.GRACE_S", 0.0)
    made, output = supervisor(tmp_path, {"one": []}, ["one"])
    child, stream, log = Child("one", []), asyncio.StreamReader(), io.StringIO()
    reading = asyncio.create_task(made._read(child, stream, log))
    ending = asyncio.create_task(made._see_end(child))
    for _ in range(40 if speaks else 0):
        stream.feed_data(b"progress: one is still writing its last checkpoint\n")
        await asyncio.sleep(0.1)
    if speaks:
        child.has_ended.set()
    await asyncio.wait_for(ending, PATIENCE_S)
    stream.feed_eof()
    await reading
    assert ("one did not end in time; killed" in output) != speaks

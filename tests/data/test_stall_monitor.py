"""Six ways to stand still, with real processes: each is named in the log and by `dart status`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bus.errors import DartError, DeadlineError
from bus.snapshot import Snapshot, StallView
from bus.weights import WeightsPublished
from dart_cli.config import endpoints
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data import service
from dart_cli.runtime.run_dir import claim
from dart_cli.status import watch
from dart_cli.status.watch import run_status
from tests.data.client import Client, connect, serving
from tests.simulated import LATE, QUICK, STUCK
from tests.waiting import PATIENCE_S
from tests.weights.sets import publish

SUITES = Path(__file__).parents[1] / "own_suites"
CONFIG = """
[run]
dir = "{folder}/run"
[env]
suite = "{suite}"
slots = 2
step_deadline_s = 3.0
evaluate_deadline_s = 3.0
[rollout]
engine = "{engine}"
[data]
group_size = 2
groups_per_batch = 1
[train]
learner = "{learner}"
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(endpoints, "STALL_S", 1.0)
    monkeypatch.setattr(service, "DEAD_AFTER_S", 1.5)
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.1)
    monkeypatch.setattr(service, "HOLD_S", 0.2)
    monkeypatch.setattr(service, "SNAPSHOT_S", 0.1)
    monkeypatch.setattr(service, "SNAPSHOT_SHARE", 1.0)
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)


@pytest.fixture
def children() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Role -> process; all are killed at the end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    yield started
    for child in started.values():
        child.kill()
        child.wait()


class Run:
    """A run in a folder, its parts started one by one."""

    def __init__(self, folder: Path, children: dict[str, subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self.path = folder / "c.toml"
        self.children = children

    def configure(self, suite: str = "mini", engine: str = "scripted") -> Config:
        """Write the configuration."""
        self.path.write_text(
            CONFIG.format(folder=self.folder, suite=suite, engine=engine, learner=QUICK)
        )
        return load_config(self.path)

    def start(self, role: str) -> subprocess.Popen[bytes]:
        """`dart ROLE CONFIG` in a process of its own."""
        self.children[role] = subprocess.Popen(
            [sys.executable, "-m", "dart_cli", role, str(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self.children[role]


@pytest.fixture
def run(tmp_path: Path, children: dict[str, subprocess.Popen[bytes]]) -> Run:
    return Run(tmp_path, children)


async def named(client: Client, kind: str, caplog: pytest.LogCaptureFixture) -> StallView:
    """The first stall of that kind, once data's log tells it too."""
    seen = await client.eventually(lambda seen: any(each.kind == kind for each in seen.stalls))
    [stall, *_] = [each for each in seen.stalls if each.kind == kind]
    begins = stall.text.partition(" ")[0]
    async with asyncio.timeout(PATIENCE_S):
        while not any(f"stall: {begins}" in each for each in caplog.messages):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return stall


def publish_weights(config: Config, version: int) -> WeightsPublished:
    """A small weight set on disk, and the word that it is there."""
    made = publish({"w": torch.zeros(1)}, config.run.dir / "weights", version)
    return WeightsPublished(
        policy_version=made.policy_version, path=str(made.path), digest=made.digest, updates=version
    )


def is_alive(worker: str, *, version: int = -1) -> Callable[[Snapshot], bool]:
    return lambda seen: any(
        p.worker == worker and p.alive and p.policy_version >= version for p in seen.processes
    )


async def test_a_dead_env_host_is_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(run.configure()) as client:
        child = run.start("env")
        await client.eventually(is_alive("env-0"))
        child.kill()
        stall = await named(client, "gone", caplog)
    assert stall.who == "env-0"
    assert stall.text.startswith(f"env-0 (pid {child.pid} on ")
    assert "start it again, logs/env-0.log" in stall.text


async def test_a_paused_trainer_is_named_until_it_goes_on(
    run: Run, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.configure()
    async with serving(config) as client:
        child = run.start("train")
        await client.eventually(is_alive("train"))
        child.send_signal(signal.SIGSTOP)
        stall = await named(client, "stopped", caplog)
        assert f"train (pid {child.pid}" in stall.text
        assert f"kill -CONT {child.pid}" in stall.text
        assert await run_status(config, once=True, as_json=False, every_s=1.0) == 1
        assert f"kill -CONT {child.pid}" in " ".join(capsys.readouterr().out.split())
        child.send_signal(signal.SIGCONT)
        await client.eventually(lambda seen: all(each.kind != "stopped" for each in seen.stalls))


async def test_an_engine_that_never_answers_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config = run.configure(engine=STUCK)
    async with serving(config) as client:
        await client.tell(publish_weights(config, 0))
        run.start("rollout")
        run.start("env")
        stall = await named(client, "engine", caplog)
    assert stall.who == "env-0"
    assert "completions of rollout-0, which has brought no token" in stall.text


async def test_an_evaluator_that_sleeps_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config = run.configure(suite=f"{SUITES / 'sleepy_suite.py'}:SleepySuite")
    async with serving(config) as client:
        await client.tell(publish_weights(config, 0))
        run.start("rollout")
        run.start("env")
        stall = await named(client, "environment", caplog)
    assert stall.who == "env-0"
    assert "to evaluate sleepy/task (at most 3 s)" in stall.text


async def test_a_lost_permit_holder_is_named_and_its_permit_given_on(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config = run.configure(engine=LATE)
    async with serving(config) as client:
        await client.tell(publish_weights(config, 0))
        child = run.start("rollout")
        await client.eventually(is_alive("rollout-0", version=0))
        await client.tell(publish_weights(config, 1))
        await client.eventually(lambda seen: "rollout-0" in seen.permits)
        reply = await client.sync("rollout-1", 0)
        assert not reply.granted
        assert "rollout-0 must have taken weights first" in reply.reason
        child.kill()
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.sync("rollout-1", 0)).granted:
                pass
        stall = await named(client, "gone", caplog)
    assert stall.who == "rollout-0"
    assert any("rollout-0 is gone with the permit to take weights" in m for m in caplog.messages)


async def test_a_full_disk_is_named_when_data_could_not_go_on(run: Run) -> None:
    config = run.configure()
    child = run.start("data")
    async with connect(config) as client:
        lease = await client.must_lease(0)
        # SQLite's files may not grow any more, as on a full disk.
        largest = max(each.stat().st_size for each in config.run.dir.glob("run.db*"))
        limit = largest + 100_000
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
        with contextlib.suppress(DartError):
            async with asyncio.timeout(PATIENCE_S):
                while child.poll() is None:
                    await client.submit(lease, "pass", steps=8)
                    lease = await client.must_lease(0)
    assert child.wait(PATIENCE_S) == 1
    with (
        claim(config, "env", "env-7"),
        pytest.raises(DeadlineError, match=r"data \(pid \d+\) has ended: .*free space") as info,
    ):
        await run_status(config, once=True, as_json=False, every_s=1.0)
    assert "free space on its disk and start again" in str(info.value)
    assert str(info.value).endswith("env-7 wait for it")

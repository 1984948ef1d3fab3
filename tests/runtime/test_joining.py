"""Promises of a process that joins its run, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bus.endpoints import DATA, Endpoints
from bus.errors import ConfigError, ProtocolError, StoreError
from bus.messages import JoinReply, JoinRequest, Reply, Request
from bus.requests import Replier, Requester
from dart_cli.config.load import default_config
from dart_cli.runtime import joining, role
from dart_cli.runtime.background import background
from dart_cli.runtime.joining import Joining
from tests.waiting import PATIENCE_S, until


@dataclass
class Data:
    """A data service that answers the requests of processes that join."""

    asked: list[JoinRequest] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)  # one a request, until none is left
    notes: list[str] = field(default_factory=list)

    async def answer(self, _client: str, request: Request) -> Reply:
        assert isinstance(request, JoinRequest)
        self.asked.append(request)
        if self.faults:
            raise self.faults.pop(0)
        return JoinReply(notes=self.notes)

    @asynccontextmanager
    async def serving(self, run_dir: Path) -> AsyncIterator[None]:
        """It serves while the block runs."""
        async with Replier(Endpoints(run_dir).address(DATA)) as replier:
            task = asyncio.create_task(replier.serve(self.answer))
            yield
            await replier.close(0.0)
            await task


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@asynccontextmanager
async def process(run_dir: Path, *overrides: str) -> AsyncIterator[Joining]:
    """A trainer that takes part in the run while the block runs."""
    config = default_config([f"run.dir={run_dir}", *overrides])
    async with (
        asyncio.timeout(PATIENCE_S),
        Requester(Endpoints(run_dir).address(DATA), name="train", peer="dart data") as requester,
    ):
        its = Joining(config, "train", "train", requester)
        async with background(its.keep()):
            yield its


async def test_the_settings_go_to_each_data_process_and_only_the_first_may_refuse(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(notes=["train has train.lr = 0.5"])
    async with process(run_dir, "train.lr=0.5") as its:
        assert not its.joined.is_set()
        async with data.serving(run_dir):
            await its.joined.wait()
        async with data.serving(run_dir):
            await until(lambda: len(data.asked) == 2)
    first, second = data.asked
    assert first.settings == {"run.dir": str(run_dir), "train.lr": 0.5}
    assert (first.role, first.worker, first.is_first) == ("train", "train", True)
    assert second == first.model_copy(update={"is_first": False})
    assert caplog.messages.count("train has train.lr = 0.5") == 1


async def test_a_refusal_ends_the_process_with_its_line(run_dir: Path) -> None:
    data = Data(faults=[ConfigError("dart train does not read data.group_size")])
    async with data.serving(run_dir):
        with pytest.raises(ConfigError, match=r"^dart train does not read data\.group_size$"):
            async with process(run_dir) as its:
                await its.joined.wait()


async def test_a_data_service_of_another_version_ends_the_process(run_dir: Path) -> None:
    older = ProtocolError("protocol version 18, this side speaks 17: run the same dart version")
    async with Data(faults=[older]).serving(run_dir):
        with pytest.raises(
            ProtocolError, match=r"^dart data at ipc:.*: run the same dart version$"
        ):
            async with process(run_dir) as its:
                await its.joined.wait()


async def test_a_fault_of_the_data_service_is_no_refusal(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.0)
    data = Data(faults=[StoreError("disk full"), ValueError("a bug")])
    async with data.serving(run_dir), process(run_dir) as its:
        await its.joined.wait()
    assert len(data.asked) == 3


@pytest.mark.parametrize("supervised", [False, True])
def test_how_a_process_was_started_is_sent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, supervised: bool
) -> None:
    monkeypatch.setattr(role, "_start", role.Start())
    monkeypatch.setattr(role, "when_orphaned", lambda *_: None)
    if supervised:
        monkeypatch.setenv(role.PARENT_VARIABLE, "1")
    given = [f"run.dir={run_dir}", "train.lr=0.5"]
    config = default_config(given)

    async def main(_name: str, _stop: asyncio.Event) -> None:
        async with Requester(Endpoints(run_dir).address(DATA)) as requester:
            sent = Joining(config, "train", "train", requester)._request
        assert sent.set_keys == ["run.dir", "train.lr"]
        assert (sent.is_supervised, sent.is_forced) == (supervised, True)

    assert role.run_role("train", config, main, force=True, overrides=given) == 0

"""What runs on a node: a child, its output, its private folder; without Ray."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dart_cli.cluster import role_host
from dart_cli.cluster.process import LOST, Ranks
from dart_cli.cluster.role_host import CONFIG, ChildOutput, RoleHost, Setup
from dart_cli.runtime.liveness import start_ticks
from dart_cli.runtime.logs import log_dir
from tests.waiting import PATIENCE_S


def setup(tmp_path: Path, **more: object) -> Setup:
    given: Setup = {
        "config": f'[run]\ndir = "{tmp_path}/run"\n',
        "keys": "the keys",
        "cwd": str(tmp_path),
        "environment": {},
        "hides_gpus": False,
        "shared": [],
    }
    return given | more  # type: ignore[return-value]


@pytest.fixture
def host() -> Iterator[RoleHost]:
    made = RoleHost("data")
    yield made
    if made._folder is not None:
        shutil.rmtree(made._folder)


async def until_ended(host: RoleHost) -> ChildOutput:
    """All that its command prints."""
    output, log = b"", b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            printed = await host.new_output(host._life, 5.0)
            assert printed is not None
            output, log = output + printed["output"], log + printed["log"]
            if printed["code"] is not None:
                return {"output": output, "log": log, "code": printed["code"]}


async def test_a_command_runs_in_a_private_folder_with_the_keys(
    host: RoleHost, tmp_path: Path
) -> None:
    assert await host.prepare(setup(tmp_path)) == ""
    folder = host._folder
    assert folder is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = folder / "keys" / "curve.json"
    assert keys.read_text() == "the keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600

    log = log_dir(folder / "run") / "data.log"
    log.parent.mkdir(parents=True)
    log.write_text("as the role writes it\n")
    await host.start(["data", CONFIG, "--set", "data.group=1"], {})
    printed = await until_ended(host)
    assert printed["code"] == 2  # the key does not exist: nothing starts
    assert b"did you mean" in printed["output"]
    assert str(folder / "run.toml").encode() in printed["output"]
    assert printed["log"] == b"as the role writes it\n"
    assert (await until_ended(host))["output"] == b""  # printed once
    assert await host.new_output("another life", 5.0) is None

    await host.start(["--version"], {})
    printed = await until_ended(host)
    assert printed["output"].startswith(b"dart ")
    assert printed["code"] == 0
    await host.close()
    assert not folder.exists()


async def test_a_node_that_does_not_see_a_shared_folder_says_so(
    host: RoleHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_host, "SHARED_S", 0.0)
    (tmp_path / "there").touch()
    shared = [(str(tmp_path / "there"), "there"), (str(tmp_path / "not"), "it does not see it")]
    assert await host.prepare(setup(tmp_path, shared=shared)) == "it does not see it"


async def test_the_child_gets_none_of_rays_settings(
    host: RoleHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    await host.prepare(setup(tmp_path, environment={"NCCL_DEBUG": "INFO"}))
    result = host._environment({"RANK": "1"})
    assert not any(name.startswith("RAY_") for name in result)
    assert "OMP_NUM_THREADS" not in result  # Ray's, by the number of CPUs it was asked for
    assert (result["RANK"], result["NCCL_DEBUG"], result["CUDA_VISIBLE_DEVICES"]) == (
        "1",
        "INFO",
        "3",
    )
    await host.prepare(setup(tmp_path, hides_gpus=True))
    assert host._environment({})["CUDA_VISIBLE_DEVICES"] == ""


async def test_output_that_is_not_asked_for_is_bounded_and_the_newest_is_kept(
    host: RoleHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_host, "BUFFER_BYTES", 20)
    await host.prepare(setup(tmp_path))
    await host.start(["--help"], {})
    assert host._pumping is not None
    await asyncio.wait_for(asyncio.shield(host._pumping), PATIENCE_S)
    printed = await until_ended(host)
    warning, _, rest = printed["output"].partition(b" bytes of output were dropped\n")
    assert int(warning.split()[-1]) > 1000
    assert len(rest) == 20


async def test_folders_of_processes_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_host, "Path", lambda path: tmp_path if path == "/tmp" else Path(path))
    monkeypatch.setattr(role_host.socket, "gethostname", lambda: "box")
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    parent = tmp_path / f"dart-{os.getuid()}"
    parent.mkdir(mode=0o700)
    mine = f"ray-box-{os.getpid()}-{start_ticks(os.getpid())}-a"
    names = {f"ray-box-{gone.pid}-7-a", f"ray-other-{gone.pid}-7-a", mine}
    for name in names:
        (parent / name).mkdir()
    made = role_host._private_folder()
    kept = {path.name for path in parent.iterdir()}
    assert kept == names - {f"ray-box-{gone.pid}-7-a"} | {made.name}


class Rank:
    """One that ends when it is told to."""

    def __init__(self, said: bytes = b"") -> None:
        self.output = asyncio.StreamReader()
        self.output.feed_data(said)
        self.returncode: int | None = None
        self.signals: list[int] = []
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self.output.feed_eof()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def signal_group(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL and self.returncode is None:
            self.end(-9)

    def how_it_ended(self, code: int) -> str:
        return f"ended with {code}"


async def test_ranks_end_together_and_the_first_that_failed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dart_cli.cluster.process.RANKS_END_S", 0.01)
    parts = [Rank(b"one\n"), Rank(), Rank()]
    ranks = Ranks(parts)  # type: ignore[arg-type]
    parts[0].end(0)
    parts[1].end(LOST)
    async with asyncio.timeout(PATIENCE_S):
        assert await ranks.wait() == LOST
        assert await ranks.output.read() == b"one\n"
    assert ranks.returncode == LOST
    assert parts[2].signals == [signal.SIGKILL]
    assert ranks.how_it_ended(LOST) == f"(rank 1) ended with {LOST}"


async def test_ranks_that_end_well_are_done_once_all_have() -> None:
    parts = [Rank(), Rank()]
    ranks = Ranks(parts)  # type: ignore[arg-type]
    parts[1].end(0)
    await asyncio.sleep(0)
    assert ranks.returncode is None
    parts[0].end(0)
    assert await asyncio.wait_for(ranks.wait(), PATIENCE_S) == 0

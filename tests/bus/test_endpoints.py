"""Promises of addresses, private directories and key files."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.endpoints import (
    MAX_IPC_PATH_BYTES,
    CurveKeys,
    Endpoints,
    check_secure,
    make_private_dir,
    read_curve,
    write_key_pair,
)
from bus.errors import ConfigError, RunDirectoryError
from bus.messages import Ack, Reply, Request, StopRequest
from bus.requests import Replier, Requester


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder in which sockets have a place; that of a test may be too long, with a long user name in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_addresses_are_in_private_directories_of_the_run(short: Path) -> None:
    run = short / "run"
    assert Endpoints(run).address("rollout-0") == f"ipc://{run}/sock/rollout-0.ipc"
    for path in (run, run / "sock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", [".", "sock"])
def test_a_directory_open_to_other_users_is_refused_with_the_cure(short: Path, part: str) -> None:
    run = short / "run"
    Endpoints(run).address("data")
    (run / part).chmod(0o755)
    with pytest.raises(RunDirectoryError, match=r"other users can enter \(mode 0755\): chmod 700 "):
        Endpoints(run).address("data")


def test_a_file_or_a_link_is_refused_as_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(RunDirectoryError, match=str(tmp_path / name)):
            make_private_dir(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, -1)
    with pytest.raises(RunDirectoryError, match="belongs to another user"):
        Endpoints(tmp_path / "run").address("data")


async def test_a_run_directory_with_a_long_path_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ack(client: str, request: Request) -> Reply:
        return Ack()

    run = tmp_path / ("x" * 100) / "run"
    address = Endpoints(run).address("rollout-7")
    assert len(address.removeprefix("ipc://")) <= MAX_IPC_PATH_BYTES
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere")  # another shell of the same user
    monkeypatch.chdir(run.parent)
    assert Endpoints(Path("run")).address("rollout-7") == address
    other = Endpoints(tmp_path / ("x" * 100) / "run2").address("rollout-7")
    assert other != address
    Path(other.removeprefix("ipc://")).parent.rmdir()
    async with Replier(address) as replier, Requester(address) as requester:
        task = asyncio.create_task(replier.serve(ack))
        assert await requester.request(StopRequest(reason=""), 10) == Ack()
    await task
    directory = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    shutil.rmtree(directory)


def test_tcp_addresses_come_from_the_config(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "run", {"data": "tcp://127.0.0.1:5555"})
    assert endpoints.address("data") == "tcp://127.0.0.1:5555"
    assert endpoints.address("telemetry-in").startswith("ipc://")


@pytest.mark.parametrize("name", ["", "../data", "a/b", "Data", "x" * 64])
def test_an_invalid_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="endpoint name"):
        Endpoints(tmp_path / "run").address(name)


def test_loopback_and_ipc_need_no_keys() -> None:
    for endpoint in ("ipc:///x", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"):
        check_secure(endpoint, None)


@pytest.mark.parametrize("endpoint", ["tcp://", "udp://127.0.0.1:1", "127.0.0.1:1", "tcp://[::1"])
def test_an_invalid_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint "):
        check_secure(endpoint, None)


def test_key_files_come_back_as_written_and_are_private(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    public, theirs = write_key_pair(mine), write_key_pair(other)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    allowed = tmp_path / "allowed.txt"
    text = f"\ufeff# the envs\r\n{theirs} José's host\r\n\r\n".encode()
    allowed.write_bytes(text + b"# Jos\xe9\n")  # saved by several editors
    curve = read_curve(mine, server=theirs, allowed=allowed)
    assert (curve.public, curve.server, curve.allowed) == (public, theirs, frozenset([theirs]))
    assert curve.secret not in repr(curve)
    check_secure("tcp://0.0.0.0:5555", curve)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "keys.json")
    with pytest.raises(ConfigError, match="cannot write keys"):
        write_key_pair(tmp_path / "keys.json")


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ('{"public": "a", "secret": "b"}', 0o600, "not a CURVE key"),
        ('{"public": "a"}', 0o600, "want a JSON object of public and secret"),
        ("nonsense", 0o600, "cannot read keys"),
        ("{}", 0o644, "other users can read the secret key: chmod 600"),
    ],
)
def test_a_bad_key_file_is_refused_by_name(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text, encoding="ascii")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words) as refused:
        read_curve(path)
    assert str(path) in str(refused.value)
    assert isinstance(CurveKeys("", ""), CurveKeys)

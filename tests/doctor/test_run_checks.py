"""One configuration on this host: its directory, ports and model."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from pathlib import Path
from typing import cast

import pytest

from bus.messages import ActRequest, Completion
from dart_cli.config.rules import Finding
from dart_cli.data.store.open import open_store
from dart_cli.doctor import run_checks as run
from dart_cli.doctor.machine import GIB
from dart_cli.doctor.trial_episode import InTime
from scripts.small_models import build
from tests.data.parts import make_ledger, play, small_config
from tests.doctor.parts import config_in, worst
from tests.env.parts import Says, completion


def test_a_run_directory_is_ours_alone_or_can_be_made(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert {each.level for each in run.directory(config)} <= {"ok", "warning"}
    config.run.dir.mkdir(mode=0o755)
    config.run.dir.chmod(0o755)
    result = worst(list(run.directory(config)))
    assert (result.level, result.cure) == ("error", f"chmod 700 {config.run.dir}")
    config.run.dir.chmod(0o700)
    config.run.dir.rmdir()
    config.run.dir.write_text("")
    assert "is no directory" in worst(list(run.directory(config))).text


def test_an_existing_run_is_reported_live_or_not_and_is_not_disturbed(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        play(make_ledger(config, store), 0)
        store.commit()
        assert run.holder(config.run.dir) == str(os.getpid())
        assert "a run is running in it" in next(iter(run.directory(config))).text
    assert run.holder(config.run.dir) == ""
    assert "a run that can be continued" in next(iter(run.directory(config))).text
    (config.run.dir / "run.db").write_bytes(b"no database" * 1000)
    assert next(iter(run.directory(config))).level == "error"
    with (config.run.dir / "data.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the reader holds no lock


def test_a_network_disk_is_refused_for_the_database() -> None:
    assert not list(run.check_file_system("ext4", Path("/x")))
    [finding] = run.check_file_system("nfs4", Path("/x"))
    assert finding.level == "error"
    assert run.file_system(Path("/proc")) == "proc"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        config = config_in(tmp_path, bus={"host": "127.0.0.1", "port": min(port, 65000)})
        if port <= 65000:
            [finding] = run.ports(config)
            assert finding.level == "error"
            assert f"port {port}: Address already in use" in finding.text
    [finding] = run.ports(config_in(tmp_path))
    assert finding.level == "ok"


def test_a_host_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    [finding] = run.ports(config_in(tmp_path, bus={"host": "a..b"}))
    assert finding.level == "error"
    assert "bus.host a..b, port 7800: it is not a host name" in finding.text


def test_a_model_of_an_unknown_user_has_no_size(tmp_path: Path) -> None:
    engine = {"engine": "transformers"}
    config = config_in(tmp_path, model={"path": "~no.such.user/x"}, rollout=engine)
    assert list(run.model(config)) == []


def _gigabytes(found: Finding) -> float:
    return float(found.text.split(" sets take ")[1].split(" GB")[0])


def test_a_model_folder_has_a_size(tmp_path: Path) -> None:
    build("qwen2_5_vl", tmp_path)
    finding, weights = run.model(config_in(tmp_path, model={"path": str(tmp_path)}))
    assert "0.00 billion parameters" in finding.text
    assert "3 sets take 0.0 GB" in weights.text
    lora = {"path": str(tmp_path), "lora": {"rank": 1}}
    _, adapters = run.model(config_in(tmp_path, model=lora, weights={"keep": 9999}))
    _, whole = run.model(config_in(tmp_path, model={"path": str(tmp_path)}, weights={"keep": 9999}))
    assert _gigabytes(adapters) < _gigabytes(whole) / 10
    assert run.check_weight_sets(15 * GIB, 3, 61 * GIB, tmp_path).level == "ok"
    assert run.check_weight_sets(15 * GIB, 3, 59 * GIB, tmp_path).level == "error"


async def test_an_answer_of_the_engine_has_a_deadline_in_a_played_episode() -> None:
    class Silent:
        async def act(self, request: ActRequest) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    request = cast("ActRequest", None)
    with pytest.raises(TimeoutError):
        await InTime(Silent(), 0.01).act(request)
    assert await InTime(Says("done()"), 60.0).act(request) == completion("done()")


@pytest.mark.parametrize(
    ("host", "port", "cure"),
    [
        ("192.0.2.1", 6000, "set bus.host to an address of the host that runs `dart data`"),
        ("a..b", 6000, "set bus.host to an address of the host that runs `dart data`"),
    ],
)
def test_an_address_of_another_host_is_cured_by_another_address_and_not_by_a_port(
    host: str, port: int, cure: str, tmp_path: Path
) -> None:
    [finding] = run.ports(config_in(tmp_path, bus={"host": host, "port": port}))
    assert finding.cure.startswith(cure)
    assert "bus.port" not in finding.cure


def test_the_limit_of_the_database_that_is_proposed_is_one_that_fits(tmp_path: Path) -> None:
    result = run.check_room(76_800_000_000, 500.0, tmp_path)
    assert (result.level, result.cure) == ("warning", "set data.max_gb = 76, or free some")
    assert run.check_room(76_800_000_000, 76.0, tmp_path).level == "ok"

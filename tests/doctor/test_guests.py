"""The doctor names the virtual machines that a killed `dart env` left, and goes on if no engine answers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("docker", reason="no docker: pip install -e '.[osworld]'")

from dart_cli.doctor import guests
from envs.suites.osworld.container import LABEL, _here, _maker
from tests.doctor.parts import doctor
from tests.envs.suites.osworld.engine import Engine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine()
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    yield engine
    engine.end()


def test_machines_whose_maker_died_are_named_with_what_removes_them(engine: Engine) -> None:
    died = {
        "Labels": {LABEL: f"{_here()}/1/another-start"}
    }  # of a process whose id another has now
    engine.add("dart-osworld-a", {"Labels": {LABEL: _maker()}})
    engine.add("dart-osworld-of-another-host", {"Labels": {LABEL: "some-boot-4026531836/1/1"}})
    engine.add("db", {"Labels": {"app": "db"}})
    assert list(guests.guests()) == []
    engine.add("dart-osworld-c", died)
    engine.add("dart-osworld-b", died)
    [finding] = guests.guests()
    assert (finding.subject, finding.level) == ("guests", "warning")
    assert finding.text.startswith("2 virtual machines left by a killed `dart env`")
    assert finding.cure.startswith("docker rm --force --volumes dart-osworld-b dart-osworld-c;")
    assert [each for each in engine.log if not each.startswith("GET")] == []  # it removes nothing


def test_the_doctor_prints_them(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.add("dart-osworld-a", {"Labels": {LABEL: f"{_here()}/1/another-start"}})
    doctor()
    printed = capsys.readouterr().out
    assert "1 virtual machine left by a killed `dart env`" in printed
    assert "docker rm --force --volumes dart-osworld-a;" in printed


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:9", "unix:///no/such/engine.sock", "nonsense"])
def test_without_an_engine_there_is_nothing_to_say(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert list(guests.guests()) == []


def test_without_the_package_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    assert list(guests.guests()) == []


def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "ENGINE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert list(guests.guests()) == []


def test_an_engine_that_lists_nothing_is_told(engine: Engine) -> None:
    engine.refuses = "GET containers/json"
    [finding] = guests.guests()
    assert finding.level == "warning"
    assert "the container engine could not list containers" in finding.text

"""Promises of containers: made as OSWorld needs them, anew for each episode, and never left behind.

The engine is a fake that speaks Docker's HTTP interface (engine.py); the package `docker`, the
guest server behind the published port and the processes are real.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("docker", reason="no docker: pip install -e '.[osworld]'")

from bus.errors import EnvError, MissingPartError
from envs.contract.actions import Done, Wait
from envs.contract.queueing import GivenUpError, PendingCall, answering
from envs.contract.registry import check_parts, make_env
from envs.suites.osworld import container
from envs.suites.osworld.container import (
    LABEL,
    ContainerProvider,
    Machine,
    _maker,
    check_machine,
    find_engine,
    left_behind,
    remove_stale,
)
from envs.suites.osworld.provider import BootGate
from tests.waiting import wait_until


def _load(name: str) -> Any:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"osworld_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engine = _load("engine").Engine()
    monkeypatch.setattr(container, "AGAIN_S", 0.01)
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    yield engine
    engine.end()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "Ubuntu.qcow2"
    path.touch()
    return path


@pytest.fixture
def guests(engine: Any, xguest: Any) -> Any:
    """The engine, whose containers have the guest on Xvfb behind their port."""
    engine.guest_port = int(xguest.url.rpartition(":")[2])
    return engine


def test_a_container_is_made_as_osworld_needs_it(guests: Any, disk: Path) -> None:
    provider = ContainerProvider(Machine(disk, ram_gb=3, cpus=2))
    try:
        address = provider.fresh()
        assert (address.host, address.server_port) == ("127.0.0.1", guests.guest_port)
        ((_, made),) = guests.containers.items()
    finally:
        provider.close()
    config, host = made["Config"], made["Config"]["HostConfig"]
    assert made["Name"].startswith("dart-osworld-")
    assert config["Image"] == "happysixd/osworld-docker"
    assert {"RAM_SIZE=3G", "CPU_CORES=2", "DISK_SIZE=32G"} <= set(config["Env"])
    assert host["Binds"] == [f"{disk}:/System.qcow2:ro"]
    assert host["CapAdd"] == ["NET_ADMIN"]
    assert (host["Memory"], host["NanoCpus"]) == (5 << 30, 2_000_000_000)
    assert host["PidsLimit"] > 0
    kvm = Path("/dev/kvm").exists()
    assert [each["PathOnHost"] for each in host["Devices"] or []] == ["/dev/kvm"] * kvm
    assert ("KVM=N" in config["Env"]) is not kvm
    ports = host["PortBindings"]
    assert set(ports) == {"5000/tcp", "9222/tcp", "8006/tcp", "8080/tcp"}
    for (binding,) in ports.values():
        assert (binding["HostIp"], binding.get("HostPort") or "") == ("127.0.0.1", "")
    assert config["Labels"] == {LABEL: _maker()}


def test_each_episode_has_a_new_container_and_the_last_is_removed(guests: Any, disk: Path) -> None:
    env = make_env("osworld", vm=str(disk), pause_s=0)
    names = []
    try:
        for _ in range(2):
            env.reset(options={"task": "osworld/undo-boot"})
            names += list(guests.containers)
            env.step(Wait(seconds=0))
            assert env.step(Done())[2]
    finally:
        env.close()
    assert len(set(names)) == 2
    assert guests.containers == {}
    made = [each for each in guests.log if each.startswith(("POST containers/c", "DELETE"))]
    assert [each.split()[0] for each in made] == ["POST", "DELETE"] * 2


def test_a_container_that_exits_is_removed_and_its_last_output_reported(
    engine: Any, disk: Path
) -> None:
    engine.dies = "KVM: permission denied"
    engine.guest_port = 9  # no process listens
    provider = ContainerProvider(Machine(disk))
    with pytest.raises(EnvError, match=r"dart-osworld-\w+ is exited .*KVM: permission denied"):
        provider.fresh()
    assert engine.containers == {}
    provider.close()


def test_a_guest_that_never_boots_costs_its_deadline(engine: Any, disk: Path) -> None:
    engine.guest_port = 9
    provider = ContainerProvider(Machine(disk, boot_s=1.5))
    with pytest.raises(EnvError, match=r"no screenshot in 1\.5 s"):
        provider.fresh()
    assert engine.containers == {}
    provider.close()


def test_a_container_that_cannot_be_started_is_removed(engine: Any, disk: Path) -> None:
    engine.fails_to_start = True
    provider = ContainerProvider(Machine(disk))
    with pytest.raises(EnvError, match="driver failed programming"):
        provider.fresh()
    assert engine.containers == {}
    provider.close()


def test_a_start_that_fails_once_is_tried_with_another_container(guests: Any, disk: Path) -> None:
    guests.fails_every, guests.starts = 2, 1  # the next one fails
    provider = ContainerProvider(Machine(disk))
    provider.fresh()
    assert (guests.made, len(guests.containers)) == (2, 1)
    provider.close()


class Screen(BaseHTTPRequestHandler):
    """A guest's server that shows a screen and can do nothing else."""

    def do_GET(self) -> None:
        image = b"\x89PNG\r\n\x1a\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(image)))
        self.end_headers()
        self.wfile.write(image)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_64_slots_boot_in_turn_and_leave_no_container_and_no_port(
    engine: Any, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = ThreadingHTTPServer(("127.0.0.1", 0), Screen)
    guest.request_queue_size = 128
    threading.Thread(target=guest.serve_forever, args=(0.01,), daemon=True).start()
    engine.guest_port, engine.fails_every = guest.server_port, 5
    engine.host_ports = set(range(40000, 40000 + 4 * 64))  # no port to lose
    booting, most, lock = 0, 0, threading.Lock()
    ready = ContainerProvider._ready

    def counted(self: ContainerProvider) -> Any:
        nonlocal booting, most
        with lock:
            booting += 1
            most = max(most, booting)
        try:
            return ready(self)
        finally:
            with lock:
                booting -= 1

    monkeypatch.setattr(ContainerProvider, "_ready", counted)
    monkeypatch.setattr("envs.suites.osworld.provider.POLL_S", 0.01)
    monkeypatch.setattr("envs.suites.osworld.provider.FAR_POLL_S", 0.02)
    gate = BootGate(8, tmp_path / "turns")
    client = find_engine()  # one for all: 64 of them take seconds

    def play(_: int) -> None:
        provider = ContainerProvider(Machine(disk), gate, turn_s=60.0)
        provider._client = client
        count = 0
        while count < 2:
            with suppress(EnvError):  # of three starts that failed: the next episode goes on
                provider.fresh()
                count += 1
        with lock:
            up.append(provider)

    up: list[ContainerProvider] = []
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(play, range(64)))
    assert len(engine.containers) == 64
    assert engine.starts > 150  # every fifth failed
    assert 1 <= most <= 8
    assert len(engine.host_ports) == 0
    for provider in up:
        provider.close()
    assert engine.containers == {}
    assert len(engine.host_ports) == 4 * 64
    guest.shutdown()
    guest.server_close()


def test_a_turn_ends_with_its_process_and_waiting_has_a_deadline(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from envs.suites.osworld.provider import BootGate\n"
        "with BootGate(1, Path(sys.argv[1])).turn(1.0):\n"
        "    print('mine', flush=True)\n"
        "    time.sleep(600)\n"
    )
    folder = tmp_path / "turns"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True
    )
    gate = BootGate(1, folder)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(EnvError, match=r"env\.options\.boots"), gate.turn(0.0):
            pass
    finally:
        other.kill()
        other.wait()
        other.stdout.close()  # type: ignore[union-attr]
    with gate.turn(0.0):
        pass


def test_a_boot_that_its_slot_has_given_up_ends_with_its_container_and_its_turn(
    engine: Any, disk: Path, tmp_path: Path
) -> None:
    engine.guest_port = 9  # never a screen
    gate, call = BootGate(1, tmp_path / "turns"), PendingCall()
    provider = ContainerProvider(Machine(disk), gate)

    def boot() -> None:
        with answering(call):
            provider.fresh()

    with ThreadPoolExecutor(1) as pool:
        booting = pool.submit(boot)
        wait_until(lambda: any(each["Status"] == "running" for each in engine.containers.values()))
        call.given_up.set()
        with pytest.raises(GivenUpError):
            booting.result()
    assert engine.containers == {}
    with gate.turn(0.0):
        pass
    provider.close()


def test_a_container_that_could_not_be_removed_is_tried_again(guests: Any, disk: Path) -> None:
    slots = [ContainerProvider(Machine(disk)) for _ in range(2)]
    for slot in slots:
        slot.fresh()
    guests.fails_to_remove = True
    slots[0].close()
    assert len(guests.containers) == 2
    guests.fails_to_remove = False
    slots[0].fresh()
    assert len(guests.containers) == 2  # its new one, and the other slot's
    for slot in slots:
        slot.close()
    assert guests.containers == {}


def test_a_container_that_vanished_is_replaced(guests: Any, disk: Path) -> None:
    provider = ContainerProvider(Machine(disk))
    provider.fresh()
    guests.containers.clear()
    provider.fresh()
    assert len(guests.containers) == 1
    provider.close()


def test_only_containers_of_killed_processes_are_removed(guests: Any, disk: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from envs.suites.osworld.container import ContainerProvider, Machine\n"
        "ContainerProvider(Machine(Path(sys.argv[1]))).fresh()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    mine = ContainerProvider(Machine(disk))
    mine.fresh()
    others = {
        guests.add("of-another-host", {"Labels": {LABEL: "some-boot-4026531836/1/1"}}),
        guests.add("of-someone-else", {"Labels": {"app": "db"}}),
        guests.add("without-a-maker", {"Labels": {LABEL: ""}}),
        *guests.containers,
    }
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(disk)], stdout=subprocess.PIPE, text=True
    )
    client = find_engine()
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert remove_stale(client) == 0  # its maker lives
        assert left_behind(client) == []
        (left,) = set(guests.containers) - others
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()  # type: ignore[union-attr]
    assert left in guests.containers
    assert left_behind(client) == [guests.containers[left]["Name"]]
    assert remove_stale(client) == 1
    assert left_behind(client) == []
    client.close()
    assert set(guests.containers) == others
    mine.close()
    assert len(guests.containers) == 3


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:9", "unix:///no/such/engine.sock"])
def test_a_missing_engine_is_reported_in_one_line(
    disk: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(MissingPartError, match="no container engine answers") as told:
        check_parts("osworld", {"vm": str(disk)})
    assert "apt install docker.io" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_missing_package_names_the_install_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[osworld\]'"):
        check_parts("osworld", {})


def test_a_missing_image_or_disk_is_reported_with_its_source(engine: Any, disk: Path) -> None:
    client = find_engine()
    with pytest.raises(MissingPartError, match="huggingface"):
        check_machine(client, Machine(disk.with_name("none")))
    with pytest.raises(MissingPartError, match="docker pull elsewhere/image"):
        check_machine(client, Machine(disk, "elsewhere/image"))
    check_machine(client, Machine(disk))
    client.close()

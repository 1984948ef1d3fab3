"""OSWorld's virtual machines in containers, through the package `docker`.

    Machine             the settings of a virtual machine
    find_engine         returns the engine's client
    ContainerProvider   makes a new container for each guest, one at a time
    remove_stale        removes containers that no process uses any more
    left_behind         returns the names of containers whose makers died, for a person to read

Each container has the label LABEL, which names the process that made it. Only such containers are removed,
and only if this process made them, or a process that died on this host since it booted.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bus.errors import EnvError, MissingPartError
from envs.contract.queueing import leave_if_given_up
from envs.suites.osworld.guest import (
    CHROMIUM_PORT,
    INSTALL,
    PROBE_DEADLINE_S,
    SERVER_PORT,
    VLC_PORT,
    VNC_PORT,
    Address,
    Guest,
)
from envs.suites.osworld.provider import BootGate

logger = logging.getLogger(__name__)

IMAGE = "happysixd/osworld-docker"
DISK_URL = "https://huggingface.co/datasets/xlangai/ubuntu_osworld (Ubuntu.qcow2.zip)"
LABEL = "dart.osworld"
"""Label of all containers that dart makes; its value is the maker (`_maker`)."""

LOCAL_ENGINE = "unix:///var/run/docker.sock"
OVERHEAD_GB = 2  # memory for the emulator beside its machine
MOST_PROCESSES = 2048
ENGINE_DEADLINE_S = 60.0
POLL_S = 1.0

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PORTS = (SERVER_PORT, CHROMIUM_PORT, VNC_PORT, VLC_PORT)

START_TRIES = 3  # a port that the engine chose may be taken by another program meanwhile
AGAIN_S = 0.5
SWEEP_S = 60.0

_in_use: set[str] = set()
"""Names of this process's containers, from before they are made until they are removed."""
_left_behind: set[str] = set()
"""Names of this process's containers that could not be removed."""
_sweeping = threading.Lock()
_last_sweep = -math.inf
"""time.monotonic() of the last sweep of this process."""


class _StartError(EnvError):
    """The engine could not make or start a container."""


@dataclass(frozen=True)
class Machine:
    """The settings of a virtual machine."""

    disk: Path  # the qcow2 image, which is only read
    image: str = IMAGE  # of the container
    ram_gb: int = 4
    cpus: int = 4
    disk_gb: int = 32
    boot_s: float = 300.0  # seconds until it shows its screen


def find_engine(deadline_s: float = ENGINE_DEADLINE_S) -> Any:
    """Return a client of the engine that DOCKER_HOST names, or the local one. Raises MissingPartError.

    `deadline_s` is the longest time of each of its requests.
    """
    docker = _import_docker()
    host = os.environ.get("DOCKER_HOST") or LOCAL_ENGINE
    try:
        if host.startswith("unix://") and not Path(host.removeprefix("unix://")).exists():
            raise OSError(f"no socket at {host}")  # the client would leave a socket open
        # This asks the engine for its version.
        return docker.from_env(timeout=deadline_s)
    except (docker.errors.DockerException, OSError) as error:
        raise MissingPartError(
            f"no container engine answers ({_line(error)}): apt install docker.io and start it, "
            "name another with DOCKER_HOST, or set env.options.url to a guest that runs already"
        ) from error


def check_machine(client: Any, machine: Machine) -> None:
    """Raise MissingPartError if the machine's disk or the container's image does not exist."""
    if not machine.disk.is_file():
        raise MissingPartError(
            f"no disk image at {machine.disk}: fetch it from {DISK_URL}, unzip it, and set "
            "env.options.vm to its path"
        )
    docker = _import_docker()
    try:
        client.images.get(machine.image)
    except docker.errors.ImageNotFound:
        raise MissingPartError(
            f"the engine has no image {machine.image}: docker pull {machine.image}"
        ) from None
    except (docker.errors.DockerException, OSError) as error:
        raise MissingPartError(f"the container engine failed: {_line(error)}") from error


class ContainerProvider:
    """A provider of guests for one slot. Each has its own container, removed before the next one is made."""

    keeps_state = False

    def __init__(
        self, machine: Machine, gate: BootGate | None = None, turn_s: float = 1800.0
    ) -> None:
        """Prepare to make containers of `machine`.

        At a `gate`, a boot waits for its turn, and gives up once no other boot began for `turn_s`.
        """
        self._machine = machine
        self._gate, self._turn_s = gate, turn_s
        self._client: Any = None
        self._container: Any = None
        self._name = ""

    def fresh(self) -> Address:
        """Return a machine that has just booted. Raises EnvError, MissingPartError.

        If the slot no longer waits for the boot, it ends at once and gives its turn back.
        """
        self._remove()
        if self._client is None:
            self._client = find_engine()
        _sweep(self._client)
        with self._gate.turn(self._turn_s) if self._gate else nullcontext():
            for tries_left in reversed(range(START_TRIES)):
                recipe = _recipe(self._machine)
                self._name = recipe["name"]
                _in_use.add(self._name)
                atexit.register(self._remove)  # also if the process ends while it boots
                try:
                    self._start(recipe)
                    return self._ready()
                except _StartError as error:
                    # Another program may have taken a port; the engine frees ports with the container.
                    self._remove()
                    if not tries_left:
                        raise EnvError(str(error)) from error
                    logger.warning("%s; making another container", error)
                    time.sleep(AGAIN_S)
                except BaseException:
                    self._remove()
                    raise
        raise AssertionError

    def restart(self) -> bool:
        """Return False: the next reset makes a new machine anyway."""
        return False

    def _start(self, recipe: dict[str, Any]) -> None:
        """Make and start the container. Raises _StartError."""
        try:
            with _engine_errors("start a container"):
                # The container is assigned before it is started, so that it is removed in any case.
                self._container = self._client.containers.create(**recipe)
                self._container.start()
        except EnvError as error:
            raise _StartError(str(error)) from error

    def close(self) -> None:
        """Remove the container; may be called twice."""
        self._remove()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ready(self) -> Address:
        """Return the guest's address once it shows its screen.

        Raises EnvError at once if the container exits.
        """
        until, guest = time.monotonic() + self._machine.boot_s, None
        try:
            while (left_s := until - time.monotonic()) > 0:
                leave_if_given_up()
                with _engine_errors(f"inspect container {self._name}"):
                    self._container.reload()
                    if self._container.status not in ("created", "running"):
                        raise EnvError(self._exit_report())
                    if guest is None:
                        guest = Guest(_address(self._container), deadline_s=PROBE_DEADLINE_S)
                with suppress(EnvError):
                    guest.screenshot(deadline_s=min(PROBE_DEADLINE_S, left_s))
                    return guest.address
                time.sleep(POLL_S)
        finally:
            if guest is not None:
                guest.close()
        raise EnvError(f"container {self._name} gave no screenshot in {self._machine.boot_s:g} s")

    def _exit_report(self) -> str:
        """Return the message for a container that exits before its guest is ready."""
        output = self._container.logs(tail=1).decode("utf-8", "replace").strip() or "none"
        status = self._container.status
        return f"container {self._name} is {status} before its guest was ready; its last output: {output}"

    def _remove(self) -> None:
        """Remove the container, if there is one."""
        container, self._container = self._container, None
        if container is not None and not _remove(container):
            _left_behind.add(self._name)
        atexit.unregister(self._remove)
        _in_use.discard(self._name)  # if the removal failed, the next `remove_stale` tries again


def _sweep(client: Any) -> None:
    """Remove stale containers, at most once in SWEEP_S, since a list of all costs a request for each of them.

    If a container of this process could not be removed, this sweeps at once. Other slots do not wait for a
    sweep.
    """
    global _last_sweep  # noqa: PLW0603 - of the process
    if not _sweeping.acquire(blocking=False):
        return
    try:
        now = time.monotonic()
        if _left_behind or now > _last_sweep + SWEEP_S:
            _left_behind.clear()
            remove_stale(client)
            _last_sweep = now
    finally:
        _sweeping.release()


def remove_stale(client: Any) -> int:
    """Remove dart's containers that no process uses any more, and return how many there were.

    These are containers whose makers died on this host, and containers of this process that could not be
    removed before.
    """
    count = 0
    with _engine_errors("list containers"):
        options = {"all": True, "filters": {"label": LABEL}, "ignore_removed": True}
        for container in client.containers.list(**options):
            maker = container.labels.get(LABEL, "")
            is_mine = maker == _maker()
            if container.name not in _in_use if is_mine else not _may_live(maker):
                logger.warning("removing container %s, which no process uses", container.name)
                _remove(container)
                count += 1
    return count


def left_behind(client: Any) -> list[str]:
    """Return the names of dart's containers whose makers died on this host, by one request.

    Raises EnvError.
    """
    with _engine_errors("list containers"):
        return sorted(
            container["Names"][0].removeprefix("/")
            for container in client.api.containers(all=True, filters={"label": LABEL})
            if not _may_live(container["Labels"][LABEL])
        )


def _address(container: Any) -> Address:
    """Return the address at which the engine has published the ports of a container that runs."""
    bindings = container.attrs["NetworkSettings"]["Ports"]
    ports = {port: int(bindings[f"{port}/tcp"][0]["HostPort"]) for port in _PORTS}
    host = bindings[f"{SERVER_PORT}/tcp"][0]["HostIp"]
    host = "127.0.0.1" if host in ("", "0.0.0.0") else host  # noqa: S104 - read, not bound
    return Address(host, ports[SERVER_PORT], ports[CHROMIUM_PORT], ports[VLC_PORT])


def _recipe(machine: Machine) -> dict[str, Any]:
    """Return the arguments with which the engine makes a container."""
    kvm = Path("/dev/kvm").exists()
    if not kvm:
        logger.warning("no /dev/kvm: the guest is emulated, which is many times slower")
    no_kvm = {} if kvm else {"KVM": "N"}
    return {
        "image": machine.image,
        "name": f"dart-osworld-{uuid.uuid4().hex[:12]}",
        "detach": True,
        "labels": {LABEL: _maker()},
        "environment": {
            "DISK_SIZE": f"{machine.disk_gb}G",
            "RAM_SIZE": f"{machine.ram_gb}G",
            "CPU_CORES": str(machine.cpus),
            **no_kvm,
        },
        "devices": ["/dev/kvm"] if kvm else [],
        "cap_add": ["NET_ADMIN"],
        "volumes": {str(machine.disk.resolve()): {"bind": "/System.qcow2", "mode": "ro"}},
        # The engine chooses free ports, so that no process can take one between choice and use. They are
        # bound to loopback, so that other hosts cannot control the guest.
        "ports": {f"{port}/tcp": ("127.0.0.1", None) for port in _PORTS},
        "mem_limit": f"{machine.ram_gb + OVERHEAD_GB}g",
        "nano_cpus": machine.cpus * 1_000_000_000,
        "pids_limit": MOST_PROCESSES,
    }


def _remove(container: Any) -> bool:
    """Kill and remove a container with its volumes; return False if that failed.

    A container that is gone, or is being removed, counts as removed.
    """
    docker = _import_docker()
    try:
        container.remove(force=True, v=True)
    except (docker.errors.DockerException, OSError) as error:
        if getattr(error, "status_code", 0) in (404, 409):
            return True
        logger.warning("cannot remove container %s: %s", container.name, _line(error))
        return False
    return True


def _maker() -> str:
    """Return a name of this process by which others can check whether it lives: HOST/PID/START."""
    return f"{_here()}/{os.getpid()}/{_started(os.getpid())}"


def _may_live(maker: str) -> bool:
    """Return True if the maker that a label names lives, or cannot be checked from this host."""
    here, _, process = maker.partition("/")
    pid, _, started = process.partition("/")
    if here != _here() or not pid.isdigit():
        return True
    return _started(int(pid)) == started


def _here() -> str:
    """Return a name of this host since its boot and of its name space of process ids."""
    return f"{_BOOT.read_text().strip()}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if there is no such process."""
    # psutil's create_time() changes when the host's clock is set, while a label stays.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


def _import_docker() -> ModuleType:
    try:
        import docker
        import docker.errors
    except ImportError:
        raise MissingPartError(f"the package docker is not installed: {INSTALL}") from None
    return docker  # type: ignore[no-any-return]


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Turn any error of the engine's client into an EnvError that names `what` dart tried."""
    docker = _import_docker()
    try:
        yield
    except (docker.errors.DockerException, OSError, KeyError, IndexError, TypeError) as error:
        raise EnvError(f"the container engine could not {what}: {_line(error)}") from error


def _line(error: Exception) -> str:
    explanation = getattr(error, "explanation", None)
    text = " ".join(str(explanation or error).split()) or type(error).__name__
    return text[:300]

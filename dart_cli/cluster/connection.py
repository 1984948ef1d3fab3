"""A Ray cluster: the user's own, or one that is started for this run on this host.

    connected     this process as a driver of the cluster, until the block ends
    Cluster       what is asked of it: its nodes, and which of them this one is
    refuse_ray    the error for an address that cannot be one, or where Ray is not installed
    refuse_unreachable   the error for one where no cluster listens

Ray reads its settings from the environment when it is imported, so they are set before. Usage statistics
and the dashboard are off. Of a cluster that is started here every socket is bound to loopback, its token
is its own, and its files are in a private folder, which is removed at the end; the path is short, since
sockets are in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bus.endpoints import is_loopback
from bus.errors import DartError, MissingPartError, UserError, first_line
from dart_cli.cluster.demands import Node
from dart_cli.runtime.background import in_daemon_thread

LOCAL = "local"
REACH_S = 10.0
"""Seconds in which the address of a cluster must accept a connection."""
ASK_S = 60.0
"""Seconds in which the cluster must answer what its nodes are."""
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least is 75 MiB; nothing large goes through it
_SETTINGS = b"\4"  # the fourth byte of such a frame
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
"""What a client of HTTP/2 says first, as gRPC's do: it has no settings. The server answers with its own."""
_FOLDER = "dart-ray-"
_LOCK = "lock"  # held as long as the process lives whose folder it is in
_SETTLED_S = 60.0  # after which such a folder has its lock
_FAULTS = (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError)
_LOCAL_SETTINGS = {
    # Ray's name for: use 127.0.0.1, and only that, as this node's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}

_T = TypeVar("_T")


class Cluster:
    """A cluster that this process is connected to. Its calls block: they are made in threads."""

    def __init__(self, ray: Any, address: str, folder: Path | None) -> None:
        self.ray, self.address = ray, address
        self._folder = folder  # of the Ray that was started here
        self.here: str = ray.get_runtime_context().get_node_id()

    @property
    def has_token(self) -> bool:
        """Whether only those who have its token can run something on it."""
        return os.environ.get("RAY_AUTH_MODE", "").lower() not in ("", "disabled")

    @property
    def is_local(self) -> bool:
        """Whether it was started for this run, on this host alone."""
        return self.address == LOCAL

    def nodes(self) -> list[Node]:
        """Those that live."""
        # Ray has no public call for what is free on each node; tests/cluster notices its change.
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            Node(
                id=each["NodeID"],
                host=each["NodeManagerHostname"],
                address=each["NodeManagerAddress"],
                cpus=each["Resources"].get("CPU", 0.0),
                gpus=each["Resources"].get("GPU", 0.0),
                free_cpus=free.get(each["NodeID"], {}).get("CPU", 0.0),
                free_gpus=free.get(each["NodeID"], {}).get("GPU", 0.0),
            )
            for each in self.ray.nodes()
            if each["Alive"]
        ]

    def abandon(self) -> None:
        """Before an end at once: Ray ends what it started here by itself, but removes no files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def ask(self, call: Callable[[], _T], within_s: float = ASK_S) -> _T:
        """Return what a blocking call of Ray's returns. Raises DartError where the cluster does not answer."""
        try:
            async with asyncio.timeout(within_s):
                return await in_daemon_thread(call)
        except (TimeoutError, self.ray.exceptions.RayError) as error:
            raise DartError(
                f"the Ray cluster at {self.address} does not answer: {first_line(error)}; the same command "
                "goes on with the run once it does"
            ) from None


def refuse_ray(address: str) -> None:
    """Raise MissingPartError where Ray is not installed, UserError for what is no address of a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise MissingPartError(
            "`dart up --ray` needs the package ray: pip install -e '.[ray]' in dart's folder, "
            "on every node"
        )
    if address in (LOCAL, "auto"):
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"--ray {address}: want HOST:PORT of a cluster of which this host is a node, as "
            '"ray start" prints it, or "auto", or "local" to start Ray on this host'
        )


def refuse_unreachable(address: str) -> None:
    """Raise UserError where no cluster listens at HOST:PORT."""
    if address not in (LOCAL, "auto"):
        _reach(address, _ray().util.get_node_ip_address())


def _ray() -> Any:
    """Return the package, imported with our settings."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


@contextlib.contextmanager
def connected(address: str, cpus: int) -> Iterator[Cluster]:
    """Yield the cluster at `address`; `local` starts one on this host, with at least `cpus` CPUs.

    Raises UserError where there is none, or this host is no node of it.
    """
    refuse_ray(address)
    with contextlib.ExitStack() as stack:
        how: dict[str, Any] = {"address": address}
        folder = None
        if address == LOCAL:
            for name, value in _LOCAL_SETTINGS.items():
                os.environ[name] = value
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            os.environ.pop("RAY_ADDRESS", None)
            folder = stack.enter_context(_own_folder())
            # Ray opens its own folder to all users; the one around it stays private.
            how |= {
                "_temp_dir": str(folder / "r"),
                "num_cpus": max(cpus, os.cpu_count() or 1),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        refuse_unreachable(address)
        ray = _ray()
        stack.callback(ray.shutdown)  # of what there is, also if it is interrupted
        try:
            ray.init(
                **how,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace=f"dart-{secrets.token_hex(8)}",
            )
        except (*_FAULTS, ray.exceptions.RayError) as error:
            raise UserError(
                f"--ray {address}: {first_line(error)}; this host must be a node of the cluster, with the "
                "same versions of Ray and Python, and its token with RAY_AUTH_MODE=token"
            ) from None
        yield Cluster(ray, address, folder)


@contextlib.contextmanager
def _own_folder(parent: Path = Path("/tmp")) -> Iterator[Path]:  # noqa: S108 - what is in it is checked
    """Yield a private folder, removed with the block; those whose process was killed meanwhile are removed first."""
    for left in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # another user's, or held by a process that lives
            found = left.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _SETTLED_S:
                with (left / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    try:
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reach(address: str, here: str) -> None:
    """Raise UserError where nothing listens, or no server of Ray's: Ray itself would try for minutes.

    `here` is the address by which Ray knows this host; it takes a loopback address for that.
    """
    host, _, port = address.rpartition(":")
    meant = here if is_loopback(host.strip("[]")) else host.strip("[]")
    try:
        with socket.create_connection((meant, int(port)), REACH_S) as peer:
            if _is_grpc(peer):
                return
            why = "another program listens there"
    except OSError as error:
        why = error.strerror or str(error)
    raise UserError(
        f"--ray {address}: no Ray cluster answers at {meant}, port {port}: {why}; "
        f"start it with `ray start --head --port={port}`, or name the address that it printed"
    )


def _is_grpc(peer: socket.socket) -> bool:
    """Whether a server of HTTP/2 answers; True, too, where it speaks TLS. Raises OSError."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return True
    peer.sendall(_HELLO)
    return peer.recv(len(_HELLO))[3:4] == _SETTINGS

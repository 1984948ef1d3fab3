"""Connect to a Ray cluster: the user's own, or one that is started for this run on this host.

    connected            connects this process to the cluster for a block, as a driver
    Cluster              answers which nodes there are, and which one this is
    refuse_ray           raises an error for an invalid address, or if Ray is not installed
    refuse_unreachable   raises an error if no cluster listens at the address

Ray reads its settings from the environment when it is imported, so they are set before. Usage statistics and
the dashboard are off. A cluster that is started here binds every socket to loopback and has its own token.
Its files are in a private folder that is removed at the end. The folder's path is short, because sockets are
in it.
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
"""Seconds in which the cluster must return its nodes."""
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; nothing large goes through it
_SETTINGS = b"\4"  # the fourth byte of a SETTINGS frame of HTTP/2
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
"""The first bytes of an HTTP/2 client, such as gRPC's, with empty settings. The server answers with its
settings."""
_FOLDER = "dart-ray-"
_LOCK = "lock"  # locked as long as the process lives that owns the folder
_SETTLED_S = 60.0  # age in seconds at which a folder surely has its lock
_FAULTS = (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError)
_LOCAL_SETTINGS = {
    # With this setting Ray uses only 127.0.0.1 as this node's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}

_T = TypeVar("_T")


class Cluster:
    """A cluster to which this process is connected. Ray's calls block, so they are made in threads."""

    def __init__(self, ray: Any, address: str, folder: Path | None) -> None:
        self.ray, self.address = ray, address
        self._folder = folder  # the folder of the Ray that was started here
        self.here: str = ray.get_runtime_context().get_node_id()

    @property
    def has_token(self) -> bool:
        """Whether a token is needed to run something on the cluster."""
        return os.environ.get("RAY_AUTH_MODE", "").lower() not in ("", "disabled")

    @property
    def is_local(self) -> bool:
        """Whether the cluster was started for this run on this host."""
        return self.address == LOCAL

    def nodes(self) -> list[Node]:
        """Return the living nodes."""
        # Ray has no public call for what is free on each node; tests/cluster notices its change.
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            Node(
                id=node["NodeID"],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
                free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def abandon(self) -> None:
        """Remove the files of a cluster that was started here. Call this only before an immediate end.

        Ray ends its processes itself.
        """
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def ask(self, call: Callable[[], _T], within_s: float = ASK_S) -> _T:
        """Make a blocking call of Ray in a thread, and return its result.

        Raises DartError if the cluster does not answer.
        """
        try:
            async with asyncio.timeout(within_s):
                return await in_daemon_thread(call)
        except (TimeoutError, self.ray.exceptions.RayError) as error:
            raise DartError(
                f"the Ray cluster at {self.address} does not answer: {first_line(error)}; the same command "
                "goes on with the run once it does"
            ) from None


def refuse_ray(address: str) -> None:
    """Raise MissingPartError if Ray is not installed, UserError for an invalid address."""
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
    """Raise UserError if no cluster listens at the address; `local` and `auto` are not checked."""
    if address not in (LOCAL, "auto"):
        _reach(address, _ray().util.get_node_ip_address())


def _ray() -> Any:
    """Import Ray with our settings, and return the package."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


@contextlib.contextmanager
def connected(address: str, cpus: int) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, and yield it; `local` starts one here with at least `cpus` CPUs.

    Raises UserError if there is no cluster, or this host is no node of it.
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
            # Ray's folder is open to all users, but the one around it is private.
            how |= {
                "_temp_dir": str(folder / "r"),
                "num_cpus": max(cpus, os.cpu_count() or 1),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        refuse_unreachable(address)
        ray = _ray()
        stack.callback(ray.shutdown)  # also if ray.init is interrupted
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
    """Create a private folder for the block, and remove it afterwards.

    Older folders whose process was killed are removed, too.
    """
    for older in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # another user's, or held by a process that lives
            status = older.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _SETTLED_S:
                with (older / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(older, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    try:
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reach(address: str, here: str) -> None:
    """Raise UserError if no server of Ray listens at the address. Ray itself would try for minutes.

    `here` is the address of this host in Ray, which is used in place of a loopback address.
    """
    host, _, port = address.rpartition(":")
    target = here if is_loopback(host.strip("[]")) else host.strip("[]")
    try:
        with socket.create_connection((target, int(port)), REACH_S) as peer:
            if _is_grpc(peer):
                return
            why = "another program listens there"
    except OSError as error:
        why = error.strerror or str(error)
    raise UserError(
        f"--ray {address}: no Ray cluster answers at {target}, port {port}: {why}; "
        f"start it with `ray start --head --port={port}`, or name the address that it printed"
    )


def _is_grpc(peer: socket.socket) -> bool:
    """Return True if an HTTP/2 server answers, and also if Ray uses TLS, which is not checked.

    Raises OSError.
    """
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return True
    peer.sendall(_HELLO)
    return peer.recv(len(_HELLO))[3:4] == _SETTINGS

"""OpenenvSuite: the tasks of one profile, and the environments that play them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from bus.errors import MissingPartError, first_line
from envs.base import Task
from envs.openenv.env import Limits, OpenenvEnv
from envs.openenv.profile import read_profile
from envs.openenv.session import import_websockets
from envs.options import Megabytes, Pause, Seconds, checked
from envs.remote.address import Access, Address, read_access, read_addresses
from envs.remote.servers import SharedServers

PORT = 8000  # of a server, where its address names none
_PROBE_S = 10.0


class OpenenvSuite:
    """Tasks that OpenEnv servers play. Raises TaskError for a profile that cannot be used."""

    name = "openenv"

    def __init__(self, profile: str) -> None:
        self._profile = read_profile(profile, self.name)
        self.tasks: Mapping[str, Task] = {
            task_id: task for task_id, (task, _) in self._profile.tasks.items()
        }
        self._lock = threading.Lock()
        self._servers: dict[tuple[Address, ...], SharedServers] = {}

    @checked
    def make_env(
        self,
        *,
        url: str | list[str] = "",
        token_env: str = "",
        ca_file: str = "",
        connect_s: Pause = 30.0,
        reset_s: Seconds = 120.0,
        step_s: Seconds = 60.0,
        reply_mb: Megabytes = 64.0,
    ) -> OpenenvEnv:
        """An environment that opens a session at its first reset.

        `url` is a server's address or a list of them; slots are spread over them. `token_env` names the
        environment variable with a bearer token, `ca_file` the certificates of a private authority.
        `connect_s` is how long to wait for a server that is down or full, `reset_s` and `step_s` the longest
        time of a request, `reply_mb` the most of one answer. Raises TaskError.
        """
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        with self._lock:
            servers = self._servers.setdefault(addresses, SharedServers(addresses))
        limits = Limits(reset_s=reset_s, step_s=step_s, connect_s=connect_s, reply_mb=reply_mb)
        return OpenenvEnv(self._profile, servers, access, limits)

    def check_parts(
        self, *, url: str | list[str] = "", token_env: str = "", ca_file: str = "", **_: object
    ) -> None:
        """Raise MissingPartError where the package websockets is missing, or no server answers."""
        import_websockets()
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        errors = [error for each in addresses if (error := _probe(each, access))]
        if len(errors) == len(addresses):
            raise MissingPartError(f"{errors[0]}; start the environment's server")


def _probe(address: Address, access: Access) -> str:
    """Why a server does not answer; empty where it does, even without the route."""
    where = f"server {address.http}/health"
    connect = partial(HTTPSConnection, context=access.tls) if address.secure else HTTPConnection
    try:
        with closing(connect(address.bare_host, address.port, timeout=_PROBE_S)) as connection:
            connection.request("GET", f"{address.path}/health", headers=access.headers)
            status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{where}: no server answers there ({first_line(error)})"
    return "" if status in (200, 404, 405) else f"{where} answers {status}"

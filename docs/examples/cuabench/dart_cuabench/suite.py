"""CuabenchSuite: the tasks of one file, and the environments that play them.

slack = CuabenchSuite("slack.toml")    # in a file slack.py: the suite is slack.py:slack
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from bus.errors import EnvError, MissingPartError
from dart_cuabench.env import CuabenchEnv, Limits
from dart_cuabench.http import JsonClient
from dart_cuabench.tasks import WorkerTask, read_tasks
from dart_cuabench.workers import ExclusiveWorkers
from envs.contract.base import Task
from envs.contract.options import Megabytes, Pause, Seconds, checked
from envs.tools.remote.servers import Access, Address, read_access, read_addresses

PORT = 8001  # of a worker, where its address names none
_PROBE_S = 10.0


class CuabenchSuite:
    """Tasks that cua-bench's workers play. Raises TaskError for a file that cannot be used."""

    name = "cuabench"

    def __init__(self, file: str | Path) -> None:
        found = read_tasks(Path(file).expanduser(), self.name)
        self.tasks: Mapping[str, Task] = {task_id: task for task_id, (task, _) in found.items()}
        self._asked: Mapping[str, WorkerTask] = {
            task_id: asked for task_id, (_, asked) in found.items()
        }
        self._lock = threading.Lock()
        self._servers: dict[tuple[Address, ...], ExclusiveWorkers] = {}

    @checked
    def make_env(
        self,
        *,
        url: str | list[str] = "",
        token_env: str = "",
        ca_file: str = "",
        connect_s: Pause = 30.0,
        reset_s: Seconds = 300.0,
        step_s: Seconds = 60.0,
        evaluate_s: Seconds = 120.0,
        reply_mb: Megabytes = 64.0,
    ) -> CuabenchEnv:
        """Return an environment that takes a worker of its own at its first reset.

        `url` is a worker's address or a list of them: each slot needs one. `token_env` names the environment
        variable with a bearer token, `ca_file` the certificates of a private authority. `connect_s` is how
        long to wait for a worker that is down, `reset_s`, `step_s` and `evaluate_s` the longest time of a call,
        `reply_mb` the most of one answer. Raises TaskError.
        """
        limits = Limits(
            reset_s=reset_s,
            step_s=step_s,
            evaluate_s=evaluate_s,
            connect_s=connect_s,
            reply_mb=reply_mb,
        )
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        with self._lock:
            servers = self._servers.setdefault(addresses, ExclusiveWorkers(addresses))
        return CuabenchEnv(self._asked, servers, access, limits)

    def check_parts(
        self,
        *,
        url: str | list[str] = "",
        token_env: str = "",
        ca_file: str = "",
        **_: object,
    ) -> None:
        """Raise MissingPartError where no worker answers."""
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        errors = [error for each in addresses if (error := _probe(each, access))]
        if len(errors) == len(addresses):
            raise MissingPartError(
                f"{errors[0]}; start a worker: python -m cua_bench.workers.worker_server --port {PORT}"
            )


def _probe(address: Address, access: Access) -> str:
    """Why a worker does not answer; empty where it does."""
    client = JsonClient(address, access, what="worker", reply_mb=1)
    try:
        client.call("GET", "/health", deadline_s=_PROBE_S)
    except EnvError as error:
        return str(error)
    finally:
        client.close()
    return ""

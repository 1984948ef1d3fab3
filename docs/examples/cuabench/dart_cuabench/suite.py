"""CuabenchSuite: the tasks of one file, and the environments that play them.

Example: with this line in a file slack.py, the suite is slack.py:slack.

    slack = CuabenchSuite("slack.toml")
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

PORT = 8001  # of a worker whose address names none
_PROBE_S = 10.0


class CuabenchSuite:
    """The tasks of a file, which cua-bench's workers play. Raises TaskError for a wrong file."""

    name = "cuabench"

    def __init__(self, file: str | Path) -> None:
        rows = read_tasks(Path(file).expanduser(), self.name)
        self.tasks: Mapping[str, Task] = {task_id: task for task_id, (task, _) in rows.items()}
        self._worker_tasks: Mapping[str, WorkerTask] = {
            task_id: worker_task for task_id, (_, worker_task) in rows.items()
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
        """Return an environment that takes its own worker at its first reset. Raises TaskError.

        `url` is the address of a worker, or a list of addresses: each slot needs one. `token_env` names the
        environment variable with a bearer token, `ca_file` the certificates of a private authority. A slot
        waits `connect_s` for a worker that is down. Calls may take `reset_s`, `step_s` and `evaluate_s`, and
        an answer may have `reply_mb`.
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
        return CuabenchEnv(self._worker_tasks, servers, access, limits)

    def check_parts(
        self,
        *,
        url: str | list[str] = "",
        token_env: str = "",
        ca_file: str = "",
        **_: object,
    ) -> None:
        """Raise MissingPartError if no worker answers."""
        addresses = read_addresses(url, PORT)
        access = read_access(token_env, ca_file, addresses)
        errors = [error for address in addresses if (error := _probe(address, access))]
        if len(errors) == len(addresses):
            raise MissingPartError(
                f"{errors[0]}; start a worker: python -m cua_bench.workers.worker_server --port {PORT}"
            )


def _probe(address: Address, access: Access) -> str:
    """Return why a worker does not answer; "" if it does."""
    client = JsonClient(address, access, what="worker", reply_mb=1)
    try:
        client.call("GET", "/health", deadline_s=_PROBE_S)
    except EnvError as error:
        return str(error)
    finally:
        client.close()
    return ""

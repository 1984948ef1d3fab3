"""A Ray cluster of several nodes on this host, for tests and benchmarks.

    python benchmarks/faults/local_nodes.py '[{"num_cpus": 2}, {"num_cpus": 4}]'

starts a node for each set of resources, the first one the head, and prints a line of JSON: the address, and
the ids of the nodes. Then it reads commands: `kill NUMBER` ends all of a node's processes at once, as a host
that is lost, and prints `killed NUMBER`. It ends with its input. The nodes are bound to loopback.

    local_cluster   starts that process, and ends it with the block
    LocalCluster    what it answers; `environment` is for processes that connect to the cluster
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",  # a node that is killed is noticed within seconds
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_enable_worker_prestart": "0",
}
_STORE_BYTES = 80 * 2**20
_END_S = 60.0


@dataclass(frozen=True)
class LocalCluster:
    """A cluster whose nodes can be killed."""

    address: str
    nodes: Sequence[str]  # ids
    environment: Mapping[str, str]
    process: subprocess.Popen[str]

    def kill(self, node: str) -> None:
        """Kill all processes of the node whose id begins so. Raises StopIteration without one."""
        number = next(i for i, each in enumerate(self.nodes) if each.startswith(node))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"kill {number}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@contextmanager
def local_cluster(*resources: Mapping[str, Any]) -> Iterator[LocalCluster]:
    """Yield a node for each of `resources`; a driver on this host is part of the first."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 as the address of each node
    }
    command = [sys.executable, __file__, json.dumps(resources)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            answer = json.loads(process.stdout.readline())
            yield LocalCluster(answer["address"], answer["nodes"], environment, process)
        finally:
            process.stdin.close()
            process.wait(_END_S)


def main(resources: list[dict[str, Any]]) -> None:
    """Serve until the end of the input."""
    os.environ.update(_SETTINGS)
    folder = Path(tempfile.mkdtemp(prefix="dart-ray-", dir="/tmp"))
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir()
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: list[Any] = []
    try:
        for resource in resources:
            how = {"object_store_memory": _STORE_BYTES, "node_ip_address": "127.0.0.1", **resource}
            if not nodes:
                how |= {"include_dashboard": False, "no_monitor": True}
            nodes.append(cluster.add_node(include_log_monitor=False, **how))
        _say(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in nodes]}))
        for line in sys.stdin:
            number = int(line.removeprefix("kill "))
            cluster.remove_node(nodes[number], allow_graceful=False)
            _say(f"killed {number}")
    finally:
        for node in reversed(cluster.list_all_nodes()):
            cluster.remove_node(node, allow_graceful=False)
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

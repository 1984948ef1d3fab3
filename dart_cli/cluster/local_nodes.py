"""A Ray cluster of several nodes on this host, for tests and benchmarks.

    python -m dart_cli.cluster.local_nodes '[{"num_cpus": 2}, {"num_cpus": 4}]'

starts a node for each set of resources, the first one the head, and prints a line of JSON: the address, and
the ids of the nodes. Then it reads commands: `kill NUMBER` ends all of a node's processes at once, as a host
that is lost, and prints `killed NUMBER`. It ends with its input. The nodes are bound to loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 as the address of each node
    "RAY_health_check_period_ms": "500",  # a node that is killed is noticed within seconds
    "RAY_health_check_failure_threshold": "3",
    "RAY_enable_worker_prestart": "0",
}
_STORE_BYTES = 80 * 2**20


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
        for each in resources:
            how = {"object_store_memory": _STORE_BYTES, "node_ip_address": "127.0.0.1", **each}
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

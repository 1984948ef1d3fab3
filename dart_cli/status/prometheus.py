"""`dart status --prometheus PORT`: the numbers of the snapshot as Prometheus metrics, on loopback.

    numbers          yields every number of a snapshot, with the metric's name and labels
    run_prometheus   serves the metrics until the run ends or Ctrl-C

Every scrape returns the newest snapshot, which is at most `every_s` old. While the data service does not
answer, dart_up is 0 and no other metric is exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from bus.errors import ConfigError, DeadlineError, MissingPartError
from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.status.run_sections import problems
from dart_cli.status.watch import snapshots

HOST = "127.0.0.1"
_LABELS = {  # list -> the fields that differ between its members
    "judges": ("judge",),
    "processes": ("worker", "role", "host"),
    "syncs": ("worker",),
    "tasks": ("task_id",),
}

_Number = tuple[str, dict[str, str], float]


def numbers(
    value: Any, name: str = "", labels: Mapping[str, str] | None = None
) -> Iterator[_Number]:
    """Yield (name, labels, number) for each finite number in a part of a snapshot, without curves and texts.

    The label `of` is the key of a number in a dictionary, e.g. a ledger state.
    """
    labels = dict(labels or {})
    if isinstance(value, int | float) and math.isfinite(value):
        yield name, labels, float(value)
    elif isinstance(value, BaseModel):
        for field, part in value:
            yield from numbers(part, "_".join(filter(None, (name, field))), labels)
    elif isinstance(value, dict):
        label = "role" if name == "usage" else "of"
        for key, part in value.items():
            yield from numbers(part, name, labels | {label: str(key)})
    elif isinstance(value, list) and name in _LABELS:
        for member in value:
            own_labels = {label: getattr(member, label) for label in _LABELS[name]}
            yield from numbers(member, name, labels | own_labels)


class _SnapshotCollector:
    """A collector that a prometheus_client registry calls at each scrape."""

    def __init__(self, family: Callable[..., Any]) -> None:
        """Make a collector without a snapshot. `family` is prometheus_client's GaugeMetricFamily."""
        self.snapshot: Snapshot | None = None
        self._family = family

    def collect(self) -> Iterator[Any]:
        """Yield a metric family for each name."""
        snapshot = self.snapshot
        metrics: list[_Number] = [("up", {}, float(snapshot is not None))]
        if snapshot is not None:
            metrics += [("healthy", {}, float(not problems(snapshot))), *numbers(snapshot)]
        families: dict[str, Any] = {}
        for name, labels, value in metrics:
            if name not in families:
                help_ = f"{name} of `dart status --json`"
                families[name] = self._family(f"dart_{name}", help_, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()


async def run_prometheus(
    config: Config, port: int, *, every_s: float, say: Callable[[str], None]
) -> int:
    """Serve the metrics on loopback until the run ends, and return the exit code.

    Raises MissingPartError if prometheus_client is not installed, ConfigError if the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
    except ModuleNotFoundError:
        raise MissingPartError(
            "--prometheus needs the package prometheus-client: pip install -e '.[metrics]' in dart's folder"
        ) from None

    newest, registry = _SnapshotCollector(GaugeMetricFamily), CollectorRegistry()
    registry.register(newest)
    try:
        server, _ = start_http_server(port, addr=HOST, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"--prometheus {port}: {HOST} cannot be served there: {error.strerror}; "
            "choose another port"
        ) from None
    say(f"metrics at http://{HOST}:{server.server_port}/metrics")
    try:
        async for answer in snapshots(config, every_s):
            newest.snapshot = answer if isinstance(answer, Snapshot) else None
            if isinstance(answer, DeadlineError):  # the data service may be restarted: serve on
                say(str(answer))
    finally:
        server.shutdown()
        server.server_close()
    return 0

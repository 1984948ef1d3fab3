"""`dart status --prometheus PORT`: the numbers of the snapshot as Prometheus metrics, on loopback.

    numbers          every number of a snapshot, by the names that it has there, with labels
    run_prometheus   serves them until the run ends or Ctrl-C

Every scrape gives the newest snapshot, at most `every_s` old. While no data process answers,
dart_up is 0 and no other metric is exported.
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
from dart_cli.status.watch import looks

HOST = "127.0.0.1"
_NAMED = {  # lists, and what tells their members apart
    "judges": ("judge",),
    "processes": ("worker", "role", "host"),
    "syncs": ("worker",),
    "tasks": ("task_id",),
}

_Number = tuple[str, dict[str, str], float]


def numbers(
    value: Any, name: str = "", labels: Mapping[str, str] | None = None
) -> Iterator[_Number]:
    """(name, labels, number) of each finite number in a part of a snapshot; curves and texts are left out.

    The label `of` is the key of a number in a dictionary, e.g. a ledger state.
    """
    known = dict(labels or {})
    if isinstance(value, int | float) and math.isfinite(value):
        yield name, known, float(value)
    elif isinstance(value, BaseModel):
        for part, each in value:
            yield from numbers(each, "_".join(filter(None, (name, part))), known)
    elif isinstance(value, dict):
        label = "role" if name == "usage" else "of"
        for key, each in value.items():
            yield from numbers(each, name, known | {label: str(key)})
    elif isinstance(value, list) and name in _NAMED:
        for each in value:
            own = {label: getattr(each, label) for label in _NAMED[name]}
            yield from numbers(each, name, known | own)


class _SnapshotCollector:
    """The collector that a prometheus_client registry calls at each scrape."""

    def __init__(self, family: Callable[..., Any]) -> None:
        """`family` is prometheus_client's GaugeMetricFamily."""
        self.snapshot: Snapshot | None = None
        self._family = family

    def collect(self) -> Iterator[Any]:
        """One family for each name."""
        seen = self.snapshot
        found: list[_Number] = [("up", {}, float(seen is not None))]
        if seen is not None:
            found += [("healthy", {}, float(not problems(seen))), *numbers(seen)]
        families: dict[str, Any] = {}
        for name, labels, value in found:
            if name not in families:
                help_ = f"{name} of `dart status --json`"
                families[name] = self._family(f"dart_{name}", help_, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()


async def run_prometheus(
    config: Config, port: int, *, every_s: float, say: Callable[[str], None]
) -> int:
    """Serve the metrics on loopback until the run ends; returns the exit code.

    Raises MissingPartError without prometheus_client, ConfigError where the port is taken.
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
        async for seen in looks(config, every_s):
            newest.snapshot = seen if isinstance(seen, Snapshot) else None
            if isinstance(seen, DeadlineError):  # data may be started again: the metrics stay
                say(str(seen))
    finally:
        server.shutdown()
        server.server_close()
    return 0

"""`dart status --prometheus PORT`: the snapshot as Prometheus metrics, on loopback.

    families         a snapshot as named numbers
    run_prometheus   serves them until the run ends or Ctrl-C

Every scrape gives the newest snapshot, at most `every_s` old. While no data process answers,
dart_up is 0 and no other metric is exported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bus.errors import BusError, ConfigError, MissingPartError
from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.status.page import problems
from dart_cli.status.watch import Watcher

HOST = "127.0.0.1"
_SAID = ("both_pass", "both_fail", "judge_alone", "evaluator_alone", "unanswered")
_RATES = ("trajectories", "steps", "actions", "train_steps")

_Sample = tuple[tuple[str, ...], float | None]  # values of the labels; None is not exported


class Family(NamedTuple):
    """Numbers of one name."""

    name: str  # without dart_
    help: str
    samples: list[_Sample]
    labels: tuple[str, ...] = ()


def families(seen: Snapshot) -> list[Family]:
    """All metrics of a run."""
    whole: list[tuple[str, str, float | None]] = [
        ("healthy", "1 where nothing needs attention", not problems(seen)),
        ("stalls", "Things that stand still for too long", len(seen.stalls)),
        ("updates", "Batches in the weights", seen.updates),
        ("policy_version", "Newest published weights", seen.policy_version),
        ("store_bytes", "Database on disk", seen.store_bytes),
        ("success", "Mean over tasks of their moving averages", seen.success),
        ("reward", "Mean over tasks of their rewards' moving averages", seen.reward),
        ("staleness_mean", "Versions behind, recent batches", seen.staleness.mean),
        ("replays", "Updates on a batch again", seen.replays.updates),
    ]
    rates = {name: getattr(seen.rates, name) for name in _RATES}
    groups = {name: getattr(seen.groups, name) for name in ("open", "ready", "batched")}
    usage = {
        (role, phase): seconds
        for role, each in seen.usage.items()
        for phase, seconds in each.total.items()
    }
    said = {(each.judge, name): getattr(each, name) for each in seen.judges for name in _SAID}
    success = {task.task_id: task.success for task in seen.tasks}
    invalid = {task.task_id: task.invalid_share for task in seen.tasks}
    process = ("worker", "role", "host")
    alive = {(each.worker, each.role, each.host): each.alive for each in seen.processes}
    waits = {(each.worker, each.role, each.host): each.waiting_s for each in seen.processes}
    return [
        *(Family(name, help_, [((), value)]) for name, help_, value in whole),
        _by("trajectories", "By state in the ledger", seen.trajectories, "state"),
        _by("verdicts", "Judged trajectories", seen.verdicts, "verdict"),
        _by(
            "judged", "Judged trajectories, by what judge and evaluator say", said, "judge", "said"
        ),
        _by("per_minute", "Throughput of the last minute", rates, "of"),
        _by("groups", "Groups by where they stand", groups, "state"),
        _by("replays_refused", "Batches not trained on again", seen.replays.refused, "reason"),
        _by("task_success", "Moving average", success, "task"),
        _by("task_invalid", "Share of recent episodes", invalid, "task"),
        _by("train", "Newest metrics of the trainer", seen.metrics, "metric"),
        _by("seconds", "Time by role and phase", usage, "role", "phase"),
        _by("alive", "Heard within the limit", alive, *process),
        _by("waiting_seconds", "Its longest wait", waits, *process),
    ]


def _by(name: str, help_: str, values: Mapping[Any, float | None], *labels: str) -> Family:
    """A number for each value of one label, or for each tuple of values of several."""
    samples = [((key,) if isinstance(key, str) else key, each) for key, each in values.items()]
    return Family(name, help_, samples, labels)


class _SnapshotCollector:
    """The collector that a prometheus_client registry calls at each scrape."""

    def __init__(self, family: Callable[..., Any]) -> None:
        """`family` is prometheus_client's GaugeMetricFamily."""
        self.snapshot: Snapshot | None = None
        self._family = family

    def collect(self) -> Iterator[Any]:
        """One family for each name that has numbers."""
        seen = self.snapshot
        up = Family("up", "1 where data answers", [((), seen is not None)])
        for each in (up, *(families(seen) if seen else ())):
            family = self._family(f"dart_{each.name}", each.help, labels=each.labels)
            for key, value in each.samples:
                if value is not None and math.isfinite(value):
                    family.add_metric(key, value)
            if family.samples:
                yield family


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
    async with Watcher(config) as watcher:
        try:
            server, _ = start_http_server(port, addr=HOST, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"--prometheus {port}: {HOST} cannot be served there: {error.strerror}; "
                "choose another port"
            ) from None
        say(f"metrics at http://{HOST}:{server.server_port}/metrics")
        try:
            while newest.snapshot is None or not newest.snapshot.stopping:
                try:
                    newest.snapshot = await watcher.snapshot()
                except BusError as error:  # data may be started again: the metrics stay
                    newest.snapshot = None
                    say(str(error))
                await asyncio.sleep(every_s)
        finally:
            server.shutdown()
            server.server_close()
    return 0

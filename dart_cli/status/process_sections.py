"""The sections of a run's page on its processes. `status_page` puts them together.

processes       a table of the processes with their state, their load and what they wait for
state_of        the state of one process, in words
utilisation     bars of how each role spent the last minute, and the queues between roles
weights_taken   a table of the rollout workers' newest weights and of the time they took
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bus.snapshot import ProcessView, Snapshot, SyncView, UsageView
from dart_cli.runtime.liveness import ENDED, end_of
from dart_cli.runtime.tables import count, table_of

_BAR_CELLS = 24
_ROLE_ORDER = ("data", "train", "rollout", "env", "serve", "eval", "status")
_STATE_STYLES = {"ready": "green", "training": "green", "waiting": "yellow", "syncing": "cyan"}
_TROUBLE = frozenset({"queueing", "restarts", "hung"})
"""Gauges that are shown only if they are not 0, because they report trouble."""
_GAUGES = {  # role -> the gauges that describe its load best; --json has all
    "env": ("playing", "slots", "queueing", "episodes", "restarts", "hung"),
    "serve": ("playing", "slots", "episodes", "refused"),
    "rollout": ("in_flight", "waiting", "tokens"),
    "data": ("leases", "open_groups", "ready_groups"),
    "train": ("updates", "tokens", "ranks", "slowest_rank", "rank_memory_mb"),
}
_PHASES = {  # phase -> (block, colour), in the order of a bar: useful work first, lost time last
    "playing": ("█", "green"),
    "busy": ("█", "green"),
    "training": ("█", "green"),
    "waiting": ("▓", "yellow"),
    "resetting": ("▒", "cyan"),
    "queueing": ("▞", "yellow"),
    "syncing": ("▒", "cyan"),
    "publishing": ("▒", "cyan"),
    "suspended": ("▚", "magenta"),
    "starting": ("╱", "blue"),
    "idle": ("░", "bright_black"),
    "dead": ("×", "red"),
}
_LEAST_SHARE = 0.005
_MAX_SYNCS = 8


def processes(snapshot: Snapshot, rows: int | None = None, *, has_load: bool = True) -> Table:
    """Return a table of the first `rows` processes, with their load if `has_load`."""
    order = {role: index for index, role in enumerate(_ROLE_ORDER)}
    hosts = {process.host for process in snapshot.processes}
    columns: dict[str, Callable[[ProcessView], RenderableType]] = {
        "process": lambda p: f"{p.worker} ({p.host})" if len(hosts) > 1 else p.worker,
        "state": lambda p: Text(state_of(p), _STATE_STYLES.get(p.state, "") if p.alive else ""),
        ">version": lambda p: "-" if p.policy_version < 0 else str(p.policy_version),
        "load": _gauges,
        "waits for": lambda p: f"{p.waiting_for} ({p.waiting_s:.0f} s)" if p.waiting_for else "",
        ">heard": lambda p: f"{p.heartbeat_age_s:.0f} s",
    }
    if not has_load:
        del columns["load"]
    return table_of(
        "processes",
        sorted(snapshot.processes, key=lambda p: (order.get(p.role, 9), p.worker))[:rows],
        columns,
        style=lambda p: "" if p.alive or state_of(p) == ENDED else "red",
    )


def state_of(process: ProcessView) -> str:
    """Return the state that a process reports; if it is silent, how it ended."""
    if process.alive:
        return process.state
    return end_of(process.state, process.liveness, process.error)


def _gauges(process: ProcessView) -> str:
    """Return the load of a process in words: the gauges of its role."""
    gauges = process.gauges
    names = [name for name in _GAUGES.get(process.role, ()) if name in gauges]
    texts = [
        f"{name} {count(gauges[name])}" for name in names if gauges[name] or name not in _TROUBLE
    ]
    if prompt_tokens := gauges.get("prompt_tokens"):
        texts.append(f"prompts {gauges.get('cached_tokens', 0.0) / prompt_tokens:.0%} cached")
    return ", ".join(texts)


def utilisation(snapshot: Snapshot) -> Table:
    """Return a bar of the last minute for each role with its phases, and the queues between roles."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_style = "\nutilisation, last minute", "bold"
    table.title_justify = "left"
    for role, usage in sorted(snapshot.usage.items()):
        table.add_row(Text(role, "bold"), _bar(usage), Columns(_legend(usage), padding=(0, 2)))
    queues = snapshot.queues
    waiting = [
        f"{queues.in_flight} requests decoded, {queues.waiting} wait",
        f"{queues.leases} trajectories in play, {queues.free_slots} slots wait",
    ]
    table.add_row(Text("queues", "bold"), "", "\n".join(waiting))
    return table


def _bar(usage: UsageView) -> Text:
    """Return a bar of _BAR_CELLS cells, in which each phase has its share of the minute."""
    parts = _shares(usage.minute)
    ends = [round(_BAR_CELLS * share) for share in accumulate(parts.values(), initial=0.0)]
    bar = Text()
    for phase, (begin, end) in zip(parts, pairwise(ends), strict=True):
        block, style = _PHASES.get(phase, ("·", ""))
        bar.append(block * (end - begin), style)
    return bar


def _legend(usage: UsageView) -> list[Text]:
    """Return the phases with their shares of the minute; the first also with its share of the run."""
    entries = []
    for phase, share in _shares(usage.minute).items():
        if share >= _LEAST_SHARE:
            entries.append(Text.assemble(_PHASES.get(phase, ("·", "")), f" {phase} {share:.0%}"))
            if len(entries) == 1:
                run = _shares(usage.total).get(phase, 0.0)
                entries[0].append(f" (run {run:.0%})", "bright_black")
    return entries


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return phase -> fraction of all seconds, in the order of a bar; empty if there are no seconds."""
    total, order = sum(seconds.values()), [*_PHASES, *seconds]
    phases = sorted(seconds, key=order.index)
    return {phase: seconds[phase] / total for phase in phases} if total > 0 else {}


SYNC_COLUMNS = ("in flight", "waited", "transfer", "ago")
"""Columns of `weights_taken` that a narrow page leaves out, in this order."""


def weights_taken(snapshot: Snapshot, lacking: frozenset[str] = frozenset()) -> Table:
    """Return a table of each rollout worker's newest weights, and how long it took to take them."""
    newest = sorted(snapshot.syncs, key=lambda sync: sync.done_at, reverse=True)
    columns: dict[str, Callable[[SyncView], RenderableType]] = {
        "worker": lambda sync: sync.worker,
        ">version": lambda sync: str(sync.policy_version),
        ">ago": lambda sync: _short(max(snapshot.now - sync.done_at, 0.0)),
        ">waited": lambda sync: _short(sync.waited_s),
        ">transfer": lambda sync: _short(sync.transfer_s),
        ">pause": lambda sync: _short(sync.pause_s),
        ">in flight": lambda sync: str(sync.in_flight),
        ">syncs": lambda sync: str(sync.syncs) + (f", {sync.refused} bad" * (sync.refused > 0)),
    }
    table = table_of(
        "weights taken",
        newest[:_MAX_SYNCS],
        {name: cell for name, cell in columns.items() if name.lstrip(">") not in lacking},
        style=lambda sync: "red" if sync.error else "",
    )
    if len(newest) > _MAX_SYNCS:
        table.add_row(f"and {len(newest) - _MAX_SYNCS} more, longer ago", style="bright_black")
    return table


def _short(seconds: float) -> str:
    """Return seconds as a short text: `3 ms`, `0.42 s`, `12 s`, `3 min`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"

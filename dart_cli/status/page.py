"""A snapshot of a run as one terminal page, 80 columns or wider.

status_page  all of it: header, problems, processes, utilisation, pipeline, tasks, training
sparkline    numbers as one line of blocks
progress_line  the run in one line, where there is no terminal
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bus.snapshot import ProcessView, Snapshot
from dart_cli.runtime.tables import fraction, minutes, page_table
from dart_cli.status.health import problems
from dart_cli.status.judges import judge_lines
from dart_cli.status.utilisation import utilisation

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24
_ROLE_ORDER = ("data", "train", "rollout", "env", "serve", "eval", "status")
_STATE_STYLES = {"ready": "green", "training": "green", "waiting": "yellow", "syncing": "cyan"}
_METRICS = (  # shown first and in this order, as far as the trainer sends them
    *("loss", "reward", "entropy", "mismatch_kl", "reference_kl", "ess"),
    *("replay_ess", "grad_norm", "lr"),
    *("samples", "step_s", "waiting_s"),
)
_MAX_METRICS = 10
_TROUBLE = frozenset({"restarts", "hung"})  # gauges that are shown only if they are not 0
_GAUGES = {  # the most telling gauges of a role's load; the others are in --json
    "env": ("playing", "slots", "episodes", "restarts", "hung"),
    "serve": ("playing", "slots", "episodes", "refused"),
    "rollout": ("in_flight", "waiting", "tokens"),
    "data": ("leases", "open_groups", "ready_groups"),
    "train": ("updates", "tokens", "ranks", "slowest_rank", "rank_memory_mb"),
}


def status_page(snapshot: Snapshot, *, is_old: bool = False) -> RenderableType:
    """The whole page; `dart status` prints it once or keeps it up to date.

    `is_old`: data has not answered since this snapshot, so what it says of the run may not be so any more.
    """
    parts: list[RenderableType] = [_header(snapshot, is_old)]
    found = problems(snapshot)
    if found:
        parts.append(Panel("\n".join(found), title="needs attention", style="red", box=box.ROUNDED))
    parts.append(_processes(snapshot))
    if (busy := utilisation(snapshot)) is not None:
        parts.append(busy)
    parts.append(Columns([_pipeline(snapshot), _throughput(snapshot), _training(snapshot)]))
    parts += [Text(line) for judge in snapshot.judges for line in judge_lines(judge)]
    if snapshot.tasks:
        parts.append(_tasks(snapshot))
    return Group(*parts)


def progress_line(snapshot: Snapshot) -> str:
    """One line: how far the run is, success, throughput, staleness."""
    alive = sum(process.alive for process in snapshot.processes)
    return (
        f"{_how_far(snapshot)}  "
        f"success {fraction(snapshot.success)} {sparkline(snapshot.success_curve[-24:], 0, 1)}"
        f"{_until_stop(snapshot)}  "
        f"{snapshot.rates.trajectories:.0f} trajectories/min  "
        f"staleness {snapshot.staleness.mean:.1f}  {alive} processes"
    )


def sparkline(
    values: Sequence[float | None], low: float | None = None, high: float | None = None
) -> str:
    """Numbers as blocks of eight heights, a gap for None; scaled to `low`..`high` or to fit."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    bottom = min(known) if low is None else low
    span = (max(known) if high is None else high) - bottom
    return "".join(
        " " if value is None else _BLOCKS[_level(value - bottom, span)] for value in values
    )


def _level(above: float, span: float) -> int:
    top = len(_BLOCKS) - 1
    return 0 if span <= 0 else min(top, max(0, round(above / span * top)))


def _header(snapshot: Snapshot, is_old: bool) -> RenderableType:
    filled = round(_BAR_CELLS * _share_over(snapshot))
    state = Text(f"stopping: {snapshot.reason}", "yellow") if snapshot.stopping else Text("running")
    if problems(snapshot):
        state = Text("needs attention", "bold red")
    if is_old:
        state = Text("as it was when data last answered", "bold red")
    line = Text.assemble(
        (f"{snapshot.run_dir}  ", "bold"),
        ("━" * filled, "green"),
        ("━" * (_BAR_CELLS - filled), "bright_black"),
        f"  {_how_far(snapshot)}  ",
        state,
    )
    success = Text.assemble(
        "success ",
        (fraction(snapshot.success), "bold green"),
        f"  {sparkline(snapshot.success_curve[-60:], 0, 1)}",
        f"  mean reward {fraction(snapshot.reward)}" if is_partial(snapshot) else "",
        _until_stop(snapshot),
    )
    return Group(line, success)


def _share_over(snapshot: Snapshot) -> float:
    """Share in [0, 1] of the run that is over: the furthest of what ends it."""
    shares = [snapshot.updates / max(1, snapshot.updates_total)]
    if snapshot.max_trajectories:
        shares.append(snapshot.played / snapshot.max_trajectories)
    if snapshot.max_minutes:
        shares.append(snapshot.run_s / (60 * snapshot.max_minutes))
    return min(1.0, max(shares))


def _how_far(snapshot: Snapshot) -> str:
    """Time, updates and trajectories, of those that end the run: `3:05 of 9:30  update 7/20`."""
    text = minutes(snapshot.run_s)
    if snapshot.max_minutes:
        text += f" of {minutes(60 * snapshot.max_minutes)}"
    text += f"  update {snapshot.updates}/{snapshot.updates_total}"
    if snapshot.max_trajectories:
        text += f"  trajectory {snapshot.played}/{snapshot.max_trajectories}"
    return text


def _until_stop(snapshot: Snapshot) -> str:
    """How far the run is from train.stop_at; empty without."""
    stop = snapshot.stop
    if stop is None:
        return ""
    text = f"  stop at {stop.at:g}: "
    if stop.counted < stop.wanted:
        return text + f"trajectory {stop.counted}/{stop.wanted}"
    return text + f"{fraction(stop.bound)} (lowest {stop.lowest} {fraction(stop.lowest_success)})"


def is_partial(snapshot: Snapshot) -> bool:
    """Whether rewards say more than success: some lie between 0 and 1, or belong to other outcomes."""
    return any(task.reward is not None and task.reward != task.success for task in snapshot.tasks)


def _processes(snapshot: Snapshot) -> Table:
    names = ["process", "state", "version", "load", "waits for", "heard"]
    several_hosts = len({process.host for process in snapshot.processes}) > 1
    table = page_table("processes", *names, right=("version", "heard"))
    order = {role: index for index, role in enumerate(_ROLE_ORDER)}
    for process in sorted(snapshot.processes, key=lambda p: (order.get(p.role, 9), p.worker)):
        waits = f"{process.waiting_for} ({process.waiting_s:.0f} s)" if process.waiting_for else ""
        table.add_row(
            f"{process.worker} ({process.host})" if several_hosts else process.worker,
            Text(process.state, _STATE_STYLES.get(process.state, "")) if process.alive else "dead",
            "-" if process.policy_version < 0 else str(process.policy_version),
            _gauges(process),
            waits,
            f"{process.heartbeat_age_s:.0f} s",
            style="" if process.alive else "red",
        )
    return table


def _gauges(process: ProcessView) -> str:
    names = _GAUGES.get(process.role, ())
    found = [
        (name, process.gauges[name])
        for name in names
        if name in process.gauges and (process.gauges[name] or name not in _TROUBLE)
    ]
    shown = [f"{name} {value:.4g}" for name, value in found]
    if asked := process.gauges.get("prompt_tokens"):
        shown.append(f"prompts {process.gauges.get('cached_tokens', 0.0) / asked:.0%} cached")
    return ", ".join(shown)


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
    )
    table.add_column(style="bright_black")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _pipeline(snapshot: Snapshot) -> Table:
    groups = snapshot.groups
    rows = [
        ("groups open", f"{groups.open} of {groups.limit}"),
        ("groups ready", str(groups.ready)),
        ("groups in a batch", str(groups.batched)),
        ("groups trained", str(groups.trained)),
        *((f"groups dropped: {why}", str(n)) for why, n in sorted(groups.dropped.items())),
        *([("successes in the pool", str(groups.pool))] if groups.pool else []),
        *_replays(snapshot),
    ]
    for state, number in sorted(snapshot.trajectories.items()):
        rows.append((f"trajectories {state}", str(number)))
        if state == "dropped":
            rows += [(f"  {why}", str(n)) for why, n in sorted(snapshot.dropped.items())]
    return _pairs("pipeline", rows)


def _replays(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Updates on batches that were trained on before, and why others were not; nothing without them."""
    seen = snapshot.replays
    if not (seen.updates or seen.refused):
        return []
    return [
        ("updates on a batch again", f"{seen.updates} of {snapshot.updates}"),
        *((f"  not again: {why}", str(number)) for why, number in sorted(seen.refused.items())),
    ]


def _throughput(snapshot: Snapshot) -> Table:
    rates, stale = snapshot.rates, snapshot.staleness
    histogram = [float(stale.histogram.get(age, 0)) for age in range(stale.max + 1)]
    rows = [
        ("trajectories/h", f"{60 * rates.trajectories:.0f}"),
        ("actions/min", f"{rates.actions:.0f}"),
        ("updates/min", f"{rates.train_steps:.1f}"),
        ("newest version", "-" if snapshot.policy_version < 0 else str(snapshot.policy_version)),
        ("staleness", f"mean {stale.mean:.2f}, max {stale.max} {sparkline(histogram, 0)}"),
        *((f"verdict {verdict}", str(n)) for verdict, n in sorted(snapshot.verdicts.items())),
        ("on disk", f"{snapshot.store_bytes / 1e6:.1f} MB"),
    ]
    return _pairs("throughput", rows)


def _training(snapshot: Snapshot) -> Table:
    names = [name for name in _METRICS if name in snapshot.metrics]
    names += sorted(set(snapshot.metrics) - set(names))
    rows = []
    for name in names[:_MAX_METRICS]:
        curve = sparkline(snapshot.metric_curves.get(name, [])[-16:])
        rows.append((name, f"{snapshot.metrics[name]:.4g} {curve}"))
    return _pairs("training", rows or [("no update yet", "")])


def _tasks(snapshot: Snapshot) -> Table:
    reward = ("reward",) if is_partial(snapshot) else ()
    columns = (
        "task",
        *reward,
        "success",
        "over versions",
        "trajectories",
        "invalid",
        "played next",
    )
    table = page_table(
        "tasks", *columns, right=("reward", "success", "trajectories", "invalid", "played next")
    )
    curves = columns.index("over versions")
    table.columns[curves].no_wrap = True  # a curve may hold spaces; it must not be broken there
    for task in snapshot.tasks:
        share = (
            f" ({task.invalid_share:.0%})"
            if task.invalid_share and task.invalid_share >= 0.01
            else ""
        )
        invalid = Text(f"{task.invalid}{share}", "yellow" if task.invalid else "")
        table.add_row(
            task.task_id,
            *((fraction(task.reward),) if reward else ()),
            fraction(task.success),
            sparkline(task.curve[-30:], 0, 1),
            str(task.trajectories),
            invalid,
            f"{task.weight:.0%}",
        )
    return table

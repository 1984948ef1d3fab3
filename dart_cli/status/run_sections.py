"""The sections of a run's page on its progress and its results. `status_page` puts them together.

header         how far the run is, the time left, its success
progress_line  the run in one line, where there is no terminal
problems       what needs attention, a line each
task_results   a table of success by task
training       a table of the trainer's newest metrics
throughput     a table of rates, staleness and verdicts
pipeline       a table of groups and trajectories by state
sparkline      numbers as one line of blocks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.snapshot import Snapshot, TaskView
from dart_cli.runtime.tables import count, fraction, minutes, moment, page_table, table_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24
METRICS = (
    "loss",
    "reward",
    "entropy",
    "parity_mean",
    "ratio_mean",
    "ess",
    "grad_norm",
    "mismatch_kl",
    "reference_kl",
    "teacher_gap",
    "replay_ess",
    "lr",
    "staleness_mean",
    "samples",
    "tokens",
    "step_s",
    "waiting_s",
)
"""Metrics of the trainer that are shown first, in this order, if it sends them."""
_MAX_METRICS = 12


def progress_line(snapshot: Snapshot) -> str:
    """Return one line with the progress, success, throughput and staleness of the run."""
    alive = sum(process.alive for process in snapshot.processes)
    early_stop = _early_stop(snapshot)
    return (
        f"{_how_far(snapshot)}  "
        f"success {fraction(snapshot.success)} {sparkline(snapshot.success_curve[-24:], 0, 1)}"
        f"{early_stop and f'  {early_stop}'}  "
        f"{snapshot.rates.trajectories:.0f} trajectories/min  "
        f"staleness {snapshot.staleness.mean:.1f}  {alive} processes"
        f"{_ending(snapshot)}"
    )


def problems(snapshot: Snapshot) -> list[str]:
    """Return a line for each stall, refused weight set and warning; none if the run is healthy.

    A dead process is a stall. A process that ended because the run is over is not a problem.
    """
    if snapshot.stopping:
        return []
    serving = {
        process.worker: process.policy_version for process in snapshot.processes if process.alive
    }
    refusals = [
        f"{sync.worker} refused version {sync.policy_version}, "
        f"{'its old weights serve' if serving[sync.worker] >= 0 else 'it serves nothing yet'}: {sync.error}"
        for sync in snapshot.syncs
        if sync.error and sync.worker in serving
    ]
    return [*(stall.text for stall in snapshot.stalls), *refusals, *snapshot.warnings]


def sparkline(
    values: Sequence[float | None], low: float | None = None, high: float | None = None
) -> str:
    """Return numbers as blocks of eight heights, with a gap for None.

    They are scaled to `low` and `high`, or to the smallest and the largest value.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    bottom = min(numbers) if low is None else low
    span = (max(numbers) if high is None else high) - bottom
    return "".join(" " if value is None else _block(value - bottom, span) for value in values)


def _block(above: float, span: float) -> str:
    """Return the block for a value that is `above` the lower end of a scale of length `span`."""
    top = len(_BLOCKS) - 1
    return _BLOCKS[0 if span <= 0 else min(top, max(0, round(above / span * top)))]


# --- how far the run is ----------------------------------------------------------------------


def header(snapshot: Snapshot, *, is_old: bool = False) -> RenderableType:
    """Return lines with the run's state, progress, time left and success, and with what ends it early.

    `is_old` is true if the data service has not answered since this snapshot.
    """
    filled = round(_BAR_CELLS * min(1.0, max(share for share, _ in _limits(snapshot))))
    state = Text.assemble(
        (f"{snapshot.run_dir}  ", "bold"),
        ("━" * filled, "green"),
        ("━" * (_BAR_CELLS - filled), "bright_black"),
        "  ",
        _state(snapshot, is_old=is_old),
    )
    left = "" if is_old or snapshot.stopping else _time_left(snapshot)
    success = Text.assemble(
        "success ",
        (fraction(snapshot.success), "bold green"),
        f"  {sparkline(snapshot.success_curve[-40:], 0, 1)}",
        f"  mean reward {fraction(snapshot.reward)}" if _is_partial(snapshot) else "",
    )
    lines = [state, Text("  ".join(filter(None, (_how_far(snapshot), left)))), success]
    return Group(*lines, *map(Text, filter(None, [_early_stop(snapshot)])))


def _state(snapshot: Snapshot, *, is_old: bool) -> Text:
    """Return the state of the run in words; if `is_old`, the time of its last report instead."""
    if snapshot.stopping or snapshot.ending:
        reason = f": {snapshot.reason}" if snapshot.reason else ""
        state = f"over{reason}" if is_old else f"stopping{reason}{_ending(snapshot)}"
        return Text(state, "yellow")
    if is_old:
        return Text(f"as last reported at {moment(snapshot.now)}", "bold red")
    return Text("needs attention", "bold red") if problems(snapshot) else Text("running")


def _limits(snapshot: Snapshot) -> list[tuple[float, str]]:
    """Return the progress towards each limit that ends the run: a share in [0, 1], and a text.

    The time is among them even if it has no limit.
    """
    run_s, limit_s = snapshot.run_s, 60 * snapshot.max_minutes
    updates, total = snapshot.updates, snapshot.updates_total
    limits = [
        (run_s / limit_s, f"{minutes(run_s)} of {minutes(limit_s)}")
        if limit_s
        else (0.0, minutes(run_s)),
        (updates / max(1, total), f"update {updates}/{total}"),
    ]
    if limit := snapshot.max_trajectories:
        limits.append(
            (
                snapshot.ended_trajectories / limit,
                f"trajectory {snapshot.ended_trajectories}/{limit}",
            )
        )
    return limits


def _how_far(snapshot: Snapshot) -> str:
    """Return the progress towards all limits, e.g. `3:05 of 9:30  update 7/20`."""
    return "  ".join(text for _, text in _limits(snapshot))


def _time_left(snapshot: Snapshot) -> str:
    """Return e.g. `about 3:05 left`, by the rates of the last minute; empty before the first rate."""
    rates = snapshot.rates
    seconds_left = []
    if rates.updates:
        seconds_left.append(60 * (snapshot.updates_total - snapshot.updates) / rates.updates)
    if snapshot.max_trajectories and rates.trajectories:
        seconds_left.append(
            60 * (snapshot.max_trajectories - snapshot.ended_trajectories) / rates.trajectories
        )
    if snapshot.max_minutes:
        seconds_left.append(60 * snapshot.max_minutes - snapshot.run_s)
    if not seconds_left:
        return ""
    kind = "at most" if snapshot.stop else "about"
    return f"{kind} {minutes(max(0.0, min(seconds_left)))} left"


def _early_stop(snapshot: Snapshot) -> str:
    """Return how far the run is from train.stop_at; empty if that is not set, or if the run is over."""
    stop = snapshot.stop
    if stop is None or snapshot.stopping:
        return ""
    text = f"ends early once success {stop.at:g} is proved: "
    if stop.counted < stop.required:
        return text + f"needs {stop.required:,} trajectories, has {stop.counted:,}"
    lowest = f"lowest task {stop.lowest} {fraction(stop.lowest_success)}"
    return f"{text}{fraction(stop.bound)} so far, {lowest}"


def _ending(snapshot: Snapshot) -> str:
    """Return what a run that is ending waits for; empty if it waits for nothing."""
    return f"  waits for {snapshot.ending}" if snapshot.ending else ""


def _is_partial(snapshot: Snapshot) -> bool:
    """Return True if some task's mean reward differs from its success, because rewards are partial."""
    return any(task.reward is not None and task.reward != task.success for task in snapshot.tasks)


# --- results --------------------------------------------------------------------------------


def _name_value_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of (name, value) rows, without a header."""
    table = page_table(title, "name", "value", right=("value",))
    table.show_header, table.box, table.columns[0].style = False, None, "bright_black"
    for row in rows:
        table.add_row(*row)
    return table


def pipeline(snapshot: Snapshot) -> Table:
    """Return a table of how many groups and trajectories are in each state."""
    groups, replays = snapshot.groups, snapshot.replays
    rows = [
        ("groups open", f"{groups.open} of {groups.limit}"),
        ("groups ready", str(groups.ready)),
        ("groups in a batch", str(groups.batched)),
        ("groups trained", f"{groups.trained:,}"),
        *((f"groups dropped: {why}", f"{n:,}") for why, n in sorted(groups.dropped.items())),
    ]
    if groups.pool:
        rows.append(("successes in the pool", str(groups.pool)))
    if replays.updates or replays.refused:
        rows.append(("updates on a batch again", f"{replays.updates} of {snapshot.updates}"))
        rows += [(f"  not again: {why}", f"{n:,}") for why, n in sorted(replays.refused.items())]
    for state, number in sorted(snapshot.trajectories.items()):
        rows.append((f"trajectories {state}", f"{number:,}"))
        if state == "dropped":
            rows += [(f"  {why}", f"{n:,}") for why, n in sorted(snapshot.dropped.items())]
    return _name_value_table("pipeline", rows)


def throughput(snapshot: Snapshot) -> Table:
    """Return a table of the rates of the last minute, staleness, verdicts and the size on disk."""
    rates, staleness = snapshot.rates, snapshot.staleness
    histogram = [float(staleness.histogram.get(age, 0)) for age in range(staleness.max + 1)]
    rows = [
        ("trajectories/min", _rate(rates.trajectories)),
        ("steps/min", _rate(rates.steps)),
        ("actions/min", _rate(rates.actions)),
        ("updates/min", _rate(rates.updates)),
        ("newest version", "-" if snapshot.policy_version < 0 else str(snapshot.policy_version)),
        ("staleness", f"mean {staleness.mean:.2f}, max {staleness.max} {sparkline(histogram, 0)}"),
        *((f"verdict {verdict}", f"{n:,}") for verdict, n in sorted(snapshot.verdicts.items())),
        ("on disk", f"{snapshot.store_bytes / 1e6:.1f} MB"),
    ]
    return _name_value_table("throughput", rows)


def _rate(per_minute: float) -> str:
    """Return a rate per minute as text, with two digits below 10, because some updates take minutes."""
    return f"{per_minute:.2g}" if per_minute < 10 else f"{per_minute:,.0f}"


def training(snapshot: Snapshot) -> Table:
    """Return a table of the trainer's newest metrics with their curves."""
    names = [name for name in METRICS if name in snapshot.metrics]
    names += sorted(set(snapshot.metrics) - set(names))
    rows = []
    for name in names[:_MAX_METRICS]:
        curve = sparkline(snapshot.metric_curves.get(name, [])[-16:])
        rows.append((name, f"{count(snapshot.metrics[name])} {curve}"))
    return _name_value_table("training", rows or [("no update yet", "")])


TASK_COLUMNS = ("played next", "invalid")
"""Columns of `task_results` that a narrow page leaves out, in this order."""


def task_results(
    snapshot: Snapshot,
    lacking: frozenset[str] = frozenset(),
    rows: int | None = None,
    *,
    points: int = 30,
) -> Table:
    """Return a table of the first `rows` tasks with their success and the newest `points` of their curves.

    Columns named in `lacking` are left out.
    """
    columns: dict[str, Callable[[TaskView], RenderableType]] = {
        "task": lambda task: task.task_id,
        ">reward": lambda task: fraction(task.reward),
        ">success": lambda task: fraction(task.success),
        # A curve may hold spaces; it must not be broken there.
        "over versions": lambda task: Text(sparkline(task.curve[-points:], 0, 1), no_wrap=True),
        ">trajectories": lambda task: f"{task.trajectories:,}",
        ">invalid": lambda task: Text(_invalid(task), "yellow" if task.invalid else ""),
        ">played next": lambda task: f"{task.weight:.0%}",
    }
    if not _is_partial(snapshot):
        del columns[">reward"]
    columns = {name: cell for name, cell in columns.items() if name.lstrip(">") not in lacking}
    return table_of("tasks", snapshot.tasks[:rows], columns)


def _invalid(task: TaskView) -> str:
    """Return the number of invalid trajectories, with their share from 1 % on."""
    share = task.invalid_share or 0.0
    return f"{task.invalid} ({share:.0%})" if share >= 0.01 else str(task.invalid)

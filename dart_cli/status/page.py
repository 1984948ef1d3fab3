"""A snapshot of a run as one terminal page, 80 columns or wider.

status_page    all of it: header, problems, processes, utilisation, pipeline, judges, tasks, training
progress_line  the run in one line, where there is no terminal
problems       what needs attention, a line each
judge_lines    what a judge model said, in words; judge_json, as plain values
sparkline      numbers as one line of blocks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bus.snapshot import JudgeView, ProcessView, Snapshot, TaskView, UsageView
from dart_cli.algo.statistics import Agreement
from dart_cli.runtime.tables import fraction, minutes, page_table, table_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24
_ROLE_ORDER = ("data", "train", "rollout", "env", "serve", "eval", "status")
_STATE_STYLES = {"ready": "green", "training": "green", "waiting": "yellow", "syncing": "cyan"}
METRICS = (
    *("loss", "reward", "entropy", "parity_mean", "ratio_mean", "ess", "grad_norm", "mismatch_kl"),
    *("reference_kl", "replay_ess", "lr", "staleness_mean", "samples", "tokens", "step_s"),
    "waiting_s",
)
"""Of the trainer; shown first and in this order, as far as it sends them."""
_MAX_METRICS = 12
_TROUBLE = frozenset({"queueing", "restarts", "hung"})
"""Gauges that are shown only if they are not 0."""
_GAUGES = {  # the most telling gauges of a role's load; the others are in --json
    "env": ("playing", "slots", "queueing", "episodes", "restarts", "hung"),
    "serve": ("playing", "slots", "episodes", "refused"),
    "rollout": ("in_flight", "waiting", "tokens"),
    "data": ("leases", "open_groups", "ready_groups"),
    "train": ("updates", "tokens", "ranks", "slowest_rank", "rank_memory_mb"),
}
_PHASES = {  # in a bar's order: useful work first, lost time last
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


def status_page(snapshot: Snapshot, *, is_old: bool = False) -> RenderableType:
    """The whole page; `dart status` prints it once or keeps it up to date.

    `is_old`: data has not answered since this snapshot, so what it says of the run may not be so any more.
    """
    parts: list[RenderableType] = [_header(snapshot, is_old)]
    if found := problems(snapshot):
        parts.append(Panel("\n".join(found), title="needs attention", style="red", box=box.ROUNDED))
    parts.append(_processes(snapshot))
    if snapshot.usage:
        parts += [Text("\nutilisation, last minute", "bold"), _utilisation(snapshot)]
    if snapshot.syncs:
        parts.append(_syncs(snapshot))
    columns = [_pipeline(snapshot), _throughput(snapshot), _training(snapshot)]
    parts.append(Columns(columns, padding=(0, 3)))
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
        f"{_ending(snapshot)}"
    )


def problems(snapshot: Snapshot) -> list[str]:
    """One line for each stall, refused weight set and warning; empty where the run is healthy.

    Dead processes are stalls. A process that ended because the run is over is not a problem.
    """
    if snapshot.stopping:
        return []
    serves = {
        process.worker: process.policy_version for process in snapshot.processes if process.alive
    }
    refused = [
        f"{sync.worker} refused version {sync.policy_version}, "
        f"{'its old weights serve' if serves[sync.worker] >= 0 else 'it serves nothing yet'}: {sync.error}"
        for sync in snapshot.syncs
        if sync.error and sync.worker in serves
    ]
    return [*(stall.text for stall in snapshot.stalls), *refused, *snapshot.warnings]


def sparkline(
    values: Sequence[float | None], low: float | None = None, high: float | None = None
) -> str:
    """Numbers as blocks of eight heights, a gap for None; scaled to `low`..`high` or to fit."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    bottom = min(known) if low is None else low
    span = (max(known) if high is None else high) - bottom
    return "".join(" " if each is None else _block(each - bottom, span) for each in values)


def _block(above: float, span: float) -> str:
    top = len(_BLOCKS) - 1
    return _BLOCKS[0 if span <= 0 else min(top, max(0, round(above / span * top)))]


# --- how far the run is ----------------------------------------------------------------------


def _header(snapshot: Snapshot, is_old: bool) -> RenderableType:
    filled = round(_BAR_CELLS * min(1.0, max(share for share, _ in _ends(snapshot))))
    state = Text("running")
    if snapshot.stopping or snapshot.ending:
        reason = f": {snapshot.reason}" if snapshot.reason else ""
        state = Text(f"stopping{reason}{_ending(snapshot)}", "yellow")
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
        f"  mean reward {fraction(snapshot.reward)}" if _is_partial(snapshot) else "",
        _until_stop(snapshot),
    )
    return Group(line, success)


def _ends(snapshot: Snapshot) -> list[tuple[float, str]]:
    """What ends the run: the share in [0, 1] that is over, in words with the limit if there is one."""
    run, most = snapshot.run_s, 60 * snapshot.max_minutes
    updates, total = snapshot.updates, snapshot.updates_total
    found = [
        (run / most, f"{minutes(run)} of {minutes(most)}") if most else (0.0, minutes(run)),
        (updates / max(1, total), f"update {updates}/{total}"),
    ]
    if limit := snapshot.max_trajectories:
        found.append((snapshot.played / limit, f"trajectory {snapshot.played}/{limit}"))
    return found


def _how_far(snapshot: Snapshot) -> str:
    """`3:05 of 9:30  update 7/20`."""
    return "  ".join(text for _, text in _ends(snapshot))


def _until_stop(snapshot: Snapshot) -> str:
    """How far the run is from train.stop_at; empty without."""
    stop = snapshot.stop
    if stop is None:
        return ""
    text = f"  stop at {stop.at:g}: "
    if stop.counted < stop.wanted:
        return text + f"trajectory {stop.counted}/{stop.wanted}"
    return text + f"{fraction(stop.bound)} (lowest {stop.lowest} {fraction(stop.lowest_success)})"


def _ending(snapshot: Snapshot) -> str:
    """What a run that ends waits for; empty if nothing."""
    return f"  waits for {snapshot.ending}" if snapshot.ending else ""


def _is_partial(snapshot: Snapshot) -> bool:
    """Whether rewards say more than success: some lie between 0 and 1, or belong to other outcomes."""
    return any(task.reward is not None and task.reward != task.success for task in snapshot.tasks)


# --- processes and their time ----------------------------------------------------------------


def _processes(snapshot: Snapshot) -> Table:
    order = {role: index for index, role in enumerate(_ROLE_ORDER)}
    hosts = {process.host for process in snapshot.processes}
    return table_of(
        "processes",
        sorted(snapshot.processes, key=lambda p: (order.get(p.role, 9), p.worker)),
        {
            "process": lambda p: f"{p.worker} ({p.host})" if len(hosts) > 1 else p.worker,
            "state": lambda p: Text(p.state, _STATE_STYLES.get(p.state, "")) if p.alive else "dead",
            ">version": lambda p: "-" if p.policy_version < 0 else str(p.policy_version),
            "load": _gauges,
            "waits for": lambda p: (
                f"{p.waiting_for} ({p.waiting_s:.0f} s)" if p.waiting_for else ""
            ),
            ">heard": lambda p: f"{p.heartbeat_age_s:.0f} s",
        },
        style=lambda p: "" if p.alive else "red",
    )


def _gauges(process: ProcessView) -> str:
    gauges = process.gauges
    names = [name for name in _GAUGES.get(process.role, ()) if name in gauges]
    shown = [f"{name} {gauges[name]:.4g}" for name in names if gauges[name] or name not in _TROUBLE]
    if asked := gauges.get("prompt_tokens"):
        shown.append(f"prompts {gauges.get('cached_tokens', 0.0) / asked:.0%} cached")
    return ", ".join(shown)


def _utilisation(snapshot: Snapshot) -> Table:
    """A bar of the last minute for each role, its phases beside it; the queues."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for role, usage in sorted(snapshot.usage.items()):
        table.add_row(Text(role, "bold"), _bar(usage), Columns(_legend(usage), padding=(0, 2)))
    queues = snapshot.queues
    waiting = [
        f"{queues.in_flight} requests decoded, {queues.waiting} wait",
        f"{queues.leases} trajectories in play, {queues.free_slots} slots wait",
        f"{snapshot.rates.steps / 60:.1f} steps/s",
    ]
    table.add_row(Text("queues", "bold"), "", "\n".join(waiting))
    return table


def _bar(usage: UsageView) -> Text:
    """The minute in _BAR_CELLS cells, each phase as many as its share of the time."""
    parts = _shares(usage.minute)
    ends = [round(_BAR_CELLS * each) for each in accumulate(parts.values(), initial=0.0)]
    bar = Text()
    for phase, (begin, end) in zip(parts, pairwise(ends), strict=True):
        block, style = _PHASES.get(phase, ("·", ""))
        bar.append(block * (end - begin), style)
    return bar


def _legend(usage: UsageView) -> list[Text]:
    """The phases with their shares; of the first that of the whole run, too."""
    entries = []
    for phase, share in _shares(usage.minute).items():
        if share >= _LEAST_SHARE:
            entries.append(Text.assemble(_PHASES.get(phase, ("·", "")), f" {phase} {share:.0%}"))
            if len(entries) == 1:
                run = _shares(usage.total).get(phase, 0.0)
                entries[0].append(f" (run {run:.0%})", "bright_black")
    return entries


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Phase -> fraction of all seconds, in a bar's order; empty where there are none."""
    total, order = sum(seconds.values()), [*_PHASES, *seconds]
    known = sorted(seconds, key=order.index)
    return {phase: seconds[phase] / total for phase in known} if total > 0 else {}


def _syncs(snapshot: Snapshot) -> Table:
    """Each rollout worker's newest weights and what taking them cost."""
    newest = sorted(snapshot.syncs, key=lambda sync: sync.done_at, reverse=True)
    table = table_of(
        "weights taken",
        newest[:_MAX_SYNCS],
        {
            "worker": lambda sync: sync.worker,
            ">version": lambda sync: str(sync.policy_version),
            ">ago": lambda sync: _short(max(snapshot.now - sync.done_at, 0.0)),
            ">waited": lambda sync: _short(sync.waited_s),
            ">transfer": lambda sync: _short(sync.transfer_s),
            ">pause": lambda sync: _short(sync.pause_s),
            ">in flight": lambda sync: str(sync.in_flight),
            ">syncs": lambda sync: str(sync.syncs) + (f", {sync.refused} bad" * (sync.refused > 0)),
        },
        style=lambda sync: "red" if sync.error else "",
    )
    if len(newest) > _MAX_SYNCS:
        table.add_row(f"and {len(newest) - _MAX_SYNCS} more, longer ago", style="bright_black")
    return table


def _short(seconds: float) -> str:
    """Seconds in three characters and a unit: `3 ms`, `0.42 s`, `12 s`, `3 min`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


# --- what came of it -------------------------------------------------------------------------


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = page_table(title, "name", "value", right=("value",))
    table.show_header, table.box, table.columns[0].style = False, None, "bright_black"
    for row in rows:
        table.add_row(*row)
    return table


def _pipeline(snapshot: Snapshot) -> Table:
    groups, replays = snapshot.groups, snapshot.replays
    rows = [
        ("groups open", f"{groups.open} of {groups.limit}"),
        ("groups ready", str(groups.ready)),
        ("groups in a batch", str(groups.batched)),
        ("groups trained", str(groups.trained)),
        *((f"groups dropped: {why}", str(n)) for why, n in sorted(groups.dropped.items())),
    ]
    if groups.pool:
        rows.append(("successes in the pool", str(groups.pool)))
    if replays.updates or replays.refused:
        rows.append(("updates on a batch again", f"{replays.updates} of {snapshot.updates}"))
        rows += [(f"  not again: {why}", str(n)) for why, n in sorted(replays.refused.items())]
    for state, number in sorted(snapshot.trajectories.items()):
        rows.append((f"trajectories {state}", str(number)))
        if state == "dropped":
            rows += [(f"  {why}", str(n)) for why, n in sorted(snapshot.dropped.items())]
    return _pairs("pipeline", rows)


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
    names = [name for name in METRICS if name in snapshot.metrics]
    names += sorted(set(snapshot.metrics) - set(names))
    rows = []
    for name in names[:_MAX_METRICS]:
        curve = sparkline(snapshot.metric_curves.get(name, [])[-16:])
        rows.append((name, f"{snapshot.metrics[name]:.4g} {curve}"))
    return _pairs("training", rows or [("no update yet", "")])


def _tasks(snapshot: Snapshot) -> Table:
    columns: dict[str, Callable[[TaskView], RenderableType]] = {
        "task": lambda task: task.task_id,
        ">reward": lambda task: fraction(task.reward),
        ">success": lambda task: fraction(task.success),
        # A curve may hold spaces; it must not be broken there.
        "over versions": lambda task: Text(sparkline(task.curve[-30:], 0, 1), no_wrap=True),
        ">trajectories": lambda task: str(task.trajectories),
        ">invalid": lambda task: Text(_invalid(task), "yellow" if task.invalid else ""),
        ">played next": lambda task: f"{task.weight:.0%}",
    }
    if not _is_partial(snapshot):
        del columns[">reward"]
    return table_of("tasks", snapshot.tasks, columns)


def _invalid(task: TaskView) -> str:
    share = task.invalid_share or 0.0
    return f"{task.invalid} ({share:.0%})" if share >= 0.01 else str(task.invalid)


# --- judges ----------------------------------------------------------------------------------


def judge_lines(judge: JudgeView) -> list[str]:
    """What it decided, how far it agrees with the evaluators, what it cost."""
    name, lines = f"judge {judge.judge}", []
    if judge.verdicts:
        said = ", ".join(
            f"{judge.verdicts.get(outcome, 0)} {outcome}" for outcome in ("pass", "fail", "invalid")
        )
        lines.append(
            f"{name} gave the verdict of {sum(judge.verdicts.values())} trajectories "
            f"of tasks without an evaluator: {said}"
        )
    found = _agreement(judge)
    if found.n and found.share is not None:
        low, high = found.share_interval
        kappa = "kappa undefined, both say the same of all"
        if found.kappa is not None and (interval := found.kappa_interval) is not None:
            kappa = f"kappa {found.kappa:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
        lines.append(
            f"{name} beside the evaluators, n = {found.n}: agree {found.share:.2f} "
            f"[{low:.2f}, {high:.2f}], {kappa}; both pass {found.both_pass}, both fail {found.both_fail}, "
            f"the judge passes what the evaluator fails {found.judge_alone}, the reverse "
            f"{found.evaluator_alone}"
        )
    each_s = judge.seconds / judge.judged if judge.judged else 0.0
    without = f"; {judge.unanswered} without an answer" if judge.unanswered else ""
    lines.append(
        f"{name}: {judge.judged} trajectories, {judge.calls} calls, {judge.prompt_tokens} + "
        f"{judge.completion_tokens} tokens, {each_s:.1f} s each{without}"
    )
    return lines


def judge_json(judge: JudgeView) -> dict[str, Any]:
    """With the agreement and its 95 % intervals."""
    found = _agreement(judge)
    return judge.model_dump() | {
        "n": found.n,
        "agreement": found.share,
        "agreement_interval": list(found.share_interval),
        "kappa": found.kappa,
        "kappa_interval": None if found.kappa_interval is None else list(found.kappa_interval),
    }


def _agreement(judge: JudgeView) -> Agreement:
    """Over the trajectories of which judge and evaluator have an opinion."""
    return Agreement(judge.both_pass, judge.both_fail, judge.judge_alone, judge.evaluator_alone)

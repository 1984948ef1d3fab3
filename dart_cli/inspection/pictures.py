"""A run as pictures by Matplotlib: what curation decided, `dart data draw`, and the report's curve.

draw_curve     success by task over policy versions, held-out success at both ends
draw_all       the pictures below as PNG files in a folder
fates.png      each group in the order of opening: its outcome, by task
sizes.png      how many trajectories groups got, and what success their task had; if sizes differ
lengths.png    steps of trajectories under the cap of their task
entropies.png  which steps were trained on, by their mean token entropy

group_outcome      the outcome of one group
draw_lengths       one of the pictures
success_averages   the moving average of its task's success when each group was opened
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from bus.errors import UserError
from dart_cli.algo.task_sampling import MovingAverage
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CurvePoint, GroupRow, SampleRow, TrajectoryRow
from dart_cli.evaluation.results import Evaluation
from dart_cli.inspection.curves import over_tasks, success_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# They can be told apart with any colour vision: six of Okabe and Ito (Color Universal Design, 2008), their
# yellow replaced by wine red, which is visible on white.
BLUE, ORANGE, GREEN, PINK, RED, WINE = (
    *("#0072b2", "#e69f00", "#009e73"),
    *("#cc79a7", "#d55e00", "#882255"),
)
SKY = "#56b4e9"
GREY, INK = "#6b7280", "#111827"
COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, WINE)
"""In the order in which lines get them; `view.css` has them as --v0 to --v5."""

GroupOutcome = Literal["mixed", "baseline", "pool", "all_success", "all_fail", "other"]

_LABELS: dict[GroupOutcome, tuple[str, str]] = {
    "mixed": ("trained on: successes and failures", BLUE),
    "baseline": ("trained on: one trajectory, compared with earlier ones", SKY),
    "pool": ("trained on: all failed, a success of the pool joined", PINK),
    "all_success": ("dropped: all passed", GREEN),
    "all_fail": ("dropped: all failed", GREY),
    "other": ("dropped: stale, too few valid, ...", ORANGE),
}
_TRAINED: tuple[GroupOutcome, ...] = ("mixed", "baseline", "pool")

_AXIS_POINTS = 600  # about the width of the axis of groups, in points
MOST_TASKS = 24
"""Rows of a picture by task; of more tasks those with the most groups are drawn."""
MOST_PANELS = 12
"""Of the picture of lengths; of more tasks those with the highest step limit are drawn."""


def draw_all(reader: Reader, folder: Path) -> list[Path]:
    """Write the pictures of a run into `folder`, made if it does not exist; returns their paths.

    Raises UserError for a run without a finished group, or a folder that cannot be written.
    """
    from matplotlib.figure import Figure

    trajectories = reader.trajectories()
    groups = reader.groups()  # after them: a live run opens more, and each has its group then
    if all(group_outcome(group) is None for group in groups):
        raise UserError(f"{reader.path}: no group is over yet, there is nothing to draw")
    fresh = [batch for batch in reader.batches() if batch.replay_of is None]
    samples = [row for batch in fresh for row in reader.batch_rows(batch.id)]
    pictures: dict[str, Callable[[Figure], None]] = {
        "fates": lambda figure: _outcomes(figure, groups),
        "lengths": lambda figure: draw_lengths(figure, groups, trajectories),
        "entropies": lambda figure: _entropies(figure, samples),
    }
    if len({group.size for group in groups}) > 1:
        pictures["sizes"] = lambda figure: _sizes(figure, groups, trajectories)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in pictures.items():
            figure = Figure(layout="constrained", dpi=110)
            draw(figure)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1])
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    return paths


def group_outcome(group: GroupRow) -> GroupOutcome | None:
    """Return the outcome of a group; None while it plays or waits."""
    if group.state in ("batched", "trained"):
        if group.pool_member is not None:
            return "pool"
        return "baseline" if group.size == 1 else "mixed"
    if group.state != "dropped":
        return None
    if group.reason == "all_success":
        return "all_success"
    return "all_fail" if group.reason == "all_fail" else "other"


def success_averages(
    groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> dict[str, float | None]:
    """Group id -> moving average of its task's success when it was opened; None before a verdict.

    Computed again from all groups and trajectories of the run; none may be missing.
    """
    task_of = {group.id: group.task_id for group in groups}
    verdicts = sorted(
        (row.ended_at, row.id, row.group_id, float(row.outcome == "pass"))
        for row in trajectories
        if row.ended_at is not None and row.counted
    )
    averages: dict[str, MovingAverage] = defaultdict(MovingAverage)
    found: dict[str, float | None] = {}
    seen = 0
    for group in sorted(groups, key=lambda each: each.number):
        while seen < len(verdicts) and verdicts[seen][0] <= group.opened_at:
            _, _, group_id, passed = verdicts[seen]
            task_id = task_of[group_id]
            averages[task_id] = averages[task_id].add(passed)
            seen += 1
        found[group.id] = averages[group.task_id].value
    return found


# --- the curve -------------------------------------------------------------------------------


def draw_curve(
    path: Path,
    points: Sequence[CurvePoint],
    ends: Sequence[Evaluation | None],
    began_at: float,
) -> Path:
    """Success while training by policy version, a line for each task, minutes on the upper axis.

    The thick line is the mean over tasks with its 95 % interval. `ends` are the evaluations before and
    after, drawn at the versions they played, with the 95 % intervals of their sampled episodes; the
    dashed line is what random clicks passed. `began_at` is when the run began, unix seconds.
    """
    from matplotlib.figure import Figure

    styles: dict[str, dict[str, Any]] = {
        "task": {"linewidth": 1},
        "mean": {"linewidth": 2.5, "color": "black"},
        "guess": {"linewidth": 1, "color": "gray", "linestyle": "--"},
    }
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for line in success_lines(points, ends[0]):
        versions, success = [x for x, _ in line.points], [y for _, y in line.points]
        marker = "." if len(line.points) == 1 else ""
        axes.plot(versions, success, label=line.name, marker=marker, **styles[line.kind])
        low, high = [low for low, _ in line.band], [high for _, high in line.band]
        axes.fill_between(versions[: len(low)], low, high, color="black", alpha=0.15, linewidth=0)
    for evaluation in filter(None, ends):
        mode = evaluation.modes.get("sampled")
        if mode is None or mode.overall.success is None:
            continue
        whole, rate = mode.overall, mode.overall.success
        at = max(evaluation.policy_version, 0)  # -1 is the model as it comes, which v0 serves
        errors = [[rate - whole.interval[0]], [whole.interval[1] - rate]]
        label = f"held out {evaluation.name}: {rate:.2f}, n {whole.episodes}"
        axes.errorbar([at], [rate], errors, fmt="o", capsize=4, label=label)
    axes.set(xlabel="policy version", ylabel="success", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    over = over_tasks(points)
    marks = over[:: max(1, len(over) // 6)]
    clock, minutes = axes.secondary_xaxis("top"), [(e.ended_at - began_at) / 60 for e in marks]
    clock.set_xticks([point.version for point in marks], [f"{each:.1f}" for each in minutes])
    clock.set_xlabel("minutes")
    figure.savefig(path, dpi=120)
    return path


# --- what curation decided -------------------------------------------------------------------


def _outcomes(figure: Figure, groups: Sequence[GroupRow]) -> None:
    most = Counter(group.task_id for group in groups).most_common(MOST_TASKS)
    tasks = {task: row for row, task in enumerate(sorted(task for task, _ in most))}
    figure.set_size_inches(11, 1.6 + 0.32 * len(tasks))
    axes = figure.subplots()
    _plain(axes)
    # A mark is thinner than the distance of two groups of a task, so that none hides another.
    width = min(2.5, max(0.4, 0.5 * _AXIS_POINTS * len(tasks) / max(1, len(groups))))
    counts = Counter(map(group_outcome, groups))
    for kind, (label, colour) in _LABELS.items():
        marked = [g for g in groups if group_outcome(g) == kind and g.task_id in tasks]
        if marked:
            axes.scatter(
                [group.number for group in marked],
                [tasks[group.task_id] + (-0.15 if kind in _TRAINED else 0.15) for group in marked],
                marker="|",
                s=65,
                linewidths=width,
                color=colour,
                label=f"{label} ({counts[kind]})",
            )
    axes.set_yticks(list(tasks.values()), list(tasks), fontsize=8)
    axes.invert_yaxis()
    label = "groups, in the order they were opened; above: trained on, below: dropped"
    if (played := len({group.task_id for group in groups})) > len(tasks):
        label += f"; {len(tasks)} of {played} tasks, those with the most groups"
    axes.set_xlabel(label)
    legend = figure.legend(loc="outside upper left", ncols=2, fontsize=8, frameon=False)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_linewidth(3)  # type: ignore[attr-defined]


def _sizes(
    figure: Figure, groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> None:
    figure.set_size_inches(11, 3.8)
    left, right = figure.subplots(1, 2)
    averages = success_averages(groups, trajectories)
    known = [(average, group) for group in groups if (average := averages[group.id]) is not None]
    _dots(left, ((round(average, 2), group.size) for average, group in known), BLUE)
    left.set(xlabel="success of the task when the group was opened", ylabel="its trajectories")
    width = max(1, len(groups) // 40)
    parts = [groups[start : start + width] for start in range(0, len(groups), width)]
    trained = [[group for group in part if group_outcome(group) in _TRAINED] for part in parts]
    for label, colour, chosen in (("all groups", GREY, parts), ("trained on", BLUE, trained)):
        points = [(part[0].number, mean(group.size for group in part)) for part in chosen if part]
        right.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label)
    right.set(xlabel="groups, in the order they were opened", ylabel="mean size")
    right.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in (left, right):
        axes.set_ylim(0, max(group.size for group in groups) + 1)
    _plain(left, right)


def draw_lengths(
    figure: Figure, groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> None:
    """Draw trajectories' steps under the limit of their task, a panel for each of MOST_PANELS tasks."""
    by_id = {group.id: group for group in groups}
    tasks: dict[str, list[TrajectoryRow]] = defaultdict(list)
    for row in trajectories:
        if row.steps is not None and row.outcome in ("pass", "fail"):
            tasks[by_id[row.group_id].task_id].append(row)
    longest = sorted(tasks, key=lambda task: -max(row.max_steps or 0 for row in tasks[task]))
    shown = longest[:MOST_PANELS]
    columns = min(3, len(shown)) or 1
    rows_of = -(-len(shown) // columns) or 1
    figure.set_size_inches(3.9 * columns, 2.6 * rows_of)
    panels = figure.subplots(rows_of, columns, squeeze=False).flatten()
    for panel, task in zip(panels, shown, strict=False):
        played = sorted(tasks[task], key=lambda row: by_id[row.group_id].number)
        for outcome, colour in (("fail", RED), ("pass", BLUE)):
            ended = [row for row in played if row.outcome == outcome]
            _dots(
                panel, ((by_id[row.group_id].number, row.steps) for row in ended), colour, outcome
            )
        caps = {by_id[row.group_id].number: row.max_steps for row in played if row.max_steps}
        panel.step(list(caps), list(caps.values()), where="post", color=INK, label="cap")
        panel.set_title(task, loc="left", fontsize=8)
        panel.set_ylim(0, max([*caps.values(), *(row.steps or 0 for row in played)]) + 1)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    figure.supxlabel("groups", fontsize=8)
    figure.supylabel("steps", fontsize=8)
    if len(longest) > len(shown):
        told = f"{len(shown)} of {len(longest)} tasks, those with the highest step limit"
        figure.suptitle(told, fontsize=8)
    panels[0].legend(fontsize=7, frameon=False, loc="lower left")
    _plain(*panels)


def _entropies(figure: Figure, samples: Sequence[SampleRow]) -> None:
    figure.set_size_inches(11, 3.6)
    left, right = figure.subplots(1, 2)
    known = [row for row in samples if row.entropy is not None]
    parts = [[row for row in known if row.weight], [row for row in known if not row.weight]]
    names = [f"trained on ({len(parts[0])})", f"left out ({len(parts[1])})"]
    colours = [BLUE, "#d1d5db"]
    entropies = [[row.entropy for row in rows] for rows in parts]
    left.hist(entropies, bins=40, stacked=True, color=colours, label=names)
    left.set(xlabel="mean token entropy of the step, nats", ylabel="steps")
    left.legend(fontsize=8, frameon=False)
    steps = [[row.step for row in rows] for rows in parts]
    last = max((row.step for row in known), default=0)
    right.hist(steps, range(last + 2), align="left", rwidth=0.8, stacked=True, color=colours)
    right.set_xlabel("step of its trajectory")
    _plain(left, right)


def _dots(
    axes: Axes, places: Iterable[tuple[float, float | None]], colour: str, label: str = ""
) -> None:
    """Draw a dot for each place, the larger the more often it is there."""
    counts = Counter(places)
    if counts:
        xs, ys = zip(*counts, strict=True)
        sizes = [5 + 4 * number for number in counts.values()]
        axes.scatter(xs, ys, s=sizes, alpha=0.4, linewidths=0, color=colour, label=label)


def _plain(*axes: Axes) -> None:
    for each in axes:
        each.grid(alpha=0.25)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)

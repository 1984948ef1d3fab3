"""Pictures of a run by Matplotlib: `dart data draw`, and the report's curve.

draw_curve         draws success by task over policy versions, with held-out success at both ends
draw_all           draws the pictures below as PNG files in a folder
  fates.png        the outcome of each group in the order of opening, by task
  sizes.png        the size of groups, by the success of their task; only if sizes differ
  lengths.png      the steps of trajectories under the step limit of their task
  entropies.png    which steps were trained on, by their mean token entropy
draw_lengths       draws the panels of lengths.png
group_outcome      the outcome of one group
success_averages   for each group the moving average of its task's success when it was opened
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

# These can be told apart with any colour vision: six colours of Okabe and Ito (Color Universal Design, 2008),
# with wine red in place of their yellow, which is hardly visible on white.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
PINK = "#cc79a7"
RED = "#d55e00"
WINE = "#882255"
SKY = "#56b4e9"
GREY, INK = "#6b7280", "#111827"
COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, WINE)
"""The colours of lines, in the order in which they are assigned; `view.css` has them as --v0 to --v5."""

GroupOutcome = Literal["mixed", "baseline", "pool", "teacher", "all_success", "all_fail", "other"]

_LABELS: dict[GroupOutcome, tuple[str, str]] = {
    "mixed": ("trained on: successes and failures", BLUE),
    "baseline": ("trained on: one trajectory, compared with earlier ones", SKY),
    "pool": ("trained on: all failed, a success of the pool joined", PINK),
    "teacher": ("trained on: equal rewards, a teacher scores the tokens", WINE),
    "all_success": ("dropped: all passed", GREEN),
    "all_fail": ("dropped: all failed", GREY),
    "other": ("dropped: stale, too few valid, ...", ORANGE),
}
_TRAINED: tuple[GroupOutcome, ...] = ("mixed", "baseline", "pool", "teacher")

_AXIS_POINTS = 600  # approximate width of the axis of groups, in points
MOST_TASKS = 24
"""Tasks in a picture by task, at most; if there are more, the tasks with the most groups are drawn."""
MOST_PANELS = 12
"""Panels of lengths.png, at most; if there are more tasks, those with the highest step limit are drawn."""


def draw_all(reader: Reader, folder: Path) -> list[Path]:
    """Write the pictures of a run into `folder`, which is created if necessary, and return their paths.

    Raises UserError if the run has no finished group, or if the folder cannot be written.
    """
    from matplotlib.figure import Figure

    trajectories = reader.trajectories()
    # Groups are read last: a live run adds more, and so each trajectory has its group.
    groups = reader.groups()
    if all(group_outcome(group) is None for group in groups):
        raise UserError(f"{reader.path}: no group is over yet, there is nothing to draw")
    new_batches = [batch for batch in reader.batches() if batch.replay_of is None]
    samples = [row for batch in new_batches for row in reader.batch_rows(batch.id)]
    pictures: dict[str, Callable[[Figure], None]] = {
        "fates": lambda figure: _draw_outcomes(figure, groups),
        "lengths": lambda figure: draw_lengths(figure, groups, trajectories),
        "entropies": lambda figure: _draw_entropies(figure, samples),
    }
    if len({group.size for group in groups}) > 1:
        pictures["sizes"] = lambda figure: _draw_sizes(figure, groups, trajectories)
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
    """Return the outcome of a group; None while it is played or waits."""
    if group.state in ("batched", "trained"):
        if group.pool_member is not None:
            return "pool"
        if group.reason:
            return "teacher"
        return "baseline" if group.size == 1 else "mixed"
    if group.state != "dropped":
        return None
    if group.reason == "all_success":
        return "all_success"
    return "all_fail" if group.reason == "all_fail" else "other"


def success_averages(
    groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> dict[str, float | None]:
    """Return group id -> the moving average of its task's success when the group was opened.

    It is None before the first verdict of the task. `groups` and `trajectories` must be all of the run.
    """
    task_of = {group.id: group.task_id for group in groups}
    verdicts = sorted(
        (row.ended_at, row.id, row.group_id, float(row.outcome == "pass"))
        for row in trajectories
        if row.ended_at is not None and row.counted
    )
    averages: dict[str, MovingAverage] = defaultdict(MovingAverage)
    at_opening: dict[str, float | None] = {}
    counted = 0  # verdicts that are in the averages
    for group in sorted(groups, key=lambda group: group.number):
        while counted < len(verdicts) and verdicts[counted][0] <= group.opened_at:
            _, _, group_id, passed = verdicts[counted]
            task_id = task_of[group_id]
            averages[task_id] = averages[task_id].add(passed)
            counted += 1
        at_opening[group.id] = averages[group.task_id].value
    return at_opening


# --- the curve -------------------------------------------------------------------------------


def draw_curve(
    path: Path,
    points: Sequence[CurvePoint],
    ends: Sequence[Evaluation | None],
    began_at: float,
) -> Path:
    """Draw success while training over policy versions, and return `path`.

    Each task has a line; the thick line is the mean over tasks with its 95 % interval; the dashed line is the
    success of random clicks. `ends` are the evaluations before and after the run; they are drawn at the
    versions that they played, with the 95 % intervals of their sampled episodes. The upper axis has minutes
    since `began_at`, unix seconds.
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
        version = max(evaluation.policy_version, 0)  # -1 is the initial model, which is version 0
        errors = [[rate - whole.interval[0]], [whole.interval[1] - rate]]
        label = f"held out {evaluation.name}: {rate:.2f}, n {whole.episodes}"
        axes.errorbar([version], [rate], errors, fmt="o", capsize=4, label=label)
    axes.set(xlabel="policy version", ylabel="success", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    over = over_tasks(points)
    marks = over[:: max(1, len(over) // 6)]
    clock, minutes = (
        axes.secondary_xaxis("top"),
        [(point.ended_at - began_at) / 60 for point in marks],
    )
    clock.set_xticks([point.version for point in marks], [f"{minute:.1f}" for minute in minutes])
    clock.set_xlabel("minutes")
    figure.savefig(path, dpi=120)
    return path


# --- what curation decided -------------------------------------------------------------------


def _draw_outcomes(figure: Figure, groups: Sequence[GroupRow]) -> None:
    """Draw a mark for each group that is over, by task and in the colour of its outcome."""
    commonest = Counter(group.task_id for group in groups).most_common(MOST_TASKS)
    tasks = {task: row for row, task in enumerate(sorted(task for task, _ in commonest))}
    figure.set_size_inches(11, 1.6 + 0.32 * len(tasks))
    axes = figure.subplots()
    _plain(axes)
    # A mark is thinner than the distance between two groups of a task, so that none hides another.
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
    if (all_tasks := len({group.task_id for group in groups})) > len(tasks):
        label += f"; {len(tasks)} of {all_tasks} tasks, those with the most groups"
    axes.set_xlabel(label)
    legend = figure.legend(loc="outside upper left", ncols=2, fontsize=8, frameon=False)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_linewidth(3)  # type: ignore[attr-defined]


def _draw_sizes(
    figure: Figure, groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> None:
    """Draw the sizes of groups: by the success of their task, and over the run."""
    figure.set_size_inches(11, 3.8)
    left, right = figure.subplots(1, 2)
    averages = success_averages(groups, trajectories)
    sizes = [
        (round(average, 2), group.size)
        for group in groups
        if (average := averages[group.id]) is not None
    ]
    _draw_dots(left, sizes, BLUE)
    left.set(xlabel="success of the task when the group was opened", ylabel="its trajectories")
    width = max(1, len(groups) // 40)
    parts = [groups[start : start + width] for start in range(0, len(groups), width)]
    trained = [[group for group in part if group_outcome(group) in _TRAINED] for part in parts]
    for label, colour, lines in (("all groups", GREY, parts), ("trained on", BLUE, trained)):
        points = [(part[0].number, mean(group.size for group in part)) for part in lines if part]
        right.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label)
    right.set(xlabel="groups, in the order they were opened", ylabel="mean size")
    right.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in (left, right):
        axes.set_ylim(0, max(group.size for group in groups) + 1)
    _plain(left, right)


def draw_lengths(
    figure: Figure, groups: Sequence[GroupRow], trajectories: Sequence[TrajectoryRow]
) -> None:
    """Draw the steps of trajectories under the limit of their task: a panel for each of MOST_PANELS tasks."""
    by_id = {group.id: group for group in groups}
    tasks: dict[str, list[TrajectoryRow]] = defaultdict(list)
    for row in trajectories:
        if row.steps is not None and row.outcome in ("pass", "fail"):
            tasks[by_id[row.group_id].task_id].append(row)
    longest = sorted(tasks, key=lambda task: -max(row.max_steps or 0 for row in tasks[task]))
    with_panel = longest[:MOST_PANELS]
    columns = min(3, len(with_panel)) or 1
    panel_rows = -(-len(with_panel) // columns) or 1
    figure.set_size_inches(3.9 * columns, 2.6 * panel_rows)
    panels = figure.subplots(panel_rows, columns, squeeze=False).flatten()
    for panel, task in zip(panels, with_panel, strict=False):
        rows = sorted(tasks[task], key=lambda row: by_id[row.group_id].number)
        for outcome, colour in (("fail", RED), ("pass", BLUE)):
            lengths = [
                (by_id[row.group_id].number, row.steps) for row in rows if row.outcome == outcome
            ]
            _draw_dots(panel, lengths, colour, outcome)
        caps = {by_id[row.group_id].number: row.max_steps for row in rows if row.max_steps}
        panel.step(list(caps), list(caps.values()), where="post", color=INK, label="limit")
        panel.set_title(task, loc="left", fontsize=8)
        panel.set_ylim(0, max([*caps.values(), *(row.steps or 0 for row in rows)]) + 1)
    for panel in panels[len(with_panel) :]:
        panel.set_visible(False)
    figure.supxlabel("groups", fontsize=8)
    figure.supylabel("steps", fontsize=8)
    if len(longest) > len(with_panel):
        title = f"{len(with_panel)} of {len(longest)} tasks, those with the highest step limit"
        figure.suptitle(title, fontsize=8)
    panels[0].legend(fontsize=7, frameon=False, loc="lower left")
    _plain(*panels)


def _draw_entropies(figure: Figure, samples: Sequence[SampleRow]) -> None:
    """Draw histograms of the steps that were trained on or left out: by entropy, and by step."""
    figure.set_size_inches(11, 3.6)
    left, right = figure.subplots(1, 2)
    samples = [row for row in samples if row.entropy is not None]
    parts = [[row for row in samples if row.weight], [row for row in samples if not row.weight]]
    names = [f"trained on ({len(parts[0])})", f"left out ({len(parts[1])})"]
    colours = [BLUE, "#d1d5db"]
    entropies = [[row.entropy for row in rows] for rows in parts]
    left.hist(entropies, bins=40, stacked=True, color=colours, label=names)
    left.set(xlabel="mean token entropy of the step, nats", ylabel="steps")
    left.legend(fontsize=8, frameon=False)
    steps = [[row.step for row in rows] for rows in parts]
    last = max((row.step for row in samples), default=0)
    right.hist(steps, range(last + 2), align="left", rwidth=0.8, stacked=True, color=colours)
    right.set_xlabel("step of its trajectory")
    _plain(left, right)


def _draw_dots(
    axes: Axes, places: Iterable[tuple[float, float | None]], colour: str, label: str = ""
) -> None:
    """Draw a dot for each place, the larger the more often the place occurs."""
    counts = Counter(places)
    if counts:
        xs, ys = zip(*counts, strict=True)
        sizes = [5 + 4 * number for number in counts.values()]
        axes.scatter(xs, ys, s=sizes, alpha=0.4, linewidths=0, color=colour, label=label)


def _plain(*all_axes: Axes) -> None:
    """Give axes a grid, and no frame at the top and on the right."""
    for axes in all_axes:
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

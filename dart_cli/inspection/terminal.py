"""Prints the read model of a run on a terminal: `dart data ls`, `show`, `why` and `stats`.

print_list         prints trajectories, or members of the pool, as a table
print_trajectory   prints one trajectory with its steps
print_events       prints the history of one trajectory
print_counts       prints how much the run holds of everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bus.snapshot import JudgeView
from dart_cli.data.stalls import INVALID_SHARE, TELLING_INVALID
from dart_cli.data.store.rows import SizesRow, TrajectoryRow
from dart_cli.inspection.run_counts import RunCounts, StateCount, counts_of, unaccounted
from dart_cli.inspection.trajectories import (
    CANCELLED,
    Step,
    Subject,
    TrajectoryDetails,
    patch_words,
)
from dart_cli.inspection.trajectory_history import Event
from dart_cli.runtime.tables import (
    fraction,
    moment,
    or_dash,
    table_of,
    verdict_words,
    versions,
)
from dart_cli.status.judges import judge_lines

_TEXT_LINES = 12
"""Lines of the text beside a screenshot that are printed, at most."""
_MIB = 2**20


# --- lists -----------------------------------------------------------------------------------


def print_list(
    console: Console, place: str, rows: Sequence[Subject], limit: int, *, pool: bool
) -> None:
    """Print the newest `limit` rows as a table, and a line below it if there are more."""
    newest = rows[-limit:]
    table = _pool_table(place, newest) if pool else _trajectory_table(place, newest)
    console.print(table)
    if len(rows) > limit:
        console.print(f"these are the newest {limit} that match; --limit shows more")
    if not rows:
        empty = "the pool is empty; `dart data collect` and `dart data import` fill it"
        console.print(empty if pool else "no trajectory matches")


def left_out_note(count: int) -> str:
    """Return how many cancelled trajectories are left out, and the option that lists them; empty for 0."""
    nouns, are = ("trajectory", "is") if count == 1 else ("trajectories", "are")
    note = f"{count} cancelled {nouns} that the end of the run cut off {are} left out"
    return f"{note}; --reason {CANCELLED} lists them" if count else ""


def _trajectory_table(place: str, subjects: Sequence[Subject]) -> Table:
    """Return a table of trajectories of the run."""
    task_of = {subject.id: subject.task_id for subject in subjects}
    return table_of(
        place,
        [subject.trajectory for subject in subjects if subject.trajectory is not None],
        {
            "trajectory": lambda row: row.id,
            "task": lambda row: task_of[row.id],
            "state": _state_text,
            "outcome": lambda row: verdict_words(row.outcome, row.reward) if row.outcome else "-",
            ">steps": lambda row: or_dash(row.steps),
            ">version": lambda row: versions(row.oldest_version, row.newest_version),
            ">seconds": lambda row: or_dash(row.wall_s, ".1f"),
        },
    )


def _state_text(row: TrajectoryRow) -> str:
    """Return the state of a trajectory, with the reason why it was dropped and its batch."""
    batch = "" if row.batch_id is None else f"in {row.batch_id}"
    return " ".join(filter(None, (row.state, row.reason, batch)))


def _pool_table(place: str, subjects: Sequence[Subject]) -> Table:
    """Return a table of members of the pool."""
    return table_of(
        f"pool of {place}",
        [subject.pool for subject in subjects if subject.pool is not None],
        {
            "trajectory": lambda row: row.trajectory_id[:13],
            "task": lambda row: row.task_id,
            "source": lambda row: row.source,
            ">steps": lambda row: str(row.steps),
            "log-probs": lambda row: "known" if row.has_logprobs else "unknown",
            ">used": lambda row: str(row.used),
            "origin": lambda row: row.origin or "-",
            "since": lambda row: "evicted" if row.evicted_at else moment(row.added_at),
        },
    )


# --- one trajectory --------------------------------------------------------------------------


def print_trajectory(
    console: Console, place: str, details: TrajectoryDetails, events: Sequence[Event]
) -> None:
    """Print one trajectory: what happened to it as a whole, and a table of its steps."""
    steps = details.steps
    print_events(console, place, details, [event for event in events if not event.of_step])
    columns: dict[str, Callable[[Step], str]] = {
        ">step": lambda step: str(step.step),
        "text": lambda step: step.text,
        "action": lambda step: step.action_text,
        ">reward": lambda step: or_dash(step.reward, ".3g"),
        ">log-prob": lambda step: or_dash(step.logprob, ".3f"),
        ">entropy": lambda step: or_dash(step.entropy, ".3f"),
        ">version": lambda step: (
            versions(step.versions[0], step.versions[-1]) if step.versions else "-"
        ),
        ">model s": lambda step: f"{step.model_s:.3f}",
        ">env s": lambda step: f"{step.env_s:.3f}",
        "trained": _use_text,
    }
    # The shipped suites repeat the reward of the verdict at the last step, which is nothing new.
    if not any(step.reward for step in steps[:-1]):
        del columns[">reward"]
    console.print(table_of("steps", steps, columns))
    for step in steps:
        for patch in step.patches:
            console.print(f"step {step.step}, {patch_words(patch)}")
    for step in steps:
        if text := step.observed_text:
            console.print(f"step {step.step}, beside the screenshot ({len(text)} characters):")
            console.print(_first_lines(text), markup=False, soft_wrap=True)


def _use_text(step: Step) -> str:
    """Return how the newest batch with the step uses it."""
    if not step.uses:
        return "-"
    use = step.uses[-1]
    if use.weight == 0:
        return f"left out: {use.reason}"
    expected_reward = use.baseline if use.value is None else use.value
    expected = "" if expected_reward is None else f" (expected {expected_reward:.2f})"
    weight = "" if use.weight == 1 else f", weight {use.weight:.3g}"
    return f"advantage {use.trained_advantage:+.2f}{expected}{weight}"


def _first_lines(text: str) -> str:
    """Return the first lines of a text, indented."""
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]
    if len(lines) > _TEXT_LINES:
        lines[_TEXT_LINES:] = [f"... {len(lines) - _TEXT_LINES} more lines: --json"]
    return "\n".join(f"  {line}" for line in lines)


def print_events(
    console: Console, place: str, details: TrajectoryDetails, events: Sequence[Event]
) -> None:
    """Print a line for each event; an event that belongs to the one before it is indented."""
    subject = details.subject
    console.print(f"{subject.id}  {subject.task_id}, seed {subject.task_seed}  ({place})")
    if details.instruction:
        console.print(f'"{details.instruction}"', soft_wrap=True)
    for event in events:
        time = f"{moment(event.at)}  " if event.at is not None else " " * 24
        console.print(f"{time}{event.text}", soft_wrap=True)


# --- the run ---------------------------------------------------------------------------------


def print_counts(
    console: Console, place: str, counts: RunCounts, sizes: SizesRow, judges: Sequence[JudgeView]
) -> None:
    """Print the counts of a run as tables and lines."""
    console.print(_state_table("trajectories", counts.all.states, steps=True))
    console.print(_state_table("groups", counts.groups))
    console.print(_task_table(place, counts))
    for line in _invalid_hints(place, counts):
        console.print(line, style="yellow", soft_wrap=True)
    for line in _account_lines(counts):
        console.print(line, style="red" if line.startswith("error") else "", soft_wrap=True)
    for judge in judges:
        for line in judge_lines(judge):
            console.print(line, soft_wrap=True, markup=False)
    replays = counts.replays
    if replays.replays or replays.refused:
        refusals = f"; {replays.refused_words}" if replays.refused else ""
        text = f"{replays.replays} of {replays.updates} updates trained on a batch again"
        console.print(f"\n{text}{refusals}", soft_wrap=True)
    routing = ""
    if sizes.routing_bytes:
        routing = f"; choices of experts {sizes.routing_bytes / _MIB:.1f} MiB"
    console.print(
        f"\n{sizes.steps} steps, {sizes.tokens} tokens of completions "
        f"({sizes.step_bytes / _MIB:.1f} MiB); {sizes.screenshots} screenshots "
        f"({sizes.screenshot_bytes / _MIB:.1f} MiB){routing}; {counts.batches} batches; "
        f"{sizes.disk_bytes / _MIB:.1f} MiB on disk"
    )


def _state_table(title: str, rows: Sequence[StateCount], *, steps: bool = False) -> Table:
    """Return a table of counts by state and reason, on request with steps."""
    columns: dict[str, Callable[[StateCount], str]] = {
        "state": lambda row: row.state,
        "reason": lambda row: row.reason or "-",
        ">number": lambda row: str(row.number),
    }
    if steps:
        columns[">steps"] = lambda row: str(row.steps)
    return table_of(title, rows, columns)


def _account_lines(counts: RunCounts) -> Iterator[str]:
    """Yield the steps of trained trajectories that were left out, and an error for what does not add up."""
    if counts.left_out:
        yield f"steps of batches that were left out of training: {_number_list(counts.left_out)}"
    for line in unaccounted(counts.remainder):
        yield f"error: {line}: the run lost something without an error; keep its folder, and report it"


def _task_table(place: str, counts: RunCounts) -> Table:
    """Return a table of all tasks that the run or its pool has: success, verdicts, steps, pool."""
    nothing = counts_of([])
    tasks = {name: counts.tasks.get(name, nothing) for name in {*counts.tasks, *counts.pool}}
    columns: dict[str, Callable[[str], str]] = {
        "task": lambda name: name,
        ">success": lambda name: fraction(tasks[name].success),
        ">reward": lambda name: fraction(tasks[name].mean_reward),
        ">expected": lambda name: fraction(counts.expected.get(name, [None])[0]),
        ">pass": lambda name: str(tasks[name].verdicts["pass"]),
        ">fail": lambda name: str(tasks[name].verdicts["fail"]),
        ">invalid": lambda name: str(tasks[name].verdicts["invalid"]),
        ">mean steps": lambda name: or_dash(tasks[name].mean_steps, ".1f"),
        "pool": lambda name: _number_list(counts.pool.get(name, {})),
    }
    if not any(task.is_partial for task in tasks.values()):
        del columns[">reward"]
    if not counts.expected:
        del columns[">expected"]
    return table_of(f"tasks of {place}", sorted(tasks), columns)


def _number_list(numbers: Mapping[str, int]) -> str:
    """Return numbers with their names, e.g. `3 oracle, 5 run`; a dash if there are none."""
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items())) or "-"


def _invalid_hints(place: str, counts: RunCounts) -> Iterator[str]:
    """Yield a line with the fix for each task that has many invalid episodes."""
    for task, task_counts in counts.tasks.items():
        over, number = sum(task_counts.verdicts.values()), task_counts.verdicts["invalid"]
        if number >= TELLING_INVALID and number > INVALID_SHARE * over:
            yield (
                f"{number} of {over} episodes of {task} are invalid, {task_counts.invalid_after_action} of "
                f"them after an action, and none is trained on: `dart data ls {place} "
                f"--outcome invalid --task {task}` lists them; fix the environment, or raise "
                "ActionCausedError if the policy's action breaks it (docs/environments/index.md)"
            )

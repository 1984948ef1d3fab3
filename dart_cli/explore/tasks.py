"""Tasks from an exploration: reach a screen from a start, which the environment's own state confirms.

    make_tasks   the command `dart explore tasks`: writes the tasks of a graph
    candidates   a task for each screen that is reached by steps which always led to the same screen
    replayed     the seeds on which each task of a suite can be replayed
    goals_of     the possible goals of a screen, and the screens that fulfil each

Every candidate is replayed before it is written, by the place of each step and with the deadlines of a run.
Seeds on which the path does not lead to the screen are dropped. A task is dropped if no seed is left, or if
doing nothing or only claiming success passes it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import UserError
from dart_cli.env.async_env import AsyncEnv
from dart_cli.explore.graph import Edge, GraphReader, Screen, Start
from dart_cli.explore.options import TaskOptions
from dart_cli.explore.paths import paths_from, steady
from dart_cli.explore.phrasing import listed, names_of, spoken, title_of
from dart_cli.explore.rows import is_held_out
from dart_cli.player.episodes import env_of_suite, in_slots
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.tables import Advance, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.suite_check.probes import Probe, play_probe
from envs.contract.base import Task
from envs.contract.elements import performing
from envs.contract.registry import EXPLORED, load_suite
from envs.suites.explored.tasks import (
    FILE,
    ExploredFile,
    ExploredTask,
    LeftOut,
    PathStep,
    write_file,
)

MOST_NAMES = 2
"""The number of names in a goal, at most."""
CLAIMS: tuple[Probe, ...] = ("nothing", "done")
"""Probes that must not pass a task."""


def make_tasks(graph: GraphReader, out: Path, options: TaskOptions) -> dict[str, Any]:
    """Write the tasks of a graph that can be replayed; return numbers of what was written and left out.

    Raises UserError if no task is left, and TaskError or MissingPartError if the suite cannot be played.
    """
    settings = graph.settings()
    drafts, left_out = candidates(graph, options)
    file = ExploredFile(
        suite=settings["suite"],
        options=settings.get("options", {}),
        tasks=drafts[: options.limit] if options.limit else drafts,
    )
    with (
        tempfile.TemporaryDirectory() as draft,
        progress("replaying", len(file.tasks), "tasks") as advance,
    ):
        write_file(Path(draft), file)
        results: dict[str, tuple[list[int], str]] = {}
        waits = OpenWaits()

        async def replay() -> None:
            results.update(await replayed(f"{EXPLORED}:{draft}", options, advance, waits))

        if exit_code := run_until_stopped(replay(), waits, lambda: _say_stopped(out)):
            raise SystemExit(exit_code)
        load_suite.cache_clear()  # the suite of the draft, which is removed, must not be used again
    replayable = []
    for task in file.tasks:
        seeds, why = results[task.id]
        if seeds:
            replayable.append(task.model_copy(update={"seeds": seeds}))
        else:
            left_out.append(LeftOut(screen=task.targets[0], reason=why))
    if not replayable:
        why = "; ".join(f"{screen.screen[:8]}: {screen.reason}" for screen in left_out[:3])
        raise UserError(f"{graph.folder} gives no task ({why or 'no step led anywhere'})")
    write_file(out, file.model_copy(update={"tasks": replayable, "left_out": left_out}))
    return {
        "tasks": len(replayable),
        "suite": f"{EXPLORED}:{out}",
        "file": str(out / FILE),
        "replayed": f"{len(replayable)} of {len(file.tasks)}",
        "splits": dict(Counter(task.split for task in replayable)),
        "lengths": dict(sorted(Counter(len(task.path) for task in replayable).items())),
        "applications": dict(Counter(task.application for task in replayable)),
        "left_out": dict(Counter(screen.reason.partition(":")[0] for screen in left_out)),
    }


def candidates(
    graph: GraphReader, options: TaskOptions
) -> tuple[list[ExploredTask], list[LeftOut]]:
    """Return a task for each screen with a goal that no nearer screen fulfils, and the screens left out.

    Tasks with the shortest path come first.
    """
    screens = {screen.id: screen for screen in graph.screens()}
    steps = steady(graph.edges())
    best: dict[str, tuple[Start, list[Edge]]] = {}
    seeds: dict[tuple[str, str], list[int]] = defaultdict(list)  # (task, screen) of a start
    for start in graph.starts():
        start_seeds = seeds[start.task, start.screen]
        if start.seed not in start_seeds:
            start_seeds.append(start.seed)
        if len(start_seeds) > 1:
            continue
        for target, path in paths_from(start.screen, steps).items():
            if target not in best or len(path) < len(best[target][1]):
                best[target] = start, path
    starts = {start.screen for start in graph.starts()}
    tasks: list[ExploredTask] = []
    left_out = []
    goals: set[tuple[str, str]] = set()

    def is_new(goal: Goal, screen: Screen) -> bool:
        """Return True if no other task has this goal and no nearer screen fulfils it."""
        nearer = [other for other in goal.screens if other.id in best and other.id != screen.id]
        own = len(best[screen.id][1])
        return (screen.application, goal.text) not in goals and all(
            len(best[other.id][1]) >= own for other in nearer
        )

    for screen in sorted(
        screens.values(),
        key=lambda candidate: (
            len(best[candidate.id][1]) if candidate.id in best else 0,
            candidate.id,
        ),
    ):
        goal, reason = None, ""
        if screen.has_ended:
            reason = "the environment ends the episode there"
        elif screen.id in starts:
            reason = "an exploration starts there"
        elif screen.id not in best:
            reason = "no step led there reliably"
        elif len(best[screen.id][1]) > options.longest:
            reason = f"more than {options.longest} steps away"
        else:
            start, path = best[screen.id]
            ways = goals_of(screen, screens[start.screen], screens.values(), path)
            goal = next((way for way in ways if is_new(way, screen)), None)
            reason = (
                "" if goal else "its goals are a nearer screen's" if ways else "nothing names it"
            )
        if goal is None:
            left_out.append(LeftOut(screen=screen.state, reason=reason))
            continue
        goals.add((screen.application, goal.text))
        tasks.append(_task(start, path, screen, screens, goal, seeds, options))
    return tasks, left_out


@dataclass(frozen=True)
class Goal:
    """A goal in words, and the screens that fulfil it."""

    text: str
    screens: tuple[Screen, ...]
    shows: tuple[str, ...] = ()  # names of elements in the text
    steps: bool = False  # whether the text describes the steps


def goals_of(
    screen: Screen, start: Screen, all_screens: Iterable[Screen], path: Sequence[Edge]
) -> list[Goal]:
    """Return the goals that `screen` fulfils and the start does not, the best first.

    First come goals that only this one of `all_screens` fulfils, by its title or by names of its elements,
    then goals that several screens fulfil, each of which passes. The last one is the steps in words.
    """
    same_application = [
        other
        for other in all_screens
        if other.application == screen.application and not other.has_ended
    ]
    names = {other.id: set(names_of(other.elements)) for other in same_application}
    count = Counter(name for own in names.values() for name in own)
    fresh = [
        name for name in names_of(screen.elements) if name not in set(names_of(start.elements))
    ]
    rare = sorted(fresh, key=lambda name: count[name])[:MOST_NAMES]
    title = title_of(screen)

    def goal(text: str, title: str, shows: Sequence[str]) -> Goal:
        fitting = [
            other
            for other in same_application
            if (not title or title_of(other) == title) and names[other.id].issuperset(shows)
        ]
        fitting.sort(key=lambda other: other.id != screen.id)
        return Goal(text, tuple(fitting), tuple(shows))

    ways = [goal(f'go to "{title}"', title, ())] if title and title != title_of(start) else []
    for shows in (rare[:1], rare) if len(rare) > 1 else (rare,) if rare else ():
        ways.append(goal(f"go to the screen that shows {listed(shows)}", "", shows))
        if title:
            ways.append(goal(f'go to "{title}", so that it shows {listed(shows)}', title, shows))
    ways.sort(key=lambda way: len(way.screens) > 1)
    if path and all(edge.element.name for edge in path):
        ways.append(Goal(", then ".join(map(spoken, path)), (screen,), steps=True))
    return ways


def _task(
    start: Start,
    path: Sequence[Edge],
    screen: Screen,
    screens: Mapping[str, Screen],
    goal: Goal,
    seeds: Mapping[tuple[str, str], Sequence[int]],
    options: TaskOptions,
) -> ExploredTask:
    actions = sum(len(performing(edge.element, edge.action, edge.text)) for edge in path)
    start_seeds = seeds[start.task, start.screen]
    further = (seed for seed in range(options.seeds + len(start_seeds)) if seed not in start_seeds)
    task_seeds = [*start_seeds, *further][: options.seeds]
    words = re.sub(r"[^a-z0-9]+", "-", screen.application.lower()).strip("-")
    return ExploredTask(
        id=f"explored/{words or 'screen'}-{screen.id[:8]}",
        application=screen.application,
        instruction=goal.text,
        base=start.task,
        seeds=task_seeds,
        path=[
            PathStep(
                screen=screens[edge.before].state,
                place=edge.element.place,
                action=edge.action,
                text=edge.text,
                name=edge.element.name if goal.steps else "",
                words=spoken(edge),
            )
            for edge in path
        ],
        targets=[target.state for target in goal.screens],
        shows=list(goal.shows),
        split="heldout" if is_held_out(screen.id, options.heldout_share) else "train",
        max_steps=2 * actions + 3,
    )


# --- replay -----------------------------------------------------------------------------------


async def replayed(
    suite: str, options: TaskOptions, advance: Advance, waits: OpenWaits | None = None
) -> dict[str, tuple[list[int], str]]:
    """Return for each task the seeds on which its path leads to its screen, and the reason if none does."""
    explored: Any = load_suite(suite)
    waiting = deque(explored.tasks.values())
    explored_tasks = {task.id: task for task in explored.file.tasks}
    results: dict[str, tuple[list[int], str]] = {}

    async def play_some(env: AsyncEnv) -> None:
        while waiting:
            task = waiting.popleft()
            results[task.id] = await _replayable_seeds(env, task, explored_tasks[task.id])
            advance(1)

    env = env_of_suite(suite)
    await in_slots(env, "tasks", max(1, min(options.slots, len(waiting))), play_some, waits)
    return results


def _say_stopped(out: Path) -> None:
    sys.stderr.write(f"{out} is not written, as some tasks were not replayed\n")


async def _replayable_seeds(
    env: AsyncEnv, task: Task, explored: ExploredTask
) -> tuple[list[int], str]:
    """Return (seeds on which a task's path leads to a screen that fulfils its instruction, reason).

    The reason says why there are no seeds; if there are some, it may say why others are missing.
    """
    seeds, why = [], ""
    for place, seed in enumerate(explored.seeds):
        episode = await play_probe(env, task, place, "oracle")
        report = await env.look() if episode.outcome == "pass" else None
        if report is None:
            why = why or f"its path does not replay: {episode.reason}"
        elif set(explored.shows) <= set(names_of(report[1])):
            seeds.append(seed)
        else:
            why = why or f"its screen does not show what its goal names: {listed(explored.shows)}"
    for claim in CLAIMS if seeds else ():
        episode = await play_probe(env, task, explored.seeds.index(seeds[0]), claim)
        if episode.outcome != "fail":
            return [], f"without doing anything it is {episode.outcome}: {episode.reason}"
    return seeds, why

"""Tasks from an exploration: reach a screen from the start, judged by the environment's own state.

    make_tasks     writes them: the `dart explore tasks` verb
    candidates     a task for each screen that is reached by steps which always led to the same screen
    replayed       the seeds on which each task of a suite can be replayed
    goals_of       what can be asked for, and which screens it is true of

Every candidate is replayed before it is written, by the place of each step and with the deadlines of a
run. Seeds of its start on which the path does not lead to the screen are dropped; so is a task that
keeps none, or that waiting or a claim would pass.
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
from dart_cli.explore.phrasing import listed, named, spoken, title_of
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
"""Names by which a goal tells a screen, at most."""
CLAIMS: tuple[Probe, ...] = ("nothing", "done")
"""Agents that must not pass a task."""


def make_tasks(graph: GraphReader, out: Path, options: TaskOptions) -> dict[str, Any]:
    """Write the tasks of a graph that can be replayed; what was written and what was left out.

    Raises UserError where no task is left, TaskError, MissingPartError where the suite cannot be played.
    """
    settings = graph.settings()
    found, left_out = candidates(graph, options)
    file = ExploredFile(
        suite=settings["suite"],
        options=settings.get("options", {}),
        tasks=found[: options.limit] if options.limit else found,
    )
    with (
        tempfile.TemporaryDirectory() as draft,
        progress("replaying", len(file.tasks), "tasks") as advance,
    ):
        write_file(Path(draft), file)
        played: dict[str, tuple[list[int], str]] = {}
        waits = OpenWaits()

        async def replay() -> None:
            played.update(await replayed(f"{EXPLORED}:{draft}", options, advance, waits))

        if stopped := run_until_stopped(replay(), waits, lambda: _say_stopped(out)):
            raise SystemExit(stopped)
        load_suite.cache_clear()  # the draft's
    kept = []
    for task in file.tasks:
        seeds, why = played[task.id]
        if seeds:
            kept.append(task.model_copy(update={"seeds": seeds}))
        else:
            left_out.append(LeftOut(screen=task.targets[0], reason=why))
    if not kept:
        why = "; ".join(f"{each.screen[:8]}: {each.reason}" for each in left_out[:3])
        raise UserError(f"{graph.folder} gives no task ({why or 'no step led anywhere'})")
    write_file(out, file.model_copy(update={"tasks": kept, "left_out": left_out}))
    return {
        "tasks": len(kept),
        "suite": f"{EXPLORED}:{out}",
        "file": str(out / FILE),
        "replayed": f"{len(kept)} of {len(file.tasks)}",
        "splits": dict(Counter(task.split for task in kept)),
        "lengths": dict(sorted(Counter(len(task.path) for task in kept).items())),
        "applications": dict(Counter(task.application for task in kept)),
        "left_out": dict(Counter(each.reason.partition(":")[0] for each in left_out)),
    }


def candidates(
    graph: GraphReader, options: TaskOptions
) -> tuple[list[ExploredTask], list[LeftOut]]:
    """Return a task for each screen whose goal no nearer one has, the shortest path first; and the other screens."""
    screens = {screen.id: screen for screen in graph.screens()}
    steps = steady(graph.edges())
    best: dict[str, tuple[Start, list[Edge]]] = {}
    seeds: dict[tuple[str, str], list[int]] = defaultdict(list)  # (task, screen) of a start
    for start in graph.starts():
        known = seeds[start.task, start.screen]
        if start.seed not in known:
            known.append(start.seed)
        if len(known) > 1:
            continue
        for target, path in paths_from(start.screen, steps).items():
            if target not in best or len(path) < len(best[target][1]):
                best[target] = start, path
    starts = {start.screen for start in graph.starts()}
    tasks: list[ExploredTask] = []
    left_out = []
    goals: set[tuple[str, str]] = set()

    def is_new(goal: Goal, screen: Screen) -> bool:
        """Whether no task has it yet, and no nearer screen reaches it."""
        nearer = [each for each in goal.screens if each.id in best and each.id != screen.id]
        own = len(best[screen.id][1])
        return (screen.application, goal.text) not in goals and all(
            len(best[each.id][1]) >= own for each in nearer
        )

    for screen in sorted(
        screens.values(),
        key=lambda each: (len(best[each.id][1]) if each.id in best else 0, each.id),
    ):
        goal, reason = None, ""
        if screen.ended:
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
            goal = next((each for each in ways if is_new(each, screen)), None)
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
    """What is asked for, and which screens it is true of."""

    text: str
    screens: tuple[Screen, ...]
    shows: tuple[str, ...] = ()  # names that it tells
    steps: bool = False  # it is told by the steps


def goals_of(
    screen: Screen, start: Screen, known: Iterable[Screen], path: Sequence[Edge]
) -> list[Goal]:
    """Goals that are reached on `screen` and not at the start, the best first; none where nothing tells them apart.

    Best are those that no other of the `known` screens of the application fits: by its title, else by what
    can be used there. Then those of several screens with the same title or name, each of which will do. Last
    the steps in words.
    """
    apart = [each for each in known if each.application == screen.application and not each.ended]
    names = {each.id: set(named(each.elements)) for each in apart}
    count = Counter(name for each in names.values() for name in each)
    fresh = [name for name in named(screen.elements) if name not in set(named(start.elements))]
    rare = sorted(fresh, key=lambda name: count[name])[:MOST_NAMES]
    title = title_of(screen)

    def goal(text: str, title: str, shows: Sequence[str]) -> Goal:
        fit = [
            each
            for each in apart
            if (not title or title_of(each) == title) and names[each.id].issuperset(shows)
        ]
        fit.sort(key=lambda each: each.id != screen.id)
        return Goal(text, tuple(fit), tuple(shows))

    ways = [goal(f'go to "{title}"', title, ())] if title and title != title_of(start) else []
    for shows in (rare[:1], rare) if len(rare) > 1 else (rare,) if rare else ():
        ways.append(goal(f"go to the screen that shows {listed(shows)}", "", shows))
        if title:
            ways.append(goal(f'go to "{title}", so that it shows {listed(shows)}', title, shows))
    ways.sort(key=lambda each: len(each.screens) > 1)
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
    known = seeds[start.task, start.screen]
    further = (seed for seed in range(options.seeds + len(known)) if seed not in known)
    tried = [*known, *further][: options.seeds]
    words = re.sub(r"[^a-z0-9]+", "-", screen.application.lower()).strip("-")
    return ExploredTask(
        id=f"explored/{words or 'screen'}-{screen.id[:8]}",
        application=screen.application,
        instruction=goal.text,
        base=start.task,
        seeds=tried,
        path=[
            PathStep(
                screen=screens[edge.before].state,
                place=edge.element.place,
                action=edge.action,
                text=edge.text,
                name=edge.element.name if goal.steps else "",
                told=spoken(edge),
            )
            for edge in path
        ],
        targets=[each.state for each in goal.screens],
        shows=list(goal.shows),
        split="heldout" if is_held_out(screen.id, options.heldout_share) else "train",
        max_steps=2 * actions + 3,
    )


# --- replay -----------------------------------------------------------------------------------


async def replayed(
    suite: str, options: TaskOptions, advance: Advance, waits: OpenWaits | None = None
) -> dict[str, tuple[list[int], str]]:
    """Task -> the seeds on which its path leads to its screen; and, where there is none, why."""
    explored: Any = load_suite(suite)
    waiting = deque(explored.tasks.values())
    known = {task.id: task for task in explored.file.tasks}
    found: dict[str, tuple[list[int], str]] = {}

    async def play_some(env: AsyncEnv) -> None:
        while waiting:
            task = waiting.popleft()
            found[task.id] = await _tried(env, task, known[task.id])
            advance(1)

    env = env_of_suite(suite)
    await in_slots(env, "tasks", max(1, min(options.slots, len(waiting))), play_some, waits)
    return found


def _say_stopped(out: Path) -> None:
    sys.stderr.write(f"{out} is not written, as some tasks were not replayed\n")


async def _tried(env: AsyncEnv, task: Task, explored: ExploredTask) -> tuple[list[int], str]:
    """Return the seeds on which the task's path leads to a screen that its instruction is true of."""
    kept, why = [], ""
    for place, seed in enumerate(explored.seeds):
        episode = await play_probe(env, task, place, "oracle")
        looked = await env.look() if episode.outcome == "pass" else None
        if looked is None:
            why = why or f"its path does not replay: {episode.reason}"
        elif set(explored.shows) <= set(named(looked[1])):
            kept.append(seed)
        else:
            why = why or f"its screen does not show what its goal names: {listed(explored.shows)}"
    for claim in CLAIMS if kept else ():
        episode = await play_probe(env, task, explored.seeds.index(kept[0]), claim)
        if episode.outcome != "fail":
            return [], f"without doing anything it is {episode.outcome}: {episode.reason}"
    return kept, why

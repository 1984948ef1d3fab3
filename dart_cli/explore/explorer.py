"""The exploration itself: slots that share one memory and one graph.

    Plan          the starts, the limits and the rules of an exploration
    StartPoint    the task, seed and application of an episode
    KindRates     how often actions of a kind led to another screen
    Exploration   the state that the slots share; `explore` is the loop of one slot

A slot resets its environment and then repeats: list the candidates of the screen, choose one, perform it,
look at the screen after it. Each step is written to the graph before the next begins. The slot returns to a
start after `plan.back_every` steps, after an error, and on a screen from which no untried action can be
reached, as far as is known. The exploration ends when the steps are used up, or when no screen of the graph
has an untried action.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from bus.errors import EnvError
from dart_cli.algo.action_values import Memory, Move
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.calls import StepResult
from dart_cli.explore.choosing import RANKINGS, Candidate, DenyList, text_for
from dart_cli.explore.graph import Edge, Graph, Screen, Sight, Start, screen_id
from envs.contract.base import Observation, Task
from envs.contract.blobs import content_hash
from envs.contract.elements import (
    Element,
    Operation,
    ScreenState,
    grid_elements,
    grid_state,
    performing,
)

logger = logging.getLogger(__name__)

Stopped = Literal["steps", "frontier", "no_way", "interrupted"]
"""Why an exploration ended: its steps are used up; no screen has an untried action; the screens with untried
actions were not reached again; a signal."""

MOST_BROKEN = 3  # episodes in a row that did not begin
DEAD_END = 1e-6
"""The best value of a screen up to which no untried action can be reached from there, as far as is known."""
LOOK_AGAIN_S = 30.0  # longest wait for another slot's step before checking again


@dataclass(frozen=True)
class StartPoint:
    """The start of an episode."""

    task: Task
    seed: int
    application: str


@dataclass(frozen=True)
class Plan:
    """The starts, the limits and the rules of an exploration."""

    starts: Sequence[StartPoint]
    steps: int  # over all slots, including the steps of earlier runs
    back_every: int  # steps of an episode
    ranking: str  # of RANKINGS
    deny: DenyList
    seed: int


class KindRates:
    """How often actions of a kind led to another screen, which is the prior value of an untried action."""

    def __init__(self) -> None:
        self._tried: Counter[tuple[str, str, str]] = Counter()
        self._moved: Counter[tuple[str, str, str]] = Counter()

    def add(self, edge: Edge, application: str) -> None:
        """Count the outcome of a step."""
        kind = application, edge.element.role, edge.action
        self._tried[kind] += 1
        self._moved[kind] += edge.outcome == "moved"

    def rate(self, kind: tuple[str, str, str]) -> float:
        """Return the rate of a kind by Laplace's rule, which adds one try that moved and one that did not."""
        return (self._moved[kind] + 1) / (self._tried[kind] + 2)


class Exploration:
    """The state that the slots share, in one event loop."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        advance: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Continue from the state of the graph.

        `advance` is called after each step with a note on the progress.
        """
        self.stop_reason: Stopped | None = None
        self._graph, self._plan = graph, plan
        self._advance = advance
        self._memory = Memory()
        self._applications: dict[str, str] = {}  # screen -> application
        self._screens_of: dict[str, list[str]] = {}  # application -> screens
        self._kinds = KindRates()
        self._tried_at: dict[tuple[str, Move], int] = {}
        self._steps = graph.steps
        self._running = 0  # steps that have begun and not ended
        self._episodes = len(graph.starts())
        self._failed_starts = 0  # episodes in a row that did not begin
        self._idle = 0  # episodes in a row without a step
        self._step_ended = asyncio.Event()  # set, and replaced by a new one, whenever a step ends
        self._recall()

    @property
    def untried(self) -> int:
        """The number of untried actions on all screens of the graph."""
        return self._memory.untried()

    async def explore(self, slot: int, env: AsyncEnv) -> None:
        """Play episodes in one environment until the exploration ends.

        Raises EnvError if no episode begins.
        """
        while (start := await self._next_start()) is not None:
            await self._episode(slot, env, start)

    # --- one episode ---------------------------------------------------------------------------

    async def _episode(self, slot: int, env: AsyncEnv, at: StartPoint) -> None:
        env.episode = f"seed {at.seed}"
        try:
            observation, _ = await env.reset(at.task, at.seed, free=True)
            sight = await _look(env, observation, at.application)
        except EnvError as error:
            await self._count_failed_start(env, at, error)
            return
        self._failed_starts = 0
        start = self._graph.add_start(at.task.id, at.seed, slot, sight)
        self._see(start.screen, sight)
        self._idle += 1
        for first in [True] + [False] * (self._plan.back_every - 1):
            candidates = self._candidates(sight)
            if not candidates or not await self._may_go_on(at.application):
                return
            if not first and self._is_dead_end(candidates):
                return
            self._running += 1
            self._idle = 0
            try:
                after = await self._step(env, start, sight, candidates)
            finally:
                self._running -= 1
                self._wake_others()
            if after is None or after.has_ended:
                return
            sight = after

    async def _count_failed_start(self, env: AsyncEnv, at: StartPoint, error: EnvError) -> None:
        """Replace the environment after an episode that did not begin.

        Raises EnvError after MOST_BROKEN such episodes in a row.
        """
        self._failed_starts += 1
        logger.warning("%s, seed %d did not begin: %s", at.task.id, at.seed, error)
        if self._failed_starts >= MOST_BROKEN:
            raise EnvError(f"{MOST_BROKEN} episodes in a row did not begin; the last: {error}")
        await env.renew()

    async def _step(
        self, env: AsyncEnv, start: Start, sight: Sight, candidates: list[Candidate]
    ) -> Sight | None:
        """Take one step, write it to the graph, and return the screen after it, or None after an error."""
        screen = _id(sight)
        choice, text = self._choose(sight, candidates)
        element, operation = choice.element, choice.operation
        self._memory.begin(screen, choice.move)
        after, detail = None, ""
        try:
            stepped = await _perform(env, element, operation, text)
            after = await self._look_after(env, stepped, sight.application)
            detail = _what_changed(sight, after)
        except EnvError as error:
            detail = str(error)
        finally:
            # Also if this task is cancelled, since the action has then ended too.
            destination = None if after is None or _id(after) == screen else _id(after)
            self._memory.end(screen, choice.move, destination)
        edge = self._graph.add_edge(
            episode=start.episode,
            slot=start.slot,
            before=screen,
            shot_before=content_hash(sight.screenshot),
            element=element,
            action=operation,
            text=text,
            after=after,
            detail=detail,
        )
        self._record(edge, after)
        if after is None:
            await env.renew()
        return after

    def _record(self, edge: Edge, after: Sight | None) -> None:
        """Add a step that is in the graph to the memory, and report the progress."""
        self._steps = max(self._steps, edge.step)
        if edge.after is not None and after is not None:
            self._see(edge.after, after)
        self._note(edge)
        self._memory.sweep()
        self._advance(f"{len(self._applications)} screens, {self.untried} untried")

    async def _look_after(self, env: AsyncEnv, stepped: StepResult, application: str) -> Sight:
        has_ended = stepped.terminated or stepped.truncated
        try:
            return await _look(env, stepped.observation, application, has_ended=has_ended)
        except EnvError:
            if not has_ended:
                raise
            unknown = ScreenState("", "", "the environment ended the episode and tells no screen")
            observation = stepped.observation
            return Sight(
                application,
                unknown,
                (),
                observation.screenshot,
                observation.width,
                observation.height,
                has_ended=True,
            )

    # --- what to do ----------------------------------------------------------------------------

    def _choose(self, sight: Sight, candidates: list[Candidate]) -> tuple[Candidate, str]:
        """Return the chosen action, and the text to type."""
        rng = Random(f"{self._plan.seed}/{self._steps + self._running}")  # noqa: S311 - repeatable
        if self._plan.ranking == "q":
            priors = {
                candidate.move: self._kinds.rate(_kind(sight.application, candidate))
                for candidate in candidates
            }
            self._memory.see(_id(sight), [candidate.move for candidate in candidates], priors)
            candidates = self._candidates(sight)
        choice = RANKINGS[self._plan.ranking](candidates, rng)
        return choice, text_for(candidates, rng) if choice.operation == "type" else ""

    def _candidates(self, sight: Sight) -> list[Candidate]:
        """Return the allowed actions of a screen, with their values and earlier tries."""
        screen = _id(sight)
        allowed = self._allowed(sight.elements)
        values = dict(zip(allowed, self._memory.values(screen), strict=True))
        now = self._steps
        return [
            Candidate(
                element,
                operation,
                values[move],
                self._memory.tries(screen, move),
                now - self._tried_at[screen, move] if (screen, move) in self._tried_at else None,
            )
            for move, (element, operation) in allowed.items()
        ]

    def _allowed(self, elements: Sequence[Element]) -> dict[Move, tuple[Element, Operation]]:
        """Return the actions that the deny list does not forbid, by their keys."""
        return {
            (element.place, operation): (element, operation)
            for element in elements
            for operation in element.actions
            if not self._plan.deny.denies(element, operation)
        }

    # --- whether to go on ----------------------------------------------------------------------

    async def _next_start(self) -> StartPoint | None:
        """Return the start of the next episode; None once the exploration has ended."""
        if not await self._may_go_on():
            return None
        if self._idle > 2 * len(self._plan.starts) + MOST_BROKEN:
            self.stop_reason = self.stop_reason or "no_way"
            return None
        starts = [start for start in self._plan.starts if self._is_open(start.application)]
        self._episodes += 1
        return starts[(self._episodes - 1) % len(starts)]

    async def _may_go_on(self, application: str = "") -> bool:
        """Return True if a step is left to take, in this application or in any.

        Waits for steps that have not ended.
        """
        while self.stop_reason is None:
            if self._steps + self._running < self._plan.steps:
                if application and self._is_open(application):
                    return True
                if any(self._is_open(start.application) for start in self._plan.starts):
                    return not application
                reason: Stopped = "frontier"
            else:
                reason = "steps"
            if not self._running:
                self.stop_reason = reason
            elif reason == "steps":
                return False
            else:
                await self._wait_for_others()
        return False

    def _is_open(self, application: str) -> bool:
        """Return True if the application has an untried action, or was never seen."""
        screens = self._screens_of.get(application)
        return screens is None or self._memory.untried(screens) > 0

    def _is_dead_end(self, candidates: Sequence[Candidate]) -> bool:
        """Return True if, by Q, no untried action can be reached; other choosers always return False."""
        return (
            self._plan.ranking == "q"
            and max(candidate.value for candidate in candidates) <= DEAD_END
        )

    async def _wait_for_others(self) -> None:
        """Wait until a step of another slot ends, at most LOOK_AGAIN_S."""
        step_ended = self._step_ended
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await step_ended.wait()
        except TimeoutError:
            return

    def _wake_others(self) -> None:
        self._step_ended.set()
        self._step_ended = asyncio.Event()

    # --- the memory ----------------------------------------------------------------------------

    def _recall(self) -> None:
        """Fill the memory from the graph."""
        for screen in self._graph.screens():
            self._see(screen.id, screen)
        for edge in self._graph.edges():
            moved = edge.after if edge.outcome == "moved" else None
            self._memory.end(edge.before, (edge.element.place, edge.action), moved)
            self._note(edge)
        self._memory.sweep()

    def _see(self, key: str, visit: Sight | Screen) -> None:
        """Add the screen and its allowed actions to the memory."""
        if key not in self._applications:
            self._screens_of.setdefault(visit.application, []).append(key)
            self._applications[key] = visit.application
        self._memory.see(key, () if visit.has_ended else self._allowed(visit.elements))

    def _note(self, edge: Edge) -> None:
        """Note when the action was tried, and count the outcome for the rate of its kind."""
        key = edge.before, (edge.element.place, edge.action)
        self._tried_at[key] = edge.step
        self._kinds.add(edge, self._applications[edge.before])


def _id(sight: Sight) -> str:
    return screen_id(sight.application, sight.state.id, has_ended=sight.has_ended)


def _kind(application: str, candidate: Candidate) -> tuple[str, str, str]:
    return application, candidate.element.role, candidate.operation


async def _look(
    env: AsyncEnv, observation: Observation, application: str, *, has_ended: bool = False
) -> Sight:
    """Return the present screen; its elements are the cells of a grid if the environment reports none."""
    report = await env.look()
    if report is None:
        state, elements = (
            grid_state(observation),
            grid_elements(observation.width, observation.height),
        )
    else:
        state, elements = report
    return Sight(
        application,
        state,
        tuple(elements),
        observation.screenshot,
        observation.width,
        observation.height,
        has_ended=has_ended,
        has_tree=report is not None,
    )


async def _perform(env: AsyncEnv, element: Element, operation: Operation, text: str) -> StepResult:
    """Perform an operation on an element, and return the result of its last action. Raises EnvError."""
    stepped: StepResult | None = None
    for action in performing(element, operation, text):
        stepped = await env.step(action)
        if stepped.terminated or stepped.truncated:
            break
    assert stepped is not None
    return stepped


def _what_changed(before: Sight, after: Sight) -> str:
    """Return a note on a step that stayed on its screen; empty if it led to another."""
    if _id(before) != _id(after):
        return ""
    return (
        "nothing changed" if before.screenshot == after.screenshot else "its picture changed alone"
    )

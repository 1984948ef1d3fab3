"""Screens of MiniWoB++'s own pages at training seeds, with the pages' instructions and what answers them.

    page_scenes      one screen a seed, after some random actions. On a page that one action solves, that
                     action answers the instruction. On any other, an action that could be meant does, at
                     random: what leads where is not shown.
    demonstrations   whole episodes of the oracle, some of which begin or go on with wrong actions

Answers to a page's instruction have the kind "page:NAME", steps of the oracle's episodes "step:NAME".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from bus.errors import ActionError, EnvError
from envs.contract.actions import Action
from envs.contract.base import Observation
from envs.suites.miniwob.env import MiniwobEnv
from envs.suites.miniwob.tasks import NO_ORACLE, TASKS, THRESHOLDS
from scripts.shipped_models.reading.answers import answer_of, expressible, spoken
from scripts.shipped_models.reading.looking import Looked, is_drawn, look
from scripts.shipped_models.reading.plausible import plausible, wandered
from scripts.shipped_models.reading.scene import Asked, Scene

PAGES: tuple[str, ...] = tuple(task.params["page"] for task in TASKS.values())
SOLVED: tuple[str, ...] = tuple(page for page in PAGES if page not in NO_ORACLE)
"""Pages with an oracle."""

SINGLE = frozenset(
    """
    click-button click-color click-dialog click-dialog-2 click-link click-shape click-tab
    click-tab-2-easy click-tab-2-medium click-test click-test-2 click-test-transfer click-widget
    count-shape drag-items email-inbox-delete email-inbox-important focus-text focus-text-2
    grid-coordinate identify-shape unicode-test
    """.split()
)
"""Pages that the oracle's first action passes on each of 20 seeds (`is_single`)."""

PRECISE = 4
"""CSS pixels to each side of a place that is the answer on a page of one step."""

STEP, PLACE = 3, 1
"""The same of a step of an episode, and on pages where few pixels decide."""

PLACED = frozenset({*THRESHOLDS, "click-pie", "click-pie-nodelay"})
"""Pages where few pixels decide: the reward falls with the distance, or labels cover what is pressed."""

WANDER = 4
"""Most random actions before a screen is taken."""

WRONG = 0.35
"""Share of demonstrations in which one or two actions are wrong."""


def page_scenes(
    env: MiniwobEnv, page: str, seeds: Sequence[int], rng: Random, scale: float = 1.0
) -> Iterator[Scene]:
    """Screens of a page, one for each seed; seeds that break or cannot be solved are left out."""
    single = page in SINGLE
    for seed in seeds:
        try:
            seen, instruction, before = _wandered(env, page, seed, rng, 0 if single else WANDER)
            looked = look(env.ask, scale)
            if (before and not looked.things) or not is_drawn(seen.screenshot, looked.glyphs):
                continue
            if single:
                answer = answer_of(env.oracle_action(), env.ask, scale, PRECISE)
            else:
                answer = plausible(env.ask, instruction, looked.things, rng, scale)
        except (ActionError, EnvError):
            continue
        asked = Asked(instruction, answer.text, answer.boxes, f"page:{page}", before)
        yield _scene(f"page/{page}/{scale:g}/{seed}/{len(before)}", seen, looked, asked)


def demonstrations(
    env: MiniwobEnv, page: str, seeds: Sequence[int], scale: float = 1.0
) -> Iterator[Scene]:
    """Yield the steps of the oracle's episodes that pass within the page's limit."""
    for seed in seeds:
        try:
            yield from _episode(env, page, seed, scale)
        except (ActionError, EnvError):
            continue


def is_single(env: MiniwobEnv, page: str, seeds: Sequence[int]) -> bool:
    """Whether the oracle's first action passes on all of these seeds."""
    for seed in seeds:
        try:
            env.reset(seed=seed, options={"task": f"miniwob/{page}"})
            env.step(env.oracle_action())
        except (ActionError, EnvError):
            return False
        if env.evaluate().outcome != "pass":
            return False
    return True


def _wandered(
    env: MiniwobEnv, page: str, seed: int, rng: Random, most: int
) -> tuple[Observation, str, tuple[str, ...]]:
    """Return a screen after up to `most` random actions that do not end the episode, and these actions."""
    task = {"task": f"miniwob/{page}"}
    wanted = rng.randrange(most + 1)
    for _ in range(3):
        seen, info = env.reset(seed=seed, options=task)
        before: list[str] = []
        over = False
        while len(before) < wanted and not over:
            action = wandered(env.ask, str(info["instruction"]), seen, rng)
            later, _, over, _, _ = env.step(action)
            if not over:
                before.append(spoken(action, seen.width, seen.height))
                seen = later
        if not over:
            return seen, str(info["instruction"]), tuple(before)
        wanted = max(0, len(before))
    seen, info = env.reset(seed=seed, options=task)
    return seen, str(info["instruction"]), ()


def _episode(env: MiniwobEnv, page: str, seed: int, scale: float) -> list[Scene]:
    """Return the oracle's steps of one episode; none if it does not pass."""
    rng = Random(f"demonstration/{page}/{seed}")
    placed = page in PLACED
    limit = TASKS[f"miniwob/{page}"].max_steps
    wrong = set(rng.sample(range(5), rng.randint(1, 2))) if rng.random() < WRONG else set()
    seen, info = env.reset(seed=seed, options={"task": f"miniwob/{page}"})
    instruction = str(info["instruction"])
    before: list[str] = []
    steps: list[Scene] = []
    over = False
    while not over and len(before) < limit:
        action: Action
        if len(before) in wrong:
            action = wandered(env.ask, instruction, seen, rng)
        else:
            action = expressible(env.oracle_action())
            answer = answer_of(action, env.ask, scale, PLACE if placed else STEP, placed)
            looked = look(env.ask, scale)
            asked = Asked(instruction, answer.text, answer.boxes, f"step:{page}", tuple(before))
            key = f"demonstration/{page}/{scale:g}/{seed}/{len(before)}"
            if is_drawn(seen.screenshot, looked.glyphs):
                steps.append(_scene(key, seen, looked, asked))
        before.append(spoken(action, seen.width, seen.height))
        seen, _, over, _, _ = env.step(action)
    return steps if env.evaluate().outcome == "pass" else []


def _scene(key: str, seen: Observation, looked: Looked, asked: Asked) -> Scene:
    return Scene(key, seen.screenshot, looked.glyphs, looked.things, (asked,), looked.unread)

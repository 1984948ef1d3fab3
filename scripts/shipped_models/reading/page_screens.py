"""Screens of MiniWoB++'s own pages at training seeds, with the pages' instructions and what answers them.

Each seed gives one screen, after some random actions. On a page that one action solves, that action answers the
instruction. On any other, an action that could be meant answers it, at random: what leads where is not shown.
These questions have the kind "page:NAME".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from bus.errors import ActionError, EnvError
from envs.contract.base import Observation
from envs.suites.miniwob.env import MiniwobEnv
from envs.suites.miniwob.tasks import TASKS
from scripts.shipped_models.reading.answers import answer_of, spoken
from scripts.shipped_models.reading.looking import Looked, is_drawn, look
from scripts.shipped_models.reading.plausible import plausible, random_action
from scripts.shipped_models.reading.scene import Query, Scene

PAGES: tuple[str, ...] = tuple(task.params["page"] for task in TASKS.values())

SINGLE = frozenset(
    """
    click-button click-color click-dialog click-dialog-2 click-link click-shape click-tab
    click-tab-2-easy click-tab-2-medium click-test click-test-2 click-test-transfer click-widget
    count-shape drag-items email-inbox-delete email-inbox-important focus-text focus-text-2
    grid-coordinate identify-shape unicode-test
    """.split()
)
"""Pages on which the oracle's first action passes, on each of 20 seeds."""

PRECISE = 4
"""CSS pixels to each side of the point that is the answer on a page of one step."""

WANDER = 4
"""Most random actions before a screen is taken."""


def page_scenes(
    env: MiniwobEnv, page: str, seeds: Sequence[int], rng: Random, scale: float = 1.0
) -> Iterator[Scene]:
    """Yield one screen of a page for each seed; seeds that break or that the oracle cannot solve are left out."""
    single = page in SINGLE
    for seed in seeds:
        try:
            observation, instruction, before = _wander(
                env, page, seed, rng, 0 if single else WANDER
            )
            looked = look(env.ask, scale)
            if (before and not looked.things) or not is_drawn(
                observation.screenshot, looked.glyphs
            ):
                continue
            if single:
                answer = answer_of(env.oracle_action(), env.ask, scale, PRECISE)
            else:
                answer = plausible(env.ask, instruction, looked.things, rng, scale)
        except (ActionError, EnvError):
            continue
        query = Query(instruction, answer.text, answer.boxes, f"page:{page}", before)
        yield _scene(f"page/{page}/{scale:g}/{seed}/{len(before)}", observation, looked, query)


def _wander(
    env: MiniwobEnv, page: str, seed: int, rng: Random, most: int
) -> tuple[Observation, str, tuple[str, ...]]:
    """Return a screen after up to `most` random actions that do not end the episode, and these actions."""
    task = {"task": f"miniwob/{page}"}
    count = rng.randrange(most + 1)
    for _ in range(3):
        observation, info = env.reset(seed=seed, options=task)
        before: list[str] = []
        over = False
        while len(before) < count and not over:
            action = random_action(env.ask, str(info["instruction"]), observation, rng)
            later, _, over, _, _ = env.step(action)
            if not over:
                before.append(spoken(action, observation.width, observation.height))
                observation = later
        if not over:
            return observation, str(info["instruction"]), tuple(before)
        count = max(0, len(before))
    observation, info = env.reset(seed=seed, options=task)
    return observation, str(info["instruction"]), ()


def _scene(key: str, observation: Observation, looked: Looked, query: Query) -> Scene:
    return Scene(key, observation.screenshot, looked.glyphs, looked.things, (query,), looked.unread)

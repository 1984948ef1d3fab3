"""The graph of a random walk in the real environment, for the tests of an exploration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from dart_cli.explore.graph import ExploreSettings, Graph, Sight, open_graph
from envs.contract.base import Observation
from envs.contract.elements import Element, performing
from envs.contract.registry import load_suite, make_env

OPTIONS: Mapping[str, Any] = {"size": "448x336"}
TASKS = ("desk/settings-switch", "desk/files-open")


def walk(
    folder: Path, steps: int, tasks: Sequence[str] = TASKS, *, seeds: Sequence[int] = (0,)
) -> None:
    """Write the graph of a walk of `steps` over suite `desk`, 20 steps an episode.

    A longer walk begins with the steps of a shorter one.
    """
    env: Any = make_env("desk", **OPTIONS)
    rng = Random("walk")
    left = steps
    settings = ExploreSettings(suite="desk", options=dict(OPTIONS), tasks=list(tasks))
    with open_graph(folder, settings) as graph:
        for episode in range(steps):
            task, seed = tasks[episode % len(tasks)], seeds[episode // len(tasks) % len(seeds)]
            observation, _ = env.reset(
                seed=seed, options={"task": load_suite("desk").tasks[task], "free": True}
            )
            left -= _episode(graph, env, task, seed, observation, rng, min(left, 20))
            if not left:
                break
    env.close()


def _episode(
    graph: Graph, env: Any, task: str, seed: int, observation: Observation, rng: Random, most: int
) -> int:
    """Walk at most `most` steps in one episode, and return their number."""
    here = sight(env, task, observation)
    start = graph.add_start(task, seed, 0, here)
    key, shot = start.screen, start.screenshot
    for count in range(most):
        if here.has_ended or not here.elements:
            return count
        element: Element = rng.choice(here.elements)
        action = rng.choice(element.actions)
        text = "abc" if action == "type" else ""
        for gui_action in performing(element, action, text):
            observation, _, terminated, truncated, _ = env.step(gui_action)
        after = sight(env, task, observation, has_ended=terminated or truncated)
        edge = graph.add_edge(
            episode=start.episode,
            slot=0,
            before=key,
            shot_before=shot,
            element=element,
            action=action,
            text=text,
            after=after,
        )
        assert edge.after
        assert edge.shot_after
        here, key, shot = after, edge.after, edge.shot_after
    return most


def sight(
    env: Any, application: str, observation: Observation, *, has_ended: bool = False
) -> Sight:
    """Return the present screen."""
    return Sight(
        application,
        env.state(),
        tuple(env.elements()),
        observation.screenshot,
        observation.width,
        observation.height,
        has_ended,
    )

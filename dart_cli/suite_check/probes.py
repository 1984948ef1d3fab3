"""Agents that do not know their task, and the environment's own solution; the episodes that they play.

PROBES       their names, in the order they play
EXCUSES      those whose pass is false: they do nothing for it
play_probe   plays one episode
play_task    all of one task's, in one environment: probe by probe, and within it seed by seed,
             so that other resets come between two resets to the same seed; none after a first one that breaks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bus.errors import UserError
from dart_cli.env.async_env import AsyncEnv
from dart_cli.player.actions import ActedEpisode, play_actions
from dart_cli.player.episodes import player_rng, random_click
from envs.contract.actions import Action, Done, Fail, Wait
from envs.contract.base import Observation, Task

Probe = Literal["nothing", "done", "fail", "random", "oracle"]

PROBES: tuple[Probe, ...] = ("nothing", "done", "fail", "random", "oracle")

EXCUSES: dict[Probe, str] = {
    "nothing": "waiting until the steps are used up",
    "done": "saying at once that it is done",
    "fail": "saying at once that it cannot be done",
}
"""Probe -> what it does instead of the task."""


@dataclass(kw_only=True)
class ProbeEpisode(ActedEpisode):
    """One episode of a probe; without an outcome where there is no solution, so that the oracle did not play."""

    probe: Probe
    seed: int

    @property
    def is_broken(self) -> bool:
        """Return True if the environment or the evaluator broke."""
        return self.outcome == "invalid" and not self.true_at_reset


def probes_of(names: str) -> tuple[Probe, ...]:
    """Probes by their names with commas, or all. Raises UserError."""
    chosen = PROBES if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in PROBES:
            raise UserError(f"--probes {name!r}: there are {', '.join(PROBES)}")
    return tuple(probe for probe in PROBES if probe in chosen)


async def play_probe(env: AsyncEnv, task: Task, seed: int, probe: Probe) -> ProbeEpisode:
    """Play one episode; after an error its outcome is `invalid`, and the environment is renewed."""
    probed = ProbeEpisode(probe=probe, seed=seed)
    if probe == "oracle" and not task.feasible:
        probed.reason = "the task cannot be done"
        return probed
    rng = player_rng(task, seed)
    env.episode = f"seed {seed}, probe {probe}"

    async def act(screen: Observation) -> Action:
        match probe:
            case "nothing":
                return Wait()
            case "done":
                return Done()
            case "fail":
                return Fail()
            case "random":
                return random_click(screen.width, screen.height, rng)
        return (await env.solve())[0]

    return await play_actions(env, task, seed, act, probed)


async def play_task(
    env: AsyncEnv,
    task: Task,
    seeds: Sequence[int],
    probes: Sequence[Probe],
    keep: Callable[[ProbeEpisode], None] = lambda _: None,
) -> list[ProbeEpisode]:
    """Play all episodes of one task; `keep` gets each as it ends.

    Where the first one breaks the others are not played: most often they break as well, after as long a wait.
    """
    episodes: list[ProbeEpisode] = []
    for probe in probes:
        for seed in seeds:
            episode = await play_probe(env, task, seed, probe)
            episodes.append(episode)
            keep(episode)
            if episodes[0].is_broken:
                return episodes
    return episodes

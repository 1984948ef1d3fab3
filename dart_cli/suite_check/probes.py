"""Probes: agents that know nothing of their task, and the environment's own solution.

PROBES       the names of the probes, in the order in which they play
EXCUSES      the probes whose pass is false, because they do nothing for it
play_probe   plays one episode
play_task    plays all episodes of one task in one environment

A task is played probe by probe, and each probe seed by seed, so that other resets come between two resets to
the same seed. If the first episode breaks, the others are not played.
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
"""Probe -> what it does instead of the task, in words."""


@dataclass(kw_only=True)
class ProbeEpisode(ActedEpisode):
    """One episode of a probe.

    It has no outcome if there is no solution, so that the oracle could not play.
    """

    probe: Probe
    seed: int

    @property
    def is_broken(self) -> bool:
        """Whether the environment or the evaluator broke."""
        return self.outcome == "invalid" and not self.true_at_reset


def probes_of(names: str) -> tuple[Probe, ...]:
    """Return the probes that are named, separated by commas, or all. Raises UserError for an unknown name."""
    selected = PROBES if names == "all" else [name.strip() for name in names.split(",")]
    for name in selected:
        if name not in PROBES:
            raise UserError(f"--probes {name!r}: there are {', '.join(PROBES)}")
    return tuple(probe for probe in PROBES if probe in selected)


async def play_probe(env: AsyncEnv, task: Task, seed: int, probe: Probe) -> ProbeEpisode:
    """Play one episode. After an error its outcome is `invalid`, and the environment is created anew."""
    episode = ProbeEpisode(probe=probe, seed=seed)
    if probe == "oracle" and not task.feasible:
        episode.reason = "the task cannot be done"
        return episode
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

    return await play_actions(env, task, seed, act, episode)


async def play_task(
    env: AsyncEnv,
    task: Task,
    seeds: Sequence[int],
    probes: Sequence[Probe],
    keep: Callable[[ProbeEpisode], None] = lambda _: None,
) -> list[ProbeEpisode]:
    """Play the episodes of one task and return them; `keep` is called with each when it ends.

    If the first one breaks, the others are not played: most often they would break as well, after as long a
    wait.
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

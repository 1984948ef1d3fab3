"""How many completions and seconds does an episode take if a completion may hold four actions instead of one?

    python benchmarks/speed/several_actions.py [--episodes 42] [--actions 4] [--out FILE]

The environment's own solution plays: the seven tasks of the quickstart (`mini`, with `builtin:tiny`) and the
training tasks of `apps` (with `builtin:small`). It is written by the policy's action parser and tokenizer, read
again, and performed by `play_episode`, as a policy's completions are. A second environment with the same seed
gives the actions that follow. Three arms play the same task and seed in turn, one episode at a time:

- `1`: one action in each completion (`policy.max_actions = 1`);
- `visible`: up to four; a run of actions ends before a place that does not yet look as it will (the 21 x 21
  pixels around it), so that a policy could have written it from its screenshot;
- `4`: the next four, also on screens that are still to come. No policy knows these, so it is the limit.

For each completion the model of the suite prefills the same prompt and decodes as many tokens as the completion
has, on one thread, with an engine for each arm; what it draws is thrown away. So the seconds are those of a policy that writes these actions,
and nothing is said about whether a policy can learn to.

Of each arm: `success`, `actions`, `completions` and `tokens` for an episode, `actions_per_completion`, and
`seconds` for an episode after its reset: CPU seconds, so that busy neighbours do not count, of the model
(`model_s`) and of all that follows a completion, its actions and the verdict included (`env_s`). The physical limit is the work that
the actions themselves need: `env_s` of the environment and the tokens of the actions. The last line is JSON;
`actions_per_completion`, `completions_per_episode` and `seconds_per_episode` have the three arms of each suite.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.messages import ActRequest, Completion
from dart_cli.collect.policies import ActionWriter
from dart_cli.config.schema import Config
from dart_cli.engines.base import Responder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.env.async_env import make_async_env
from dart_cli.env.episode import play_episode
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.player.episodes import MemorySink, PlannedEpisode, lease_of, plan_episodes
from dart_cli.rollout.worker import load_model, load_prompt_encoder
from envs.contract.actions import Action, Answer, Done, Fail
from envs.contract.base import Observation, Task
from envs.contract.registry import make_env
from envs.contract.registry import tasks_of as suites_tasks

QUICKSTART = ("popup", "menu", "page", "confirm", "tabs", "folder", "scroll")
SUITES = {"mini": "builtin:tiny", "apps": "builtin:small"}
NEAR = 10  # pixels around a place that must look the same
Pixels = NDArray[np.uint8]


@dataclass
class Figures:
    """What the episodes of one arm took together."""

    episodes: int = 0
    passed: int = 0
    actions: int = 0
    completions: int = 0
    tokens: int = 0
    model_s: float = 0.0
    env_s: float = 0.0

    def means(self) -> dict[str, float]:
        """Return the figures for an episode."""
        count = self.episodes
        each = {
            "success": self.passed,
            "actions": self.actions,
            "completions": self.completions,
            "tokens": self.tokens,
            "seconds": self.model_s + self.env_s,
            "model_s": self.model_s,
            "env_s": self.env_s,
        }
        means = {name: round(value / count, 4) for name, value in each.items()}
        return means | {
            "episodes": count,
            "actions_per_completion": round(self.actions / self.completions, 3),
        }


class Solution:
    """A policy that writes up to `most` of the next actions of the environment's own solution at once."""

    def __init__(
        self,
        config: Config,
        episode: PlannedEpisode,
        writer: ActionWriter,
        responder: Responder,
        *,
        visible: bool,
    ) -> None:
        self.tokens = 0
        self.model_s = self.env_s = 0.0
        self._answered_at: float | None = (
            None  # CPU seconds of this process at the newest completion
        )
        self._most = config.policy.max_actions
        self._visible = visible
        self._writer, self._responder = writer, responder
        self._twin = make_env(config.env.suite)
        self._screen, _ = self._twin.reset(seed=episode.seed, options={"task": episode.task})

    async def act(self, request: ActRequest) -> Completion:
        """Return the completion of the next actions, after the model has decoded as many tokens."""
        self.pause()
        completion = self._writer.completion(self._next(), request)
        tokens = len(completion.sampled)
        sampling = request.sampling.model_copy(update={"max_tokens": tokens})
        began = time.process_time()
        sampled = await self._responder.answer(request.model_copy(update={"sampling": sampling}))
        self.model_s += time.process_time() - began
        if len(sampled.sampled) != tokens:
            raise RuntimeError(f"the model drew {len(sampled.sampled)} tokens, not {tokens}")
        self.tokens += tokens
        self._answered_at = time.process_time()
        return completion

    def pause(self) -> None:
        """Count the time since the newest completion as the environment's."""
        if self._answered_at is not None:
            self.env_s += time.process_time() - self._answered_at
        self._answered_at = None

    def close(self) -> None:
        """Close the second environment."""
        self._twin.close()

    def _next(self) -> list[Action]:
        """Return the next actions, and perform them in the second environment."""
        actions: list[Action] = []
        first = pixels_of(self._screen)
        while len(actions) < self._most:
            action = self._twin.oracle_action()  # type: ignore[attr-defined]
            if actions and self._visible and not looks_the_same(action, first, self._screen):
                break
            actions.append(action)
            self._screen, _, terminated, truncated, _ = self._twin.step(action)
            if terminated or truncated or isinstance(action, Done | Fail | Answer):
                break
        return actions


def pixels_of(screen: Observation) -> Pixels:
    """Return a screenshot as an array [H, W, 3]."""
    with Image.open(io.BytesIO(screen.screenshot)) as image:
        return np.asarray(image.convert("RGB"))


def looks_the_same(action: Action, first: Pixels, now: Observation) -> bool:
    """Return True if the places of an action look as they did on the first screen of its completion."""
    path = getattr(action, "path", None) or [
        (getattr(action, "x", None), getattr(action, "y", None))
    ]
    present = pixels_of(now)
    for x, y in path:
        if x is None or y is None:
            continue
        area = slice(max(0, y - NEAR), y + NEAR + 1), slice(max(0, x - NEAR), x + NEAR + 1)
        if not np.array_equal(first[area], present[area]):
            return False
    return True


def tasks_of(suite: str) -> list[Task]:
    """Return the tasks that are played."""
    tasks = suites_tasks(suite, "train")
    names = {f"mini/{name}" for name in QUICKSTART}
    return [task for task in tasks if suite != "mini" or task.id in names]


def config_of(suite: str, most: int) -> Config:
    """Return the configuration of an arm."""
    return Config.model_validate(
        {
            "model": {"path": SUITES[suite]},
            "policy": {"max_actions": most},
            "env": {"suite": suite, "slots": 1},
            "rollout": {"device": "cpu", "threads": 1, "max_batch": 1, "max_tokens": 400},
        }
    )


async def play(suite: str, episodes: int, most: int) -> dict[str, dict[str, float]]:
    """Return the figures of each arm of a suite."""
    arms = {"1": (1, False), "visible": (most, True), str(most): (most, False)}
    configs = {name: config_of(suite, limit) for name, (limit, _) in arms.items()}
    figures = {name: Figures() for name in arms}
    # An engine for each arm, so that none has another's screens in its caches.
    models = {name: load_model(config) for name, config in configs.items()}
    for model in models.values():
        assert isinstance(model.engine, TransformersEngine)
        model.engine.policy.end_token_ids = ()  # it decodes as many tokens as it is asked for
    encoder = load_prompt_encoder(configs["1"])
    try:
        plan = plan_episodes(tasks_of(suite), episodes, first_seed=1000)
        for number, planned in enumerate([plan[0], *plan]):  # the first warms up
            for name, (_, visible) in arms.items():
                config, spec = configs[name], action_spec_of(configs[name])
                writer = ActionWriter(encoder, spec, config.rollout.max_tokens)
                policy = Solution(config, planned, writer, models[name].responder, visible=visible)
                env, sink = make_async_env(config.env, "solution"), MemorySink()
                try:
                    lease = lease_of(config, planned)
                    end = await play_episode(env, lease, planned.task, policy, sink, spec)
                    policy.pause()
                finally:
                    await env.close()
                    policy.close()
                if end.outcome != "pass":
                    raise RuntimeError(f"{planned.task.id}, seed {planned.seed}: {end.reason}")
                if not number:
                    continue
                arm, records = figures[name], sink.records
                arm.episodes += 1
                arm.passed += end.outcome == "pass"
                arm.actions += sum(1 + len(record.more_actions) for record in records)
                arm.completions += len(records)
                arm.tokens += policy.tokens
                arm.model_s += policy.model_s
                arm.env_s += policy.env_s
    finally:
        for model in models.values():
            await model.engine.close()
    return {name: arm.means() for name, arm in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Play both suites; print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--episodes", type=int, default=42, help="of each suite and arm")
    parser.add_argument("--actions", type=int, default=4, help="most actions of a completion")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for suite in options.suites:
        results[suite] = asyncio.run(play(suite, options.episodes, options.actions))
        print(suite, json.dumps(results[suite]), flush=True)
    names = {
        "actions_per_completion": "actions_per_completion",
        "completions_per_episode": "completions",
        "seconds_per_episode": "seconds",
    }
    line = json.dumps(
        {
            key: {
                suite: {arm: means[name] for arm, means in arms.items()}
                for suite, arms in results.items()
            }
            for key, name in names.items()
        }
        | {"several_actions": results}
    )
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()

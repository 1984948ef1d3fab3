"""Do BrowserGym's verdicts on what a policy does in MiniWoB++ agree with ours? A part of miniwob_learning.py.

    compare_verdicts   the policy plays in our suite, its actions are repeated in BrowserGym, both judge

Instances are the same: BrowserGym draws a page's seed from its own, and ours gets the drawn one. The policy sees
our screens alone: BrowserGym's have other sizes. It gets BrowserGym's ten steps, and our verdict is by the
published metric, which is BrowserGym's rule. Needs `scripts/setup-browsergym`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.miniwob_pages import page_of, task_of
from benchmarks.learning.miniwob_study import Study
from benchmarks.learning.study import Cell
from bus.errors import EnvError
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.player.chosen_model import chosen_weights, loaded_model
from dart_cli.player.episodes import PlannedEpisode, PlayedEpisode, answered_by, each_of, play
from dart_cli.runtime.role import limit_threads
from envs.contract.actions import Action, action_from_dict
from envs.contract.base import GuiEnv, Task
from envs.contract.registry import check_parts, find_task, make_env
from envs.suites.browsergym.tasks import benchmark_of

PAGES = (
    "click-test-2", "click-button", "click-link", "click-dialog-2", "click-color", "click-widget",
    "click-option", "click-checkboxes", "click-tab-2", "focus-text-2", "enter-text", "enter-password",
    "login-user", "simple-arithmetic", "identify-shape", "count-shape", "grid-coordinate", "drag-box",
    "click-button-sequence", "navigate-tree",
)  # fmt: skip
"""Pages without a clock, a drop-down list or the wheel, which both perform alike, and which both draw alike: in
BrowserGym's window email-inbox-delete has a scroll bar beside its list, so that the same click falls elsewhere."""

EACH = 5
"""Instances of each page."""
SCALE = 1.5
"""Pixels of BrowserGym's screenshots per pixel of the page."""


def compare_verdicts(
    study: Study, weights: Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Play, repeat, compare. Raises MissingPartError without BrowserGym's interpreter."""
    names = [f"browsergym/miniwob.{page}" for page in PAGES]
    check_parts("browsergym", {}, names)
    sets = [*study.sets_of(Cell("rl", 0)), 'env.options.metric="published"']
    config = load_config(study.config, sets)
    limit_threads(config.rollout.threads)
    tell(f"the policy plays {EACH * len(PAGES)} episodes")
    episodes = asyncio.run(_play(config, weights))
    tell("its actions are repeated in BrowserGym")
    scale = SCALE / float(config.env.options.get("scale", 1.0))
    env = make_env("browsergym")
    rows = []
    try:
        for number, episode in enumerate(episodes):
            rows.append(_row(env, episode, scale))
            if rows[-1]["ours"] != rows[-1]["browsergym"]:
                tell(f"differs: {rows[-1]}")
            if number % 20 == 19:
                tell(f"{number + 1} of {len(episodes)} episodes")
    finally:
        env.close()
    judged = [row for row in rows if "invalid" not in (row["ours"], row["browsergym"])]
    return {
        "model": study.model,
        "weights": str(weights or ""),
        "pages": len(PAGES),
        "episodes": len(rows),
        "judged": len(judged),
        "passes": sum(row["ours"] == "pass" for row in judged),
        "browsergym_passes": sum(row["browsergym"] == "pass" for row in judged),
        "equal": sum(row["ours"] == row["browsergym"] for row in judged),
        "differing": [row for row in judged if row["ours"] != row["browsergym"]],
    }


def drawn_seed(seed: int) -> int:
    """Return the seed that BrowserGym passes to a page, drawn from its own seed."""
    return int(np.random.RandomState(seed).randint(0, 1_000_000))


async def _play(config: Config, weights: Path | None) -> list[PlayedEpisode]:
    """Return the policy's episodes, in the order of the plan."""
    steps = benchmark_of("miniwob.x").max_steps
    plan = []
    for page in PAGES:
        task = replace(find_task("miniwob", task_of(page)), max_steps=steps)
        plan += [
            PlannedEpisode(task, drawn_seed(seed), name=f"{page}/{seed}") for seed in range(EACH)
        ]
    over: list[PlayedEpisode] = []
    directory, version = chosen_weights(config, weights) if weights else (None, -1)
    async with loaded_model(config, directory, version) as model:
        answered = answered_by(config, model.responder)
        await play(config, each_of(plan), answered, over.append, most=len(plan))
    order = {episode.name: number for number, episode in enumerate(plan)}
    return sorted(over, key=lambda episode: order[episode.planned.name])


def _row(env: GuiEnv, episode: PlayedEpisode, scale: float) -> dict[str, Any]:
    """Return both verdicts on one episode."""
    page, seed = page_of(episode.task.id), int(episode.planned.name.rpartition("/")[2])
    task = find_task("browsergym", f"browsergym/miniwob.{page}")
    actions = [
        _scaled(action_from_dict(record.action), scale)
        for record in episode.records
        if record.action is not None
    ]
    row = {"page": page, "seed": seed, "steps": len(actions), "ours": episode.end.outcome}
    return {**row, "browsergym": _repeated(env, task, seed, actions)}


def _repeated(env: GuiEnv, task: Task, seed: int, actions: Sequence[Action]) -> str:
    """Return BrowserGym's verdict after these actions."""
    try:
        env.reset(seed=seed, options={"task": task})
        for action in actions:
            if env.step(action)[2]:
                break
        return env.evaluate().outcome
    except EnvError:
        return "invalid"


def _scaled(action: Action, scale: float) -> Action:
    """Return the action in pixels of BrowserGym's screenshots."""
    changed: dict[str, Any] = {
        axis: round(value * scale)
        for axis in ("x", "y")
        if (value := getattr(action, axis, None)) is not None
    }
    if path := getattr(action, "path", None):
        changed["path"] = [(round(x * scale), round(y * scale)) for x, y in path]
    return action.model_copy(update=changed) if changed else action

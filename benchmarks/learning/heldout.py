"""How well do weight sets of one run do on held-out episodes? They are points of a learning curve.

    python benchmarks/learning/heldout.py CONFIG --set run.dir=runs/a 0:180 50:180 100:720

Each VERSION:EPISODES is a published weight set and how many held-out episodes it plays, sampled as in
training; the episodes are those of `dart eval`, the same for every version. It runs in one process. The last
line is JSON: version -> task -> [passed, evaluated, steps of those].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.config.endpoints import weights_dir
from dart_cli.config.load import load_config
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import trained_tasks
from dart_cli.player.episodes import PlayedEpisode, answered_by, each_of, plan_episodes
from dart_cli.player.episodes import play as play_episodes
from dart_cli.rollout.worker import load_model
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.weights.manifest import path_of

Scores = dict[int, dict[str, list[int]]]


def main() -> None:
    """Play the weight sets that the command line names, and print their scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("plans", nargs="+", metavar="VERSION:EPISODES")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.set)
    limit_threads(config.rollout.threads)
    end_with_parent()
    plans = [tuple(map(int, each.split(":"))) for each in arguments.plans]
    print(json.dumps(asyncio.run(play(config, plans))))


async def play(config: Config, plans: list[tuple[int, ...]]) -> Scores:
    """Return the scores of each version, which are played one after another."""
    tasks = trained_tasks(config)
    model = await asyncio.to_thread(load_model, config)
    by_version: Scores = {}
    try:
        for version, count in plans:
            await model.engine.update_weights(path_of(weights_dir(config), version), version)
            episodes = plan_episodes(tasks, count, TRAIN_SEEDS)
            scores = by_version[version] = {task.id: [0, 0, 0] for task in tasks}
            episodes_played: list[PlayedEpisode] = []
            answered = answered_by(config, model.responder)
            await play_episodes(
                config, each_of(episodes), answered, episodes_played.append, most=count
            )
            for episode in episodes_played:
                if episode.end.outcome != "invalid":
                    score = scores[episode.task.id]
                    score[0] += episode.end.outcome == "pass"
                    score[1] += 1
                    score[2] += episode.end.steps
            print(f"v{version}: {count} episodes", file=sys.stderr, flush=True)
    finally:
        await model.engine.close()
    return by_version


if __name__ == "__main__":
    main()

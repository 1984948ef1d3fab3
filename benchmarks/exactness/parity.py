"""Do engines and trainer agree, for every class of model, before and after live updates?

    python benchmarks/exactness/parity.py [--updates 20] [--engines transformers vllm] [--models qwen3_vl]
        [--set vllm.KEY=VALUE] [--out benchmarks/results/parity.json]

For each class a small random folder (scripts/small_models.py) in float32. An engine plays
multi-turn trajectories whose prompts show none, one and several screens, at each temperature; the
trainer's forward pass scores the same tokens; then the trainer makes a real update on them, publishes,
and the engine takes the weights while another trial is being played, and so on. Compared are
tokens that one version alone sampled, with the weights of that version. `moved` is how far the
policy has gone by the end: what a mismatch would look like. vLLM takes part where it is installed.
The limit is rounding in float32; the last line is JSON, and the exit code is 1 beyond 1e-4.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import DartError
from bus.messages import Batch
from dart_cli.config.load import config_of_model
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.doctor.logprob_check import Trial, play_trial
from dart_cli.engines.base import Model
from dart_cli.engines.responder import PolicyResponder
from dart_cli.rollout.worker import load_model
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import SCREENS, ComparedTokens, concatenate, rescore
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import FileChannel
from scripts.small_models import FAMILIES, build

LIMIT = 1e-4  # nats, float32: the largest is 4e-5 with recurrent layers (qwen3_5), without 5e-6
TEMPERATURES = (0.7, 1.0)
UPDATE_S = 300.0  # a weight update that takes longer is an error


def main() -> None:
    """Compare every class with every engine; print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--engines", nargs="+", default=engines_here(), choices=MODEL_ENGINES)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="dart-parity-") as scratch:
        for model_type in options.models:
            folder = build(model_type, Path(scratch) / model_type)
            for engine in options.engines:
                config = config_of_model(
                    folder, [*settings(engine, options.updates), *options.overrides]
                )
                began = time.monotonic()
                weights = FileChannel(Path(scratch) / f"{model_type}-{engine}")
                try:
                    comparisons = asyncio.run(compare(config, options.updates, weights))
                except DartError as error:
                    parser.exit(error.exit_code, f"error: {error}\n")
                rows.append(
                    {"model": model_type, "engine": engine, **comparisons.as_json()}
                    | {"seconds": round(time.monotonic() - began, 1)}
                )
                print(rows[-1], flush=True)
    result = {
        "benchmark": "parity",
        "unit": "nats",
        "max_abs_logprob_diff": max(row["max_abs_logprob_diff"] for row in rows),
        "updates": options.updates,
        "models": options.models,
        "engines": options.engines,
        "temperatures": TEMPERATURES,
        "dtype": "float32",
        "limit": LIMIT,
        "rows": rows,
    }
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    sys.exit(int(not result["max_abs_logprob_diff"] <= LIMIT))


def engines_here() -> list[str]:
    """Return the engines whose packages are installed; each is called as its package."""
    return [name for name in MODEL_ENGINES if importlib.util.find_spec(name) is not None]


def settings(engine: str, updates: int) -> list[str]:
    """Return the configuration's settings beside the model."""
    return [
        f"rollout.engine={engine}",
        "rollout.max_batch=16",
        f"train.updates={updates}",
        "train.lr=3e-4",
        "train.parity_every=0",  # here the numbers are reported, however large
    ]


@dataclass
class Comparisons:
    """The comparisons of one model with one engine."""

    at: dict[float, list[ComparedTokens]] = field(
        default_factory=lambda: {t: [] for t in TEMPERATURES}
    )
    in_flight: list[ComparedTokens] = field(default_factory=list)
    before: float = 0.0  # largest difference before the first update
    mixed: int = 0  # completions during which an update happened
    moved: float = 0.0  # mean difference of first and last weights, nats

    def as_json(self) -> dict[str, object]:
        """Return the differences as values of JSON."""
        by_temperature = {t: concatenate(parts) for t, parts in self.at.items()}
        whole = concatenate([*by_temperature.values(), *self.in_flight])
        mismatch = whole.mismatch()
        return {
            "max_abs_logprob_diff": mismatch.max,
            "before_updates": self.before,
            "tokens": mismatch.tokens,
            "p99": mismatch.p99,
            "k3_kl": mismatch.kl,
            "by_screens": {kind: difference.max for kind, difference in whole.by_screens().items()},
            "by_temperature": {str(t): part.mismatch().max for t, part in by_temperature.items()},
            "sampled_beside_an_update": concatenate(self.in_flight).mismatch().tokens,
            "met_an_update": self.mixed,
            "moved": self.moved,
        }


async def compare(config: Config, updates: int, weights: FileChannel) -> Comparisons:
    """Play, score, train, publish, update; `updates` times."""
    learner = PolicyLearner(TrainModel.load(config), config.train)
    model = await asyncio.to_thread(load_model, config)
    comparisons = Comparisons()
    kinds = set(SCREENS) - ({"text"} if config.policy.pointing == "pointer" else set())
    try:
        first = weights.publish(learner.model.weights(), 0)
        await asyncio.wait_for(model.engine.update_weights(first.path, 0), UPDATE_S)
        opening: Batch | None = None
        for version in range(updates + 1):
            batches = [await trial(model, t, 100 * version + n) for n, t in enumerate(TEMPERATURES)]
            for temperature, batch in zip(TEMPERATURES, batches, strict=True):
                compared = await asyncio.to_thread(rescore, learner.model, batch, 4096)
                check(compared, version, kinds)
                comparisons.at[temperature].append(compared)
            if version == 0:
                opening = batches[0]
                comparisons.before = max(
                    parts[0].mismatch().max for parts in comparisons.at.values()
                )
            if version == updates:
                break
            # One with the temperature of either, in turns.
            updated = await asyncio.to_thread(
                learner.update, batches[version % 2], version, version
            )
            assert updated.applied, updated.note
            published = weights.publish(learner.model.weights(), version + 1)
            beside = asyncio.create_task(trial(model, 1.0, 100 * version + 50))
            await asyncio.wait_for(
                model.engine.update_weights(published.path, version + 1), UPDATE_S
            )
            await count_in_flight(comparisons, learner.model, await beside, version + 1)
        if opening is not None:
            comparisons.moved = rescore(learner.model, opening, 4096).mismatch().mean
    finally:
        await model.engine.close()
    return comparisons


async def trial(model: Model, temperature: float, seed: int) -> Batch:
    """Return a few short trajectories."""
    assert isinstance(model.responder, PolicyResponder)
    options = Trial(temperature, max_tokens=8, trajectories=3, texts=2, seed=seed)
    return await play_trial(model.responder.policy, model.engine, model.responder, options)


async def count_in_flight(
    comparisons: Comparisons, model: TrainModel, batch: Batch, version: int
) -> None:
    """Count what was sampled beside an update, and compare the part that the new weights sampled."""
    comparisons.mixed += sum(len(sample.version_spans) > 1 for sample in batch.samples)
    compared = await asyncio.to_thread(rescore, model, batch, 4096)
    comparisons.in_flight.append(compared.only(compared.versions == version))


def check(compared: ComparedTokens, version: int, kinds: set[str]) -> None:
    """Raise SystemExit unless these weights sampled all tokens, on prompts of every kind."""
    versions: Sequence[int] = sorted(set(compared.versions.tolist()))
    if versions != [version] or set(compared.by_screens()) != kinds:
        raise SystemExit(f"v{version} served, sampled {versions} on {list(compared.by_screens())}")


if __name__ == "__main__":
    main()

"""How far are engine and trainer apart in a mixture of experts, with the rollout's choice replayed and without?

    python benchmarks/exactness/routing.py [--trajectories 12] [--models qwen3_5_moe] [--dtypes bfloat16]
        [--out benchmarks/results/moe.json]

For each class of mixtures a small random folder (scripts/small_models.py) with more layers and experts than the
tests have. The transformers engine plays multi-turn trajectories whose prompts show none, one and several screens,
and records the experts of each token. The trainer's forward pass scores the same tokens under the same weights, once
with these experts and once with its own routers' choice, which is the baseline. The limit is rounding in the dtype.
The weights are random, so that experts score alike less often than in a trained mixture with 128 or 256 of them. The
last line is JSON; `bytes_per_token` are those of the published models.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.messages import Batch
from dart_cli.config.architecture import FULL, LINEAR, MIXTURES, shape_of
from dart_cli.config.load import config_of_model
from dart_cli.config.published import PUBLISHED
from dart_cli.doctor.logprob_check import Trial, play_trial
from dart_cli.rollout.worker import load_model
from dart_cli.train.logprob_check import rescore
from dart_cli.train.packs.pack import PackFeed
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from scripts.small_models import FAMILIES, build

PACK = 4096
SIZES = {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}


def main() -> None:
    """Compare every class in every dtype; print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trajectories", type=int, default=12)
    parser.add_argument("--models", nargs="+", default=list(MIXTURES), choices=list(MIXTURES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="dart-routing-") as scratch:
        for kind in options.models:
            folder = build(kind, Path(scratch) / kind, sizes=_sizes(kind))
            for dtype in options.dtypes:
                rows.append(_row(kind, folder, dtype, options.trajectories))
                print(rows[-1], flush=True)
    result = {
        "benchmark": "routing",
        "unit": "nats",
        "sizes": SIZES,
        "rows": rows,
        "bytes_per_token": {
            each.checkpoint: shape_of({**each.tree, "model_type": kind}).routing_bytes
            for kind, each in PUBLISHED.items()
            if kind in MIXTURES
        },
    }
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def _sizes(kind: str) -> dict[str, Any]:
    """Return the config.json of a small mixture with SIZES."""
    tree = copy.deepcopy(dict(FAMILIES[kind].config))
    tree["text_config"] |= SIZES
    if "layer_types" in tree["text_config"]:
        tree["text_config"]["layer_types"] = [LINEAR, LINEAR, LINEAR, FULL] * 2
    return tree


def _row(kind: str, folder: Path, dtype: str, trajectories: int) -> dict[str, object]:
    """Return the numbers of one class in one dtype."""
    began = time.monotonic()
    config = config_of_model(folder, [f"model.dtype={dtype}", "rollout.max_batch=16"])
    trial = Trial(temperature=1.0, max_tokens=48, trajectories=trajectories)
    batch = asyncio.run(_play(config, trial))
    model = TrainModel.load_frozen(config)
    with_replay = rescore(model, batch, PACK).mismatch()
    without = rescore(replace(model, replays=False), batch, PACK).mismatch()
    differing, recorded = _choices(model, batch)
    return {
        "model": kind,
        "dtype": dtype,
        "tokens": with_replay.tokens,
        "parity_nats_replay": with_replay.mean,
        "parity_nats_without": without.mean,
        "parity_max_replay": with_replay.max,
        "parity_max_without": without.max,
        "choices_that_differ": differing / recorded,
        "choices": recorded,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _play(config: Any, trial: Trial) -> Batch:
    """Return a trial that the configured engine has sampled."""
    model = load_model(config)
    try:
        return await play_trial(model.responder.policy, model.engine, model.responder, trial)
    finally:
        await model.engine.close()


@torch.no_grad()
def _choices(model: TrainModel, batch: Batch) -> tuple[int, int]:
    """Return how many choices the trainer's routers would have made otherwise, and how many are replayed."""
    [part] = packed_batches(batch, model.policy, pack_tokens=PACK)
    differing = recorded = 0
    with PackFeed(part, [1.0] * len(part.batch.samples), model.policy) as packs:
        for pack in packs:
            model.score(pack, batch.temperature)
            assert pack.inputs.replay is not None
            one, other = pack.inputs.replay.counts()
            differing, recorded = differing + one, recorded + other
    return differing, recorded


if __name__ == "__main__":
    main()

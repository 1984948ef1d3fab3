"""Faults of an engine that would go unseen, injected one at a time: the log-probability check finds each.

The engine serves a version that the trainer has published, as in a run, and is broken in one place. Without
a fault there is no alarm. Episodes that vanish are the ledger's (tests/inspection/test_stats.py),
pixels that reach neither side are sight's (test_sight.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.schema import Config, LoraConfig
from dart_cli.engines.caches import FeatureCache, PrefixCache
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.train.learner import PolicyLearner, Update
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load
from tests.weights.sets import publish

Fault = Callable[[pytest.MonkeyPatch, TransformersEngine], None]
LORA = LoraConfig(rank=4)


def an_old_prefix_cache(patch: pytest.MonkeyPatch, _engine: TransformersEngine) -> None:
    patch.setattr(PrefixCache, "clear", lambda _cache: None)


def old_features_of_screens(patch: pytest.MonkeyPatch, _engine: TransformersEngine) -> None:
    patch.setattr(FeatureCache, "clear", lambda _cache: None)


def screens_in_another_order(patch: pytest.MonkeyPatch, _engine: TransformersEngine) -> None:
    of = FeatureCache.of_images

    def reversed_order(cache: FeatureCache, policy: Any, images: Any) -> Any:
        result = of(cache, policy, images)
        deep = tuple(tuple(reversed(level)) for level in result.deepstack)
        return replace(result, embeds=tuple(reversed(result.embeds)), deepstack=deep)

    patch.setattr(FeatureCache, "of_images", reversed_order)


def half_of_the_weights(patch: pytest.MonkeyPatch, engine: TransformersEngine) -> None:
    place = engine._place

    def placed(swap: Any) -> None:
        for name, tensor in list(weight_tensors(engine.policy.model).items())[::2]:
            swap.tensors[name] = tensor.detach().clone()
        place(swap)

    patch.setattr(engine, "_place", placed)


def none_of_the_weights(patch: pytest.MonkeyPatch, engine: TransformersEngine) -> None:
    patch.setattr(engine, "_place", lambda swap: swap.tensors.clear())


def other_temperature(patch: pytest.MonkeyPatch, engine: TransformersEngine) -> None:
    submit = engine.generate

    async def cooler(request: Any) -> Any:
        return await submit(
            replace(request, sampling=request.sampling.model_copy(update={"temperature": 0.8}))
        )

    patch.setattr(engine, "generate", cooler)


@pytest.mark.parametrize("lora", [None, LORA])
def test_without_a_fault_there_is_no_alarm(
    config: Config, play: Any, tmp_path: Path, lora: LoraConfig | None
) -> None:
    update = second_update(config, play, tmp_path, lora, lambda _: None)
    assert update.applied, update.alarm


@pytest.mark.parametrize(
    ("fault", "lora"),
    [
        (an_old_prefix_cache, None),
        (old_features_of_screens, None),
        (screens_in_another_order, None),
        (half_of_the_weights, None),
        (none_of_the_weights, LORA),  # adapters that never reached the engine
        (other_temperature, None),
    ],
)
def test_the_check_finds(
    config: Config,
    play: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    lora: LoraConfig | None,
) -> None:
    update = second_update(config, play, tmp_path, lora, lambda engine: fault(monkeypatch, engine))
    assert not update.applied
    assert "engine and trainer disagree" in update.alarm
    assert re.search(r"first token \d+ of step \d+ of \S+, v1: ", update.alarm)


def second_update(
    config: Config,
    play: Any,
    folder: Path,
    lora: LoraConfig | None,
    break_it: Callable[[TransformersEngine], None],
) -> Update:
    """Update on steps of the first weights, then on steps that the broken engine played with the second."""
    model = config.model.model_copy(update={"lora": lora})
    train = config.train.model_copy(update={"lr": 0.01})
    config = config.model_copy(update={"model": model, "train": train})
    learner = PolicyLearner(TrainModel.load(config), config.train)
    engine = TransformersEngine(
        load_policy(config.model.path, lora=lora), load_weights=load, max_batch=32
    )
    try:
        break_it(engine)
        first = learner.update(play(engine, 8, 3), 0)
        assert first.applied, first.note or first.alarm
        published = publish(learner.model.weights(), folder, 1)
        asyncio.run(engine.update_weights(published.path, 1))
        batch = play(engine, 8, 3, batch_id=2)
        versions = {span.version for each in batch.samples for span in each.version_spans}
        assert versions == {1}
        return learner.update(batch, 1, policy_version=1)
    finally:
        asyncio.run(engine.close())

"""Which keys, values and features an engine keeps when its weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dart_cli.engines import caches
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.caches import NO_VISION, vision_digest
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.weights.file import load
from tests.engines.exact import Weights, largest_error, random_versions
from tests.weights.sets import publish

Asker = Callable[..., GenerateRequest]
EXACT = 1e-4  # nats


def test_a_digest_of_the_vision_tower_changes_with_it_alone(
    policy: LoadedPolicy, tmp_path: Path
) -> None:
    [start] = random_versions(policy, 1)
    vision = next(name for name in start if "visual." in name)
    text = next(name for name in start if "visual." not in name)
    changes: list[Weights] = [{}, {text: start[text] + 1}, {vision: start[vision] + 1}]
    found = [
        vision_digest(publish(start | change, tmp_path, number).path)
        for number, change in enumerate(changes)
    ]
    assert found[0] == found[1] != found[2]
    assert vision_digest(publish({text: start[text]}, tmp_path, 7).path) == NO_VISION
    assert vision_digest(tmp_path / "absent") is None


def prefilled(engine: TransformersEngine) -> int:
    return int(engine.gauges()["prefilled_tokens"])


def test_a_prompt_is_computed_anew_under_other_weights(
    policy: LoadedPolicy, ask: Asker, tmp_path: Path
) -> None:
    versions = random_versions(policy, 2)
    path = publish(versions[1], tmp_path, 1).path
    request = ask(1, past_images=2)
    length = len(request.prompt_token_ids)

    async def played() -> list[tuple[int, Any]]:
        engine = TransformersEngine(policy, load_weights=load)
        found = []
        try:
            for number in range(3):
                if number == 2:
                    await engine.update_weights(path, 1)
                before = prefilled(engine)
                generation = await engine.generate(request)
                found.append((prefilled(engine) - before, generation))
        finally:
            await engine.close()
        return found

    (first, _), (second, _), (third, fresh) = asyncio.run(played())
    assert (first, third) == (length, length)
    assert second < length // 4
    assert largest_error(policy, request, fresh, versions) < EXACT


@pytest.mark.parametrize("changes", [True, False])
def test_features_of_screens_stay_while_the_vision_tower_does(
    policy: LoadedPolicy,
    ask: Asker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    changes: bool,
) -> None:
    [start] = random_versions(policy, 1)
    moved = {
        name: tensor * 1.2 if changes or "visual." not in name else tensor
        for name, tensor in start.items()
    }
    versions = [start, moved]
    paths = [publish(each, tmp_path, number).path for number, each in enumerate(versions)]
    request = ask(1, past_images=2)
    encoded: list[int] = []
    original = caches.image_features

    def counted(model: torch.nn.Module, images: Any) -> Any:
        encoded.append(len(images))
        return original(model, images)

    monkeypatch.setattr(caches, "image_features", counted)

    async def played() -> Any:
        engine = TransformersEngine(policy, load_weights=load)
        try:
            await engine.update_weights(paths[0], 0)
            await engine.generate(request)
            await engine.update_weights(paths[1], 1)
            return await engine.generate(request)
        finally:
            await engine.close()

    generation = asyncio.run(played())
    assert sum(encoded) == (6 if changes else 3)
    assert largest_error(policy, request, generation, versions) < EXACT

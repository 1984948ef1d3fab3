"""Screens are prepared once, and go through a frozen tower once in an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bus.errors import EngineError
from dart_cli.policy.forward import ImageFeatures, image_features
from dart_cli.policy.images import ImagePreparer, PreparedImage
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.packs import pack as feed
from dart_cli.train.packs.pack import PackFeed
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from tests.train.test_packs import config_of
from tests.train.trees import tree_batch

Family = Callable[[str], Path]

FROZEN = {"freeze_vision": True}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each image goes through a tower outside a pack's pass."""
    count: Counter[str] = Counter()

    def counted(model: object, images: Sequence[PreparedImage]) -> ImageFeatures:
        count.update(image.key for image in images)
        return image_features(model, images)  # type: ignore[arg-type]

    monkeypatch.setattr(feed, "image_features", counted)
    return count


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each image is decoded."""
    count: Counter[str] = Counter()
    prepare = ImagePreparer._prepare

    def counted(self: ImagePreparer, key: str, encoded: bytes) -> PreparedImage:
        count[key] += 1
        return prepare(self, key, encoded)

    monkeypatch.setattr(ImagePreparer, "_prepare", counted)
    return count


def test_a_frozen_tower_sees_each_screen_once_in_an_update_with_a_reference(
    family: Family, computed: Counter[str], prepared: Counter[str]
) -> None:
    config = config_of(family("qwen3_vl"), kl_beta=0.1, pack_tokens=300, **FROZEN)
    model = TrainModel.load(config)
    model.policy.images.cache_bytes = 0
    batch = tree_batch(model.policy)
    [part] = packed_batches(batch, model.policy, pack_tokens=300)
    expected = Counter(name for chain in part.batch.chains for name in chain.image_hashes)
    assert len(part.packs) > 3
    assert max(expected.values()) > 1
    assert PolicyLearner(model, config.train).update(batch, 0).applied
    assert set(computed) == set(expected)
    assert set(computed.values()) == {1}
    assert set(prepared.values()) == {1}


def test_the_reference_has_no_tower_of_its_own_where_it_is_frozen(family: Family) -> None:
    model = TrainModel.load(config_of(family("qwen2_5_vl"), kl_beta=0.1, **FROZEN))
    assert model.reference is not None
    towers = [each.model.model.visual for each in (model.policy, model.reference)]
    assert towers[0] is towers[1]


def test_features_are_those_of_the_tower_in_the_pass(family: Family) -> None:
    """Test it also if only some screens of a pack are new, in the order of every class."""
    for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        model = TrainModel.load(config_of(family(model_type), **FROZEN))
        batch = tree_batch(model.policy, seed=3)
        [part] = packed_batches(batch, model.policy, pack_tokens=300)
        weights = [1.0] * len(part.batch.samples)
        with PackFeed(part, weights, model.policy) as packs, torch.no_grad():
            result = [model.score(pack, 1.0).logprobs for pack in packs]
        inner = model.policy.model.model
        inner.visual.requires_grad_(True)
        with PackFeed(part, weights, model.policy) as packs, torch.no_grad():
            for pack, logprobs in zip(packs, result, strict=True):
                assert pack.features is None
                assert torch.allclose(model.score(pack, 1.0).logprobs, logprobs, atol=1e-5)


def test_features_hold_no_pixels(family: Family) -> None:
    """An empty view would keep the whole screen in memory."""
    model = TrainModel.load(config_of(family("qwen2_5_vl"), **FROZEN))
    [part] = packed_batches(tree_batch(model.policy), model.policy, pack_tokens=300)
    with PackFeed(part, [1.0] * len(part.batch.samples), model.policy) as packs:
        pack = next(iter(packs))
    assert pack.inputs.images
    assert all(not each.pixels.untyped_storage().nbytes() for each in pack.inputs.images)


def test_a_trained_tower_gets_each_screen_prepared_and_few_are_held(
    family: Family, prepared: Counter[str]
) -> None:
    model = TrainModel.load(config_of(family("qwen2_vl")))
    batch = tree_batch(model.policy)
    [part] = packed_batches(batch, model.policy, pack_tokens=300)
    weights = [1.0] * len(part.batch.samples)
    with PackFeed(part, weights, model.policy) as packs:
        for pack in packs:
            assert all(len(image.patches) for image in pack.inputs.images)
            present = {*(image.key for image in pack.inputs.images), *packs._waiting}
            assert len(present) < len(batch.images)
    assert set(prepared.values()) == {1}  # the preparer's cache has room for them


def test_a_screen_that_does_not_decode_ends_the_pass_with_its_line(family: Family) -> None:
    model = TrainModel.load(config_of(family("qwen2_vl")))
    batch = tree_batch(model.policy)
    [part] = packed_batches(batch, model.policy, pack_tokens=300)
    name = next(iter(part.batch.images))
    broken = {**part.batch.images, name: part.batch.images[name][:-20]}
    spoilt = part.model_copy(update={"batch": part.batch.model_copy(update={"images": broken})})
    weights = [1.0] * len(part.batch.samples)
    with pytest.raises(EngineError), PackFeed(spoilt, weights, model.policy) as packs:
        list(packs)

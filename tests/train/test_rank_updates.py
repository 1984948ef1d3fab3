"""Promises of an update on several ranks: it is the update of one, whatever the recipe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.messages import Batch, Chain, Sample
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, LoraConfig, PolicyConfig, TeacherConfig
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy
from tests.train import rank_cases
from tests.train.another_model import another
from tests.train.conftest import Play
from tests.train.rank_cases import Case
from tests.train.trees import tree_batch, with_hints
from tests.train.world import run_world

CLASSES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
TOLERANCE = 1e-5  # relative
ROUNDING = {"qwen3_5": 30, "qwen3_5_moe": 30}
"""By class, what multiplies the three limits: other packs alone change gradients of its four layers by up to
1e-4 in float32 (1e-9 in float64, tests/train/test_packs.py)."""
NATS = 5e-6  # of a log-probability's rounding
MOVED = 1e-3  # of how far an update moved the weights
NO_GRADIENT = ("pointer_head.key_out.bias",)
"""It adds the same to all logits of a pointer: its gradient is rounding, of which AdamW makes steps."""


def changed(config: Config, *, model: dict[str, Any] | None = None, **train: Any) -> Config:
    """The configuration with other keys of [train] and [model]."""
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "model": config.model.model_copy(update=model or {}),
        }
    )


def with_text(batch: Batch) -> Batch:
    """The batch and a sample of text alone, longer than the others' text."""
    chain = Chain(token_ids=int32s(range(20, 220)), image_hashes=[])
    sample = Sample(
        group_id="g9",
        trajectory_id="text",
        step=0,
        chain=len(batch.chains),
        start=180,
        end=200,
        images=0,
        behaviour_logprobs=float64s([-5.0] * 20),
        version_spans=[],
        advantage=0.7,
        weight=1.0,
    )
    return batch.model_copy(
        update={"chains": [*batch.chains, chain], "samples": [*batch.samples, sample]}
    )


def weighing(batch: Batch, weights: Callable[[int], float]) -> Batch:
    """The batch with other weights of its samples."""
    samples = [
        sample.model_copy(update={"weight": weights(index)})
        for index, sample in enumerate(batch.samples)
    ]
    return batch.model_copy(update={"samples": samples})


def pointers(folder: Path, make_config: Callable[[Path], Config], recipe: dict[str, Any]) -> Case:
    """Return packs that point and packs of text: ranks without a pointer take part in the head's sums."""
    config = changed(make_config(folder), parity_every=0, **recipe).model_copy(
        update={"policy": PolicyConfig(pointing="pointer")}
    )
    policy = load_policy(folder, pointing="pointer")
    return config, [with_text(tree_batch(policy, seed, groups=1)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def cases(
    tiny_folder: Path,
    batches: list[Batch],
    make_config: Callable[[Path], Config],
    family: Callable[[str], Path],
    play: Play,
    pointer_folder: Callable[[str], Path],
) -> dict[str, Case]:
    """Return recipes, each with the batches of two updates."""
    # A cap that no weight is at: the weights of tokens just sampled are 1 up to rounding.
    # A small step: AdamW turns the rounding of a gradient near 0 into a whole one.
    recipe = {"lr": 1e-5}
    tiny = changed(make_config(tiny_folder), **recipe)
    two, policy = batches[:2], load_policy(tiny_folder)
    results: dict[str, Case] = {}
    for kind in CLASSES:
        folder = family(kind)
        engine = TransformersEngine(load_policy(folder), max_batch=32, records_routing=True)
        played = [play(engine, 3, 2, 1.0, number) for number in (1, 2)]
        asyncio.run(engine.close())
        results[kind] = changed(make_config(folder), pack_tokens=1024, **recipe), played
    everything = {"kl_beta": 0.1}
    mixture, played = results["qwen3_vl_moe"]
    lora = LoraConfig(rank=4, alpha=8.0)
    results["experts under adapters"] = (
        changed(mixture, model={"lora": lora}, **everything),
        played[:1],
    )
    skipping = [two[0], weighing(two[1], lambda _: 0.0)]
    return results | {
        "a KL": (changed(tiny, **everything), two),
        "a frozen tower": (changed(tiny, model={"freeze_vision": True}, **everything), two),
        "layers computed again": (changed(tiny, correction="ratio", recompute="layer"), two),
        "no weights": (tiny, skipping),
        "one pack": (
            changed(tiny, pack_tokens=100_000),
            [weighing(b, lambda i: float(i < 2)) for b in two],
        ),
        "text alone": (tiny, [with_text(batch) for batch in two]),
        "adapters": (
            changed(tiny, model={"lora": LoraConfig(rank=4, alpha=8.0)}, **everything),
            two[:1],  # from the second on A's gradient is that of what AdamW made of B's rounding
        ),
        "other weights looked back at": (changed(tiny, parity_every=1), two),
        "trained on again": (
            changed(tiny, reuse=1),
            [two[0], two[1].model_copy(update={"reuse": 1})],
        ),
        "a teacher": (
            changed(tiny, model={"freeze_vision": True}, teacher_weight=0.5).model_copy(
                update={"teacher": TeacherConfig(model=str(another(tiny_folder)))}
            ),
            [with_text(batch) for batch in two],
        ),
        "hints": (
            changed(tiny, teacher_weight=0.5).model_copy(
                update={"teacher": TeacherConfig(hints=True)}
            ),
            # The hints of the second batch are all of one step, so most ranks have none of their own.
            [
                with_hints(two[0], policy),
                with_hints(with_text(two[1]), policy, most=1),
            ],
        ),
        "hints for a teacher": (
            changed(tiny, teacher_weight=1.0).model_copy(
                update={"teacher": TeacherConfig(model=str(another(tiny_folder)), hints=True)}
            ),
            [with_hints(batch, policy) for batch in two],
        ),
        "pointers": pointers(pointer_folder("qwen2_5_vl"), make_config, recipe | everything),
    }


@pytest.fixture(scope="module")
def on_one(cases: dict[str, Case]) -> dict[str, Any]:
    return {name: rank_cases.alone(*case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def on_many(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """Return on_many(size) -> the results of the cases on so many ranks."""

    @cache
    def results(size: int) -> dict[str, Any]:
        chosen = {name: cases[name] for name in NAMES[size]}
        folder = tmp_path_factory.mktemp("world")
        result: dict[str, Any] = run_world(size, rank_cases.updated, folder, chosen)[0]
        return result

    return results


NAMES = {
    2: (
        *("qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "experts under adapters"),
        *("a frozen tower", "layers computed again", "no weights"),
        *("other weights looked back at", "trained on again"),
    ),
    # Shards that do not divide evenly, ranks without a pack or without a screen.
    3: (
        *("qwen2_5_vl", "a KL", "one pack", "text alone", "adapters", "pointers"),
        *("a teacher", "hints", "hints for a teacher"),
    ),
}
"""Cases by the number of ranks."""


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in NAMES.items() for name in names]
)
def test_ranks_compute_the_update_of_one(
    size: int,
    name: str,
    on_one: dict[str, Any],
    on_many: Callable[[int], dict[str, Any]],
) -> None:
    same(on_many(size)[name], on_one[name], ROUNDING.get(name, 1))


@pytest.mark.parametrize("size", NAMES)
def test_what_ranks_gather_for_a_channel_is_what_they_hold(
    size: int, on_many: Callable[[int], dict[str, Any]]
) -> None:
    """Compare byte for byte, including frozen towers and adapters."""
    for name in NAMES[size]:
        streamed, whole = on_many(size)[name]["digests"]
        assert streamed == whole, name


def same(actual: dict[str, Any], expected: dict[str, Any], rounding: int) -> None:
    assert actual["told"] == expected["told"]
    for mine, theirs in zip(actual["metrics"], expected["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if (
                name == "importance_truncated_fraction"
            ):  # of fresh tokens rounding decides on which side of 1 they are
                continue
            assert mine[name] == pytest.approx(value, **tolerance(name, rounding)), name
    for mine, theirs in zip(actual["mismatches"], expected["mismatches"], strict=True):
        assert [each[:2] for each in mine] == [each[:2] for each in theirs]
        assert np.allclose([e[2:] for e in mine], [e[2:] for e in theirs], atol=rounding * NATS)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for key, gradient in expected["gradients"].items():
        if key in NO_GRADIENT:
            continue
        difference = np.abs(actual["gradients"][key] - gradient).max()
        assert difference <= rounding * TOLERANCE * np.abs(gradient).max(), key
    same_published(actual, expected, rounding)


def tolerance(metric: str, rounding: int) -> dict[str, float]:
    """Compare relatively, except for metrics of log-probabilities, whose rounding is absolute."""
    if metric.endswith("_kl"):  # about half the square of a difference
        return {"rel": 1e-3, "abs": (rounding * NATS) ** 2}
    if metric.startswith(("mismatch_", "parity_", "stale_")):
        return {"rel": rounding * TOLERANCE, "abs": rounding * NATS}
    return {"rel": rounding * TOLERANCE, "abs": 0.0}


def same_published(actual: dict[str, Any], expected: dict[str, Any], rounding: int) -> None:
    """Compare published weights: bit by bit before updates, by their movement afterwards."""
    assert actual["published"].keys() == expected["published"].keys() == expected["before"].keys()
    moved = different = 0.0
    for name, value in expected["before"].items():
        assert np.array_equal(actual["before"][name], value), name
        if name in NO_GRADIENT:
            continue
        moved += np.square(expected["published"][name] - value, dtype=np.float64).sum()
        difference = actual["published"][name] - expected["published"][name]
        different += np.square(difference, dtype=np.float64).sum()
    assert different <= (rounding * MOVED) ** 2 * moved
    is_changed = any(told[0] for told in expected["told"])
    assert (moved > 0) == is_changed


def test_the_rank_is_named_that_makes_the_others_wait(
    tiny_folder: Path, batches: list[Batch], make_config: Callable[[Path], Config], tmp_path: Path
) -> None:
    slow = 2.0  # seconds of each pack on rank 1; what a rank computes itself takes some hundredths
    config = make_config(tiny_folder)
    [gauges, _] = run_world(2, rank_cases.slowed, tmp_path, (config, batches[:1]), slow)
    assert gauges["slowest_rank"] == 1
    assert gauges["slowest_rank_s"] >= slow

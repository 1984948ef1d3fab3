"""The log-probability check stops a run whose engine and trainer disagree, and none other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.errors import LogprobCheckError
from bus.messages import Batch, BatchTrained, VersionSpan
from dart_cli.config.schema import Config
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import LEAST_TOKENS, LIMITS, STALEST
from dart_cli.train.trained_policy import TrainModel
from tests.steps import steps_of, with_changed_steps, with_changes, with_steps
from tests.train.parts import Data, train


def learner(config: Config, **changes: object) -> PolicyLearner:
    train_config = config.train.model_copy(update=changes)
    return PolicyLearner(TrainModel.load(config), train_config)


def weights(trainee: PolicyLearner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainee.model.weights().items()}


def shifted(step: BatchStep, by: float = 0.01) -> dict[str, object]:
    return {"behaviour_logprobs": [value - by for value in step.behaviour_logprobs]}


def of_version(batch: Batch, version: int) -> Batch:
    """The batch as if these weights had sampled it."""
    return with_changed_steps(
        batch,
        lambda step: {
            "version_spans": [VersionSpan(version=version, start=0, end=len(step.token_ids))]
        },
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


# --- what is reported -------------------------------------------------------------------------------


def test_fresh_and_stale_tokens_are_distinguished(config: Config, batches: list[Batch]) -> None:
    """Use other weights for half of the samples: their large difference is no fault."""
    steps, half = steps_of(batches[0]), len(batches[0].samples) // 2
    mixed = steps[:half] + [
        with_changes(step, **shifted(step, by=1.0))
        for step in steps_of(of_version(batches[0], 3))[half:]
    ]
    batch = with_steps(batches[0], mixed)
    update = learner(config).update(batch, 0, policy_version=0)
    metrics = update.metrics
    assert update.applied
    assert not update.alarm
    assert metrics["parity_tokens"] + metrics["stale_tokens"] == metrics["tokens"]
    assert metrics["parity_max"] < 1e-4
    assert metrics["stale_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["stale_kl"] == pytest.approx(math.exp(1.0) - 2.0, abs=1e-3)
    assert {"parity_mean_one", "parity_mean_several"} <= metrics.keys()


# --- what stops ---------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Batch], Batch]] = {
    "another temperature": lambda batch: batch.model_copy(update={"temperature": 1.05}),
    "log-probabilities off by 0.01": lambda batch: with_changed_steps(batch, shifted),
    "numbers that are none": lambda batch: with_changed_steps(
        batch, lambda step: {"behaviour_logprobs": [-40.0] * len(step.token_ids)}
    ),
    "images in another order": lambda batch: with_changed_steps(
        batch, lambda step: {"image_hashes": step.image_hashes[::-1]}
    ),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_disagreement_under_the_same_weights_stops_before_anything_changes(
    config: Config, batches: list[Batch], spoil: Callable[[Batch], Batch]
) -> None:
    trainee = learner(config)
    before = weights(trainee)
    update = trainee.update(spoil(batches[0]), 0, policy_version=0)
    assert not update.applied
    for part in ("rounding allows 0.001", "dart doctor", "v0", "k3 KL", "Likely"):
        assert part.lower() in update.alarm.lower()
    assert "\n" not in update.alarm
    assert update.metrics["parity_mean"] > 0.001
    assert same(before, weights(trainee))
    assert trainee.state().keys() == trainee.model.trainable().keys()


def test_only_prompts_of_several_screens_are_blamed_where_one_agrees(
    config: Config, batches: list[Batch]
) -> None:
    spoilt = with_changed_steps(
        batches[0],
        lambda step: shifted(step, by=0.5) if len(step.image_hashes) > 1 else {},
    )
    update = learner(config).update(spoilt, 0, policy_version=0)
    assert "One screen agrees" in update.alarm
    assert update.metrics["parity_mean_one"] < 1e-4
    assert update.metrics["parity_mean_several"] == pytest.approx(0.5, abs=1e-3)


def test_the_first_token_that_differs_and_who_sampled_it_are_named(
    config: Config, batches: list[Batch]
) -> None:
    steps = steps_of(batches[0])
    at = max(range(len(steps)), key=lambda index: len(steps[index].token_ids))
    theirs = list(steps[at].behaviour_logprobs)
    off = [value - 5.0 * (index >= 2) for index, value in enumerate(theirs)]
    steps[at] = with_changes(steps[at], behaviour_logprobs=off, worker="rollout-7")
    batch = with_steps(batches[0], steps)
    alarm = learner(config).update(batch, 0, policy_version=0).alarm
    where = f"step {steps[at].step} of {steps[at].trajectory_id}, sampled by rollout-7, v0"
    assert f"first token 2 of {where}: {off[2]:.3f} there, {theirs[2]:.3f} here" in alarm


@pytest.mark.parametrize(
    ("changes", "version"),
    [({}, 1), ({}, None), ({"parity_every": 0}, 0)],
    ids=["stale", "unpublished weights", "gate off"],
)
def test_what_is_not_asked_for_stops_nothing(
    config: Config, batches: list[Batch], changes: dict[str, object], version: int | None
) -> None:
    trainee = learner(config, **changes)
    update = trainee.update(with_changed_steps(batches[0], shifted), 0, policy_version=version)
    assert update.applied
    assert not update.alarm


def test_a_few_tokens_are_reported_and_not_judged(config: Config, batches: list[Batch]) -> None:
    few = batches[0].model_copy(update={"samples": batches[0].samples[:2]})
    assert sum(map(len, few.samples)) < LEAST_TOKENS
    update = learner(config).update(with_changed_steps(few, shifted), 0, policy_version=0)
    assert update.applied
    assert update.metrics["parity_mean"] == pytest.approx(0.01, abs=1e-4)


def test_rounding_of_a_bfloat16_engine_is_within_its_limit(
    config: Config, tiny_folder: Path, play: Callable[..., Batch]
) -> None:
    half = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    engine = TransformersEngine(load_policy(tiny_folder, "bfloat16"))
    batch = play(engine, 6, 3)
    asyncio.run(engine.close())
    update = learner(half).update(batch, 0, policy_version=0)
    assert update.applied
    assert 1e-6 < update.metrics["parity_mean"] < LIMITS[torch.bfloat16] / 3


# --- samples that come late -----------------------------------------------------------------------


def late(config: Config, batches: list[Batch], **changes: object) -> PolicyLearner:
    """A learner at version 2 that has never seen a sample of the weights that it then had."""
    trainee = learner(config, **changes)
    for version in (0, 1):
        batch = of_version(batches[version], -5)
        assert trainee.update(batch, version, policy_version=version).applied
    return trainee


def test_samples_of_older_weights_are_compared_with_those_weights(
    config: Config, batches: list[Batch]
) -> None:
    """The untrained weights sampled batch 3, which comes two versions late."""
    trainee = late(config, batches)
    plain = late(config, batches, parity_every=0)
    metrics = trainee.update(batches[2], 2, policy_version=2).metrics
    assert metrics["parity_tokens"] > LEAST_TOKENS
    assert metrics["parity_max"] < 1e-4
    assert metrics["stale_mean"] > 10 * metrics["parity_max"]
    plain.update(batches[2], 2, policy_version=2)
    assert same(weights(trainee), weights(plain))  # looking back leaves no trace


def test_what_is_called_before_a_change_finds_the_weights_as_they_were(
    config: Config, batches: list[Batch]
) -> None:
    """A channel may still copy them: so long, neither kept weights nor a step take their place."""
    trainee = late(config, batches)
    before, calls = weights(trainee), []
    trainee.before_change = lambda: calls.append(same(weights(trainee), before))
    assert trainee.update(batches[2], 2, policy_version=2).applied
    assert calls == [True, True]  # looking back, and the step
    calls.clear()
    none = [sample.model_copy(update={"weight": 0.0}) for sample in batches[3].samples]
    skipped = batches[3].model_copy(update={"samples": none})
    assert not trainee.update(skipped, 3, policy_version=3).applied
    assert calls == []


def test_their_disagreement_stops_the_run_too(config: Config, batches: list[Batch]) -> None:
    trainee = late(config, batches)
    before = weights(trainee)
    update = trainee.update(with_changed_steps(batches[2], shifted), 2, policy_version=2)
    assert not update.applied
    assert "v0" in update.alarm
    assert same(before, weights(trainee))


def test_after_a_comparison_the_next_one_is_due_so_many_versions_later(
    config: Config, batches: list[Batch]
) -> None:
    trainee = learner(config, parity_every=3)
    assert trainee.update(batches[0], 0, policy_version=0).metrics["parity_tokens"]
    compared = []
    for version in range(1, 6):  # each batch comes one version late
        batch = of_version(batches[version % 4], version - 1)
        outcome = trainee.update(batch, version, policy_version=version)
        # As the batches are not what these weights sampled, being compared is to be stopped.
        compared.append(bool(outcome.alarm))
    assert compared == [False, False, False, True, False]  # v3's, when they come at v4


def test_weights_whose_samples_never_come_are_given_up(
    config: Config, batches: list[Batch]
) -> None:
    trainee = late(config, batches)
    few = batches[0].model_copy(update={"samples": batches[0].samples[:1]})
    there = STALEST + 2
    trainee.update(of_version(few, -5), 2, policy_version=there)
    outcome = trainee.update(
        of_version(with_changed_steps(batches[1], shifted), there), 3, policy_version=there + 1
    )
    assert f"v{there}" in outcome.alarm


# --- the process ----------------------------------------------------------------------------------


async def test_a_run_that_disagrees_ends_with_the_explanation_and_keeps_its_batch(
    config: Config, batches: list[Batch]
) -> None:
    data = Data([batches[0], with_changed_steps(of_version(batches[1], 1), shifted)])
    with pytest.raises(LogprobCheckError, match=r"disagree on \d+ tokens of v1"):
        await train(config, data)
    assert LogprobCheckError.exit_code == 2
    assert [message.batch_id for message in data.of(BatchTrained)] == [1]  # type: ignore[attr-defined]
    assert data.trained == 1

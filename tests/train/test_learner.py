"""Promises of an update: its result does not depend on how the batch is cut and padded."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from bus.errors import ProtocolError
from bus.messages import Batch, VersionSpan
from dart_cli.config.schema import Config
from dart_cli.data.store.steps import BatchStep
from dart_cli.policy.forward import logits
from dart_cli.train.learner import REPLAY_ESS, PolicyLearner
from dart_cli.train.packs.batch_tokens import completion_tokens
from dart_cli.train.packs.pack import Pack
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import FileChannel
from tests.steps import steps_of, with_changed_steps, with_changes, with_steps
from tests.train.trees import packs_of


def learner(config: Config, **changes: object) -> PolicyLearner:
    train = config.train.model_copy(update={"grad_clip": 1e9, **changes})
    return PolicyLearner(TrainModel.load(config.model_copy(update={"train": train})), train)


def gradients(trainee: PolicyLearner) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in trainee.model.trainable().items()
        if parameter.grad is not None
    }


def uneven(batch: Batch) -> Batch:
    """The batch with samples of different weight, one of them masked out."""
    weights = [1.0, 0.5, 0.0]
    samples = [
        sample.model_copy(update={"weight": weights[index % 3]})
        for index, sample in enumerate(batch.samples)
    ]
    return batch.model_copy(update={"samples": samples})


@pytest.mark.parametrize("size", [1, 100, 200])
def test_accumulated_gradients_are_those_of_one_big_batch(
    config: Config, batches: list[Batch], size: int
) -> None:
    batch = uneven(grouped(batches[0], seed=1))
    whole, parts = learner(config, pack_tokens=100_000), learner(config, pack_tokens=size)
    assert len(packs_of(whole.model, batch, size)) > 1
    metrics = [trainee.update(batch, 0).metrics for trainee in (whole, parts)]
    expected, actual = gradients(whole), gradients(parts)
    assert expected.keys() == actual.keys() == whole.model.trainable().keys()
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-5, atol=1e-6), name
    for name in ("loss", "entropy", "ess", "tokens", "grad_norm", "mismatch_kl"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def around_chance(batch: Batch) -> Batch:
    """The batch sampled with log-probabilities of -9.5 to -4.5; those of the untrained model are about -7.

    So that some ratios are within every bound and some beyond each.
    """
    return with_changed_steps(
        batch,
        lambda step: {"behaviour_logprobs": [5 * value - 4.5 for value in step.behaviour_logprobs]},
    )


OBJECTIVES: dict[str, dict[str, object]] = {
    "default": {},
    "uncorrected": {"correction": "none", "normalise": "trajectories"},
    "coupled": {"correction": "ratio", "normalise": "samples"},
}


@pytest.mark.parametrize("changes", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_is_that_of_the_objective_written_out(
    config: Config, batches: list[Batch], changes: dict[str, object]
) -> None:
    """Compute each sample alone, unpadded, in float64, with the formulas of docs/objective.md."""
    batch = around_chance(uneven(grouped(batches[1], seed=2)))
    trainee = learner(config, **changes)
    reference = TrainModel.load(config).policy
    reference.model.double()
    counted = [sample for sample in batch.samples if sample.weight != 0]
    trajectories = {sample.trajectory_id for sample in counted}
    loss = torch.zeros((), dtype=torch.float64)
    for sample in counted:
        pictures = [batch.images[key] for key in batch.image_hashes(sample)]
        token_ids = batch.prompt(sample) + batch.completion(sample)
        inputs = reference.inputs([token_ids], [pictures])
        values = logits(reference.model, inputs, last=len(sample) + 1)[0].double()
        values = values[: len(sample)].clone()
        values[:, list(reference.forbidden_token_ids)] = -1e6
        table = (values / batch.temperature).log_softmax(-1)
        p = table[torch.arange(len(sample)), torch.tensor(batch.completion(sample))]
        b = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        q, a = p.detach(), sample.advantage
        r = (p - q).exp()
        if changes.get("correction") == "ratio":
            r = (p - b).exp()
            token_losses = -torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
        else:
            w = torch.ones_like(q) if changes else (q - b).exp().clamp(max=1)
            token_losses = -w * r * a
        in_trajectory = sum(
            len(each) for each in counted if each.trajectory_id == sample.trajectory_id
        )
        divisor = {
            "tokens": completion_tokens(batch),
            "samples": len(counted) * len(p),
            "trajectories": len(trajectories) * in_trajectory,
        }[str(changes.get("normalise", "tokens"))]
        loss = loss + sample.weight * token_losses.sum() / divisor
    loss.backward()
    update = trainee.update(batch, 0)
    acts = {"default": "importance_truncated_fraction", "coupled": "clip_fraction"}
    for name, share in acts.items():
        assert (0 < update.metrics[share] < 1) == (changes == OBJECTIVES[name])
    assert update.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for name, parameter in reference.model.named_parameters():
        actual = trainee.model.trainable()[name].grad
        assert actual is not None
        assert parameter.grad is not None
        assert torch.allclose(actual.double(), parameter.grad, rtol=1e-3, atol=1e-5), name


def test_defaults_are_bit_for_bit_one_formula(config: Config, batches: list[Batch]) -> None:
    batch = uneven(grouped(batches[0], seed=3))
    trainee, model = learner(config), TrainModel.load(config)
    tokens = completion_tokens(batch)
    total = 0.0
    for pack in packs_of(model, batch, config.train.pack_tokens):
        p = model.score(pack, batch.temperature).logprobs
        b, a, weights = (
            values.float() for values in (pack.behaviour_logprobs, pack.advantages, pack.weights)
        )
        w = (p.detach() - b).clamp(-20, 20).exp().clamp(max=1.0)
        r = (p - p.detach()).exp()
        free, clipped = r * a, r.clamp(1.0 - 0.2, 1.0 + 0.28) * a
        loss = (-w * torch.minimum(free, clipped) * weights).sum() / tokens
        loss.backward()
        total += loss.item()
    assert trainee.update(batch, 0).metrics["loss"] == pytest.approx(total, rel=1e-6)
    expected = {name: value.grad for name, value in model.trainable().items()}
    for name, actual in gradients(trainee).items():
        assert expected[name] is not None
        assert torch.equal(actual, expected[name]), name  # type: ignore[arg-type]


def scores_by_sample(packs: list[Pack], model: TrainModel) -> dict[tuple[str, int], torch.Tensor]:
    """Return log-probabilities and entropies [2, A] of each sample."""
    results: dict[tuple[str, int], torch.Tensor] = {}
    for pack in packs:
        with torch.no_grad():
            scores = model.score(pack, 1.0)
        parts = torch.stack([scores.logprobs, scores.entropies]).split(pack.lengths, dim=1)
        for sample, part in zip(pack.samples, parts, strict=True):
            assert (sample.trajectory_id, sample.step) not in results
            results[sample.trajectory_id, sample.step] = part
    return results


def test_packs_change_no_log_probability(config: Config, batches: list[Batch]) -> None:
    model = TrainModel.load(config)
    batch = batches[2]
    assert len({sample.end for sample in batch.samples}) > 3
    packs, alone = (packs_of(model, batch, size) for size in (100_000, 1))
    assert (len(packs), len(alone)) == (1, len(batch.chains))
    together, apart = scores_by_sample(packs, model), scores_by_sample(alone, model)
    assert together.keys() == apart.keys()
    assert len(together) == len(batch.samples)
    for key, values in together.items():
        assert torch.allclose(values, apart[key], atol=1e-5), key


def grouped(batch: Batch, seed: int) -> Batch:
    """The batch with for each sample some of the same prompt, with equal and other completions."""
    dice = random.Random(seed)
    steps = []
    for step in steps_of(batch)[:6]:
        for number in range(dice.randint(1, 5)):
            tokens = list(step.token_ids)
            if dice.random() < 0.7:
                tokens[dice.randrange(len(tokens))] = 100 + dice.randrange(500)
                tokens = tokens[: dice.randint(1, len(tokens))]
            changes = {
                "trajectory_id": f"{step.trajectory_id}-{number}",
                "token_ids": tokens,
                "behaviour_logprobs": [-dice.random() for _ in tokens],
                "advantage": dice.uniform(-1, 1),
            }
            steps.append(with_changes(step, **changes))
    dice.shuffle(steps)
    return with_steps(batch, steps)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 400, 100_000])
def test_each_sample_of_a_weight_is_in_the_part_of_one_rank(
    config: Config, batches: list[Batch], size: int, ranks: int
) -> None:
    policy = TrainModel.load(config).policy
    batch = uneven(grouped(batches[0], seed=size))
    parts = packed_batches(batch, policy, pack_tokens=size, ranks=ranks)
    assert len(parts) == ranks
    assert len({len(part.packs) for part in parts}) == 1
    seen = []
    for part in parts:
        assert part.batch.images.keys() == {
            name for chain in part.batch.chains for name in chain.image_hashes
        }
        seen += [
            (step.trajectory_id, step.step, list(step.token_ids), step.advantage)
            for step in steps_of(part.batch)
        ]
    assert sorted(seen) == sorted(
        (step.trajectory_id, step.step, list(step.token_ids), step.advantage)
        for step in steps_of(batch)
        if step.weight
    )


def test_samples_that_share_a_prompt_score_as_if_alone(
    config: Config, batches: list[Batch]
) -> None:
    model = TrainModel.load(config)
    for seed in range(2):
        batch = grouped(batches[seed], seed)
        (together,) = packs_of(model, batch)
        assert len(together.inputs.input_ids) < sum(sample.end for sample in batch.samples) / 2
        results = scores_by_sample([together], model)
        for sample in batch.samples:
            (alone,) = packs_of(model, batch.model_copy(update={"samples": [sample]}))
            [apart] = scores_by_sample([alone], model).values()
            assert torch.allclose(results[sample.trajectory_id, sample.step], apart, atol=1e-5)


def test_nothing_is_computed_twice(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = learner(config, pack_tokens=300)
    parts = len(packs_of(trainee.model, batches[0], 300))
    assert parts > 1
    calls = []
    score = TrainModel.score

    def counted(self: TrainModel, *args: object, **kwargs: object) -> object:
        calls.append(1)
        return score(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainModel, "score", counted)
    trainee.update(batches[0], 1)  # in update 0 it also looks through grey screens
    assert len(calls) == parts


# --- the guard ----------------------------------------------------------------------------------


def again(batch: Batch, reuse: int = 1) -> Batch:
    """The batch, trained on for the `reuse`-th time more."""
    return batch.model_copy(update={"reuse": reuse})


def test_a_batch_of_low_effective_sample_size_is_not_trained_on_again(
    config: Config, batches: list[Batch]
) -> None:
    batch = around_chance(grouped(batches[0], seed=5))
    trainee = learner(config, reuse=1)
    before = {name: value.clone() for name, value in trainee.model.weights().items()}
    update = trainee.update(again(batch), 0)
    ess = update.metrics["ess"]
    assert ess < REPLAY_ESS
    assert (update.applied, update.metrics["skipped"], update.metrics["low_ess"]) == (False, 1, 1)
    assert update.note == f"an effective sample size of {ess:.3g}, below 0.9 (update skipped)"
    assert all(torch.equal(before[name], value) for name, value in trainee.model.weights().items())
    assert trainee.update(batch, 0).applied  # a fresh one is not asked


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_changes_nothing(
    config: Config, batches: list[Batch]
) -> None:
    trainee = learner(config)
    trainee.update(batches[0], 0)
    before = {name: value.clone() for name, value in trainee.model.weights().items()}
    state = {name: value.clone() for name, value in trainee.state().items()}
    samples = [
        sample.model_copy(update={"advantage": 3e38, "weight": 100.0})
        for sample in batches[1].samples
    ]
    update = trainee.update(batches[1].model_copy(update={"samples": samples}), 1)
    assert not update.applied
    assert update.metrics["skipped"] == 1
    assert all(torch.equal(before[name], value) for name, value in trainee.model.weights().items())
    assert all(torch.equal(state[name], value) for name, value in trainee.state().items())
    assert trainee.update(batches[1], 1).applied


def test_a_learning_rate_of_zero_trains_nothing(config: Config, batches: list[Batch]) -> None:
    trainee = learner(config, lr=0.0)
    before = {name: value.clone() for name, value in trainee.model.weights().items()}
    assert trainee.update(batches[0], 0).applied
    assert all(torch.equal(before[name], value) for name, value in trainee.model.weights().items())


def test_a_rank_alone_gives_its_masters_to_the_channel_which_casts_them(
    config: Config, tmp_path: Path
) -> None:
    model = config.model.model_copy(update={"dtype": "bfloat16", "freeze_vision": True})
    trainee = TrainModel.load(config.model_copy(update={"model": model}))
    stream = trainee.stream()
    assert not stream.is_gathered  # so nothing is copied before the channel copies it
    assert all(info.dtype == "bfloat16" for info in stream.specs.values())
    clipped = dict(stream.tensors)
    assert {name: clipped[name].dtype for name in trainee.trainable()} == dict.fromkeys(
        trainee.trainable(), torch.float32
    )
    whole = trainee.weights()
    results = []
    for name, tensors in (("streamed", trainee.stream()), ("whole", whole)):
        channel = FileChannel(tmp_path / name)
        channel.resume(whole, 0)
        results.append(channel.begin(tensors, 1).result().digest)
    assert results[0] == results[1]


def test_updates_too_small_for_bfloat16_add_up(config: Config, batches: list[Batch]) -> None:
    """A weight of 1/16 to 1/8 has steps of 5e-4 in bfloat16; each update moves it by 1e-4."""
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    trainee = learner(config.model_copy(update={"model": model}), lr=1e-4, updates=1)
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    before = trainee.model.weights()[name].clone()
    middling = (before.abs() > 0.0626) & (before.abs() < 0.1249)
    shares = []
    for done in range(5):
        trainee.update(batches[0], done)
        is_changed = trainee.model.weights()[name] != before
        shares.append(is_changed[middling].float().mean().item())
    assert before.dtype == torch.bfloat16
    assert shares == sorted(shares)
    assert shares[0] < 0.3  # those that were near the middle between two of bfloat16's numbers
    assert shares[-1] > 2 * shares[0]


def test_a_frozen_vision_tower_stays(config: Config, batches: list[Batch]) -> None:
    model = config.model.model_copy(update={"freeze_vision": True})
    trainee = learner(config.model_copy(update={"model": model}))
    before = {name: value.clone() for name, value in trainee.model.weights().items()}
    trainee.update(batches[0], 0)
    changed_names = {n for n, v in trainee.model.weights().items() if not torch.equal(before[n], v)}
    assert changed_names
    assert not any(".visual." in name for name in changed_names)
    assert any(".visual." in name for name in before)


def test_the_kl_pulls_towards_the_model_the_run_began_with(
    config: Config, batches: list[Batch]
) -> None:
    trainee = learner(config, kl_beta=0.1)
    first = trainee.update(batches[0], 0).metrics
    second = trainee.update(batches[0], 1).metrics
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["reference_kl"] > 1e-5


def spoilt(batch: Batch, **changes: object) -> Batch:
    first, *others = steps_of(batch)
    return with_steps(batch, [with_changes(first, **changes), *others])


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"token_ids": []}, "empty"),
        ({"behaviour_logprobs": [0.0]}, "1 log-probabilities"),
        ({"token_ids": [10**6], "behaviour_logprobs": [0.0]}, "not in the vocabulary"),
        ({"token_ids": [0], "behaviour_logprobs": [0.0]}, "never sampled"),
        ({"token_ids": [50], "behaviour_logprobs": [math.nan]}, "not finite"),
        ({"image_hashes": ["absent"]}, "image absent is missing"),
        ({"prompt_token_ids": [50] * 100_000}, "positions"),
        ({"image_hashes": []}, "placeholders"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_cause(
    config: Config, batches: list[Batch], changes: dict[str, object], cause: str
) -> None:
    trainee = learner(config)
    with pytest.raises(ProtocolError, match=f"batch 1.*{cause}"):
        trainee.update(spoilt(batches[0], **changes), 0)
    assert trainee.state().keys() == trainee.model.trainable().keys()


def test_a_demonstration_joins_a_batch_without_log_probabilities(
    config: Config, batches: list[Batch]
) -> None:
    """Train on a demonstration: it is not compared, and the statistics of other samples do not change."""
    fresh = [step for step in steps_of(batches[0]) if step.weight][:4]
    shown = with_changes(fresh[-1], behaviour_logprobs=[], version_spans=[], advantage=1.5)

    def updated(steps: list[BatchStep]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        trainee = learner(config)
        batch = with_steps(batches[0], steps)
        return trainee.update(batch, 0, policy_version=3).metrics, gradients(trainee)

    without, gradient = updated(fresh[:-1])
    with_it, other_gradient = updated([*fresh[:-1], shown])
    tokens = len(shown.token_ids)
    assert with_it["demonstrated_fraction"] == pytest.approx(
        tokens / sum(len(step.token_ids) for step in fresh)
    )
    for name in ("ess", "importance_weight_mean", "parity_max"):
        assert with_it.get(name) == pytest.approx(without.get(name), abs=1e-4)
    assert any(not torch.equal(gradient[name], other_gradient[name]) for name in gradient)


def test_each_step_carries_how_far_trainer_and_engine_are_apart(
    config: Config, batches: list[Batch]
) -> None:
    steps = [step for step in steps_of(batches[0]) if step.weight][:3]
    off = [value - 0.25 for value in steps[0].behaviour_logprobs]
    args = [
        with_changes(steps[0], behaviour_logprobs=off),
        steps[1],
        with_changes(steps[2], behaviour_logprobs=[], version_spans=[]),
    ]
    batch = with_steps(batches[0], args)
    gaps = {
        (gap.trajectory_id, gap.step): gap for gap in learner(config).update(batch, 0).mismatches
    }
    assert gaps.keys() == {(step.trajectory_id, step.step) for step in steps[:2]}
    shifted, same = (gaps[step.trajectory_id, step.step] for step in steps[:2])
    assert (shifted.mean, shifted.largest) == (pytest.approx(0.25, abs=1e-3),) * 2
    assert (same.mean, same.largest) == (pytest.approx(0, abs=1e-3),) * 2


def test_parity_is_asked_of_tokens_that_one_version_alone_made(
    config: Config, batches: list[Batch]
) -> None:
    """Use tokens after a swap in mid-completion, of two versions: their gap is no fault of the engine."""
    first = batches[0]
    long = next(step for step in steps_of(first) if step.weight and len(step.token_ids) > 1)

    def gap(*spans: VersionSpan, off: int) -> float:
        logprobs = list(long.behaviour_logprobs)
        logprobs[off] -= 0.5
        step = with_changes(long, version_spans=list(spans), behaviour_logprobs=logprobs)
        trainee = learner(config)
        updated = trainee.update(with_steps(first, [step]), 0, policy_version=3)
        return updated.metrics["parity_max"]

    length = len(long.token_ids)
    whole = VersionSpan(version=3, start=0, end=length)
    before, after = (
        VersionSpan(version=3, start=0, end=1),
        VersionSpan(version=4, start=1, end=length),
    )
    assert gap(whole, off=length - 1) > 0.4
    assert gap(before, after, off=0) > 0.4
    assert gap(before, after, off=length - 1) < 0.01

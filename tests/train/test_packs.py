"""A sample's numbers are those that it has alone, however its batch is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.messages import Batch, Chain, Sample, StepMismatch
from bus.packed import int32s
from dart_cli.algo.loss import TokenStats, policy_loss
from dart_cli.algo.objective import Objective
from dart_cli.config.schema import Config, ModelConfig, TeacherConfig, TrainConfig
from dart_cli.policy.forward import encoder_outputs, image_features
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.packs import rank_shares
from dart_cli.train.packs.batch_tokens import batch_loss_weights, trajectory_of
from dart_cli.train.trained_policy import TrainModel
from scripts.small_models import FAMILIES
from tests.steps import steps_of, with_changes, with_steps
from tests.train.another_model import another
from tests.train.trees import tree_batch, with_hints

Family = Callable[[str], Path]
EXACT = 1e-9


@dataclass
class OneByOne:
    """Compute what an update computes, each sample alone."""

    stats: TokenStats
    gradients: dict[str, torch.Tensor]
    mismatches: dict[tuple[str, int], StepMismatch]
    fresh: int  # tokens that version 0 alone sampled


def doubled(config: Config) -> TrainModel:
    model = TrainModel.load(config)
    model.policy.model.double()
    if model.teacher is not None:
        model.teacher.policy.model.double()
    if model.reference is not None:
        model.reference.model.double()
        with torch.no_grad():  # otherwise the KL and its gradient are 0
            inner: Any = model.reference.model.model
            for parameter in inner.language_model.parameters():
                parameter *= 1.05
    return model


def table_of(policy: LoadedPolicy, batch: Batch, sample: Sample) -> torch.Tensor:
    """Return log-probabilities [A, V] of a sample alone, by transformers' forward pass, in float64."""
    token_ids = [*batch.prompt(sample), *batch.completion(sample)]
    images = [policy.images.prepare(batch.images[key], key) for key in batch.image_hashes(sample)]
    inputs = policy.inputs_of([token_ids], [images])
    model: Any = policy.model
    extra = {}
    if images:
        features = image_features(model, inputs.images)
        extra["mm_encoder_outputs"] = encoder_outputs(features, inputs.image_order)
    output = model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
        **extra,
    )
    values = output.logits[0, sample.start - 1 : sample.end - 1]
    assert values.dtype == torch.float64
    values = values.index_fill(1, torch.tensor(policy.forbidden_token_ids), -1e9)
    return (values / batch.temperature).log_softmax(-1)


def hinted(batch: Batch, sample: Sample) -> tuple[Batch, Sample]:
    """Return the sample with the hint in its prompt, in a batch of its own."""
    if sample.hint is None:
        return batch, sample
    at, prompt = sample.hint, batch.prompt(sample).tolist()
    prompt = prompt[: at.start] + list(at.token_ids) + prompt[at.end :]
    tokens = prompt + batch.completion(sample).tolist()
    chain = Chain(token_ids=int32s(tokens), image_hashes=batch.image_hashes(sample))
    own = sample.model_copy(update={"chain": 0, "start": len(prompt), "end": len(tokens)})
    return batch.model_copy(update={"chains": [chain], "samples": [own]}), own


def each_alone(model: TrainModel, batch: Batch, config: TrainConfig) -> OneByOne:
    """The update's loss, statistics and gradients, one forward and backward for each sample."""
    names = Objective.__annotations__.keys() & TrainConfig.model_fields.keys()
    objective = Objective(**{name: getattr(config, name) for name in names})
    shares = batch_loss_weights(batch, config.normalise)
    total: TokenStats | None = None
    mismatches, fresh = {}, 0
    for sample in batch.samples:
        if sample.weight == 0:
            continue
        table = table_of(model.policy, batch, sample)
        tokens = torch.tensor(batch.completion(sample))[:, None]
        policy = table.gather(1, tokens)[:, 0]
        reference = None
        if model.reference is not None and config.kl_beta:
            with torch.no_grad():
                other = table_of(model.reference, batch, sample)
            reference = other.gather(1, tokens)[:, 0]
        gaps, is_taught = None, None
        if config.teacher_weight:
            is_taught = torch.full((len(sample),), not model.hints or sample.hint is not None)
            teacher = model.reference if model.teacher is None else model.teacher.policy
            assert teacher is not None
            with torch.no_grad():
                theirs = table_of(
                    teacher, *(hinted(batch, sample) if model.hints else (batch, sample))
                )
            gaps = (table.exp() * (theirs - table)).sum(-1)
        is_known = len(sample.behaviour_logprobs) > 0
        behaviour = torch.tensor(
            list(sample.behaviour_logprobs) if is_known else [0.0] * len(sample),
            dtype=torch.float64,
        )
        token = sample.weight * shares.of(trajectory_of(sample), len(sample))
        output = policy_loss(
            policy,
            policy.detach(),
            behaviour,
            torch.full_like(policy, sample.advantage),
            torch.full_like(policy, token),
            objective,
            divisor=shares.divisor,
            unknown=torch.full((len(sample),), not is_known),
            reference_logprobs=reference,
            teacher_gaps=gaps,
            taught=is_taught,
            entropies=-(table.exp() * table.clamp(min=-1e6)).sum(-1),
        )
        output.loss.backward()
        total = output.stats if total is None else total + output.stats
        if is_known:
            gap = policy.detach() - behaviour
            mismatches[sample.trajectory_id, sample.step] = StepMismatch(
                trajectory_id=sample.trajectory_id,
                step=sample.step,
                mean=gap.mean().item(),
                largest=gap.abs().max().item(),
            )
            fresh += sum(s.end for s in sample.version_spans if (s.version, s.start) == (0, 0))
    assert total is not None
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.trainable().items()
        if parameter.grad is not None
    }
    model.policy.model.zero_grad()
    return OneByOne(total, gradients, mismatches, fresh)


OBJECTIVES: dict[str, dict[str, object]] = {
    "default": {},
    "uncorrected, KL": {"correction": "none", "normalise": "trajectories", "kl_beta": 0.1},
    "coupled, frozen tower, KL": {
        "correction": "ratio",
        "normalise": "samples",
        "kl_beta": 0.05,
        "freeze_vision": True,
    },
    "teacher": {"teacher_weight": 0.7},
    "teacher, frozen tower, KL": {
        "teacher_weight": 0.7,
        "correction": "ratio",
        "normalise": "samples",
        "kl_beta": 0.05,
        "freeze_vision": True,
    },
    "hints": {"teacher_weight": 0.7, "hints": True, "kl_beta": 0.05},
    "hints, frozen tower": {"teacher_weight": 1.0, "hints": True, "freeze_vision": True},
    "hints for a teacher": {"teacher_weight": 0.7, "hints": True, "other": True},
}


def config_of(folder: Path, **changes: Any) -> Config:
    freeze = bool(changes.pop("freeze_vision", False))
    hints, other = bool(changes.pop("hints", False)), bool(changes.pop("other", False))
    args = {"parity_every": 0, **changes}
    train = TrainConfig(lr=0.0, updates=4, grad_clip=1e9, weight_decay=0.0, **args)
    model = ModelConfig(path=str(folder), freeze_vision=freeze)
    if not train.teacher_weight:
        return Config(model=model, train=train)
    folder_of_teacher = str(another(folder)) if other or not hints else ""
    teacher = TeacherConfig(model=folder_of_teacher, hints=hints)
    return Config(model=model, train=train, teacher=teacher)


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [
        *product(FAMILIES, ("default", "coupled, frozen tower, KL")),
        ("qwen2_5_vl", "uncorrected, KL"),  # the sums of a loss are of no family
        ("qwen3_vl", "teacher, frozen tower, KL"),
        ("qwen3_5", "teacher"),
        ("qwen2_5_vl", "hints"),
        ("qwen3_5", "hints, frozen tower"),
        ("qwen3_vl", "hints for a teacher"),
    ],
)
@pytest.mark.usefixtures("float64_throughout")
def test_an_update_on_packs_is_that_of_each_sample_alone(
    model_type: str, family: Family, objective: str
) -> None:
    """Compare loss, every statistic, gradients, and mismatches by step; float64."""
    config = config_of(family(model_type), **OBJECTIVES[objective])
    alone: OneByOne | None = None
    for pack_tokens in (100_000, 400, 1):
        model = doubled(config)
        batch = tree_batch(model.policy, groups=1)
        if model.hints:
            batch = with_hints(batch, model.policy)
        assert len(batch.chains) < len(batch.samples)
        if alone is None:
            alone = each_alone(model, batch, config.train)
        train = config.train.model_copy(update={"pack_tokens": pack_tokens})
        learner = PolicyLearner(model, train)
        update = learner.update(batch, 0, policy_version=0)
        assert update.applied
        for name, value in alone.stats.metrics().items():
            if name not in ("ratio_mean", "clip_fraction"):  # the last pass's, after AdamW
                assert update.metrics[name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
        actual = {name: value.grad for name, value in model.trainable().items()}
        assert {
            name for name, value in actual.items() if value is not None
        } == alone.gradients.keys()
        for name, value in alone.gradients.items():
            scale = value.abs().max().clamp(min=1e-4)
            worst = (actual[name] - value).abs().max() / scale
            assert worst.item() <= EXACT, (name, pack_tokens)
        mismatches = {(gap.trajectory_id, gap.step): gap for gap in update.mismatches}
        assert mismatches.keys() == alone.mismatches.keys()
        for key, gap in alone.mismatches.items():
            assert mismatches[key].mean == pytest.approx(gap.mean, abs=EXACT)
            assert mismatches[key].largest == pytest.approx(gap.largest, abs=EXACT)
        assert update.metrics["parity_tokens"] == alone.fresh


@pytest.mark.parametrize("normalise", ["tokens", "samples"])
@pytest.mark.usefixtures("float64_throughout")
def test_the_gradient_of_a_demonstration_is_behaviour_cloning_times_its_advantage(
    family: Family, normalise: str
) -> None:
    """Add a completion to a step's prompt; the other samples have advantage 0 and no gradient."""
    config = config_of(family(next(iter(FAMILIES))), normalise=normalise)
    model = doubled(config)
    batch = tree_batch(model.policy, groups=1)
    steps = [with_changes(step, advantage=0.0) for step in steps_of(batch)]
    at = next(step for step in steps if step.step == 1 and step.weight)
    other = [*at.token_ids[:1], *at.token_ids]
    unknown = {"behaviour_logprobs": [], "version_spans": [], "trajectory_id": "shown"}
    shown = with_changes(at, token_ids=other, advantage=0.75, weight=1.0, **unknown)
    batch = with_steps(batch, [*steps, shown])
    sample = batch.samples[-1]
    assert list(batch.completion(sample)) == other
    assert batch.prompt(sample) == at.prompt_token_ids
    table = table_of(model.policy, batch, sample)
    cloned = table.gather(1, torch.tensor(other)[:, None]).sum()
    counted = [each for each in batch.samples if each.weight]
    share = {
        "tokens": 1 / sum(len(each) for each in counted),
        "samples": 1 / (len(counted) * len(other)),
    }[normalise]
    (-0.75 * share * cloned).backward()
    expected = {
        name: value.grad.clone()
        for name, value in model.trainable().items()
        if value.grad is not None
    }
    model.policy.model.zero_grad()
    learner = PolicyLearner(model, config.train)
    update = learner.update(batch, 0, policy_version=0)
    assert update.metrics["demonstrated_fraction"] > 0
    is_known = [each for each in counted if each.behaviour_logprobs]
    assert len(update.mismatches) == len(is_known) < len(counted)
    assert sum(value.abs().sum() for value in expected.values()) > 0
    for name, value in model.trainable().items():
        if name in expected:
            assert value.grad is not None
            scale = expected[name].abs().max().clamp(min=1e-4)
            assert ((value.grad - expected[name]).abs().max() / scale).item() <= EXACT, name


def test_pairs_of_tokens_cost_in_the_layers_that_attend(family: Family) -> None:
    pairs = {
        kind: rank_shares._costs_of(load_policy(family(kind))).pair
        for kind in ("qwen3_vl", "qwen3_5")
    }
    # layers that attend, heads and their width
    assert pairs == {"qwen3_vl": 4.0 * 2 * 2 * 32, "qwen3_5": 4.0 * 1 * 2 * 64}

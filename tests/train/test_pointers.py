"""A patch is scored, weighed and learned from as a token is: against float64 numpy and finite differences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bus.errors import ProtocolError
from bus.messages import Batch, Sample
from dart_cli.config.schema import Config, ModelConfig, PolicyConfig, TrainConfig
from dart_cli.doctor.logprob_check import Trial, play_trial
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import encoder_outputs, image_features
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import rescore
from dart_cli.train.packs.batch_check import check_batch
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load
from scripts.small_models import FAMILIES
from tests.policy.test_pointer_head import in_numpy
from tests.steps import steps_of, with_changes, with_steps
from tests.train.trees import packs_of, tree_batch
from tests.weights.sets import publish

Family = Callable[[str], Path]
Numbers = NDArray[np.float64]
KL = 0.1
CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 1.0


@pytest.fixture(scope="module")
def folders(pointer_folder: Family) -> dict[str, Path]:
    return {model_type: pointer_folder(model_type) for model_type in FAMILIES}


def config_of(folder: Path, *, model: dict[str, Any] | None = None, **changes: Any) -> Config:
    args = {"lr": 0.0, "grad_clip": 1e9, "weight_decay": 0.0, "parity_every": 0, **changes}
    return Config(
        model=ModelConfig(path=str(folder), **(model or {})),
        policy=PolicyConfig(pointing="pointer"),
        train=TrainConfig(updates=4, **args),
    )


def sharpened(model: TrainModel) -> TrainModel:
    """Return a model in float64 whose head prefers some patches, and a reference that differs from it."""
    for number, each in enumerate((model.policy, model.reference)):
        if each is not None:
            each.model.double()
            assert each.pointer_head is not None
            inner: Any = each.model.model
            with torch.no_grad():
                each.pointer_head.query_out.weight *= 8 - 3 * number
                for parameter in inner.language_model.parameters():
                    parameter *= 1 + 0.05 * number
    return model


class Scores:
    """Return log-probabilities and entropies [A] of a sample alone; 0 for pads."""

    def __init__(self, policy: LoadedPolicy, batch: Batch, sample: Sample) -> None:
        hidden, visual = states_of(policy, batch, sample)
        assert policy.pointer is not None
        assert policy.pointer_head is not None
        rows: Any = policy.model.get_output_embeddings().weight
        scores = hidden @ rows.detach().numpy().T
        scores[:, list(policy.forbidden_token_ids)] = -np.inf
        self.logprobs = np.zeros(len(sample))
        self.entropies = np.zeros(len(sample))
        for at, token in enumerate(batch.completion(sample)):
            if token == policy.pointer.pad:
                continue
            logits, chosen = scores[at], token
            if token == policy.pointer.end:
                state = torch.from_numpy(hidden[at : at + 1])
                logits, chosen = in_numpy(policy.pointer_head, visual, state)[0], sample.patches[at]
            logits = logits / batch.temperature
            table = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            p = np.exp(table)
            self.logprobs[at] = table[chosen]
            self.entropies[at] = -(p[p > 0] * table[p > 0]).sum()


@torch.no_grad()
def states_of(policy: LoadedPolicy, batch: Batch, sample: Sample) -> tuple[Numbers, torch.Tensor]:
    """The states [A, H] that predict a sample alone, and its last screen's embeddings [P, H]."""
    token_ids = [*batch.prompt(sample), *batch.completion(sample)]
    images = [policy.images.prepare(batch.images[key], key) for key in batch.image_hashes(sample)]
    inputs = policy.inputs_of([token_ids], [images])
    inner: Any = policy.model.model
    extra, visual = {}, torch.zeros(0)
    if images:
        features = image_features(policy.model, inputs.images)
        extra["mm_encoder_outputs"] = encoder_outputs(features, inputs.image_order)
        visual = features.embeds[inputs.image_order[-1]]
    output = inner(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
        **extra,
    )
    return output.last_hidden_state[0, sample.start - 1 : sample.end - 1].numpy(), visual


class Objective:
    """The whole loss of a batch by its formulas, each sample alone; `normalise` is samples."""

    def __init__(self, model: TrainModel, batch: Batch) -> None:
        assert model.reference is not None
        self.model, self.batch = model, batch
        self.samples = [sample for sample in batch.samples if sample.weight]
        self.proximal = [Scores(model.policy, batch, each).logprobs for each in self.samples]
        self.reference = [Scores(model.reference, batch, each).logprobs for each in self.samples]

    def drawn(self, sample: Sample) -> NDArray[np.bool_]:
        assert self.model.policy.pointer is not None
        return np.array(self.batch.completion(sample)) != self.model.policy.pointer.pad

    def loss(self) -> float:
        total = 0.0
        for sample, q, ref in zip(self.samples, self.proximal, self.reference, strict=True):
            scores = Scores(self.model.policy, self.batch, sample)
            p, drawn = scores.logprobs, self.drawn(sample)
            weight = np.ones(len(sample))  # of a demonstration
            if sample.behaviour_logprobs:
                weight = np.minimum(np.exp(q - np.array(sample.behaviour_logprobs)), CAP)
            r = np.exp(p - q)
            clipped = np.clip(r, 1 - CLIP_LOW, 1 + CLIP_HIGH)
            value = np.minimum(r * sample.advantage, clipped * sample.advantage)
            k3 = np.minimum(np.exp(ref - p) - 1 - (ref - p), 10)
            loss = -weight * value + KL * k3
            total += sample.weight * loss[drawn].sum() / drawn.sum()
        return total / len(self.samples)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.usefixtures("float64_throughout")
def test_loss_and_gradient_of_pointers_are_those_of_numpy(
    model_type: str, folders: dict[str, Path]
) -> None:
    """Cover drags, siblings on one screen, pointers in prompts, cut-off ones, demonstrations, and text."""
    config = config_of(
        folders[model_type],
        kl_beta=KL,
        normalise="samples",
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )
    gradients: dict[str, torch.Tensor] = {}
    model = sharpened(TrainModel.load(config))
    batch = tree_batch(model.policy, groups=1)
    objective = Objective(model, batch)
    loss = objective.loss()
    for pack_tokens in (100_000, 1):
        train = config.train.model_copy(update={"pack_tokens": pack_tokens})
        update = PolicyLearner(model, train).update(batch, 0, policy_version=0)
        assert update.metrics["loss"] == pytest.approx(loss, rel=1e-9)
        assert update.metrics["tokens"] == sum(objective.drawn(s).sum() for s in objective.samples)
        result = {name: each.grad for name, each in model.trainable().items()}
        for name, before in gradients.items():
            assert (result[name] - before).abs().max() <= 1e-9 * before.abs().max().clamp(min=1e-4)
        gradients = {name: each.clone() for name, each in result.items() if each is not None}
    pointed = [sum(patch >= 0 for patch in sample.patches) for sample in objective.samples]
    assert {0, 1, 2} <= set(pointed)
    if model_type != "qwen3_vl":  # the other differs in the tower alone, which the loss has seen
        return
    draw = torch.Generator().manual_seed(1)
    for part in ("pointer_head.", "model.visual.", "model.language_model."):
        chosen = {n: each for n, each in model.trainable().items() if n.startswith(part)}
        way = {
            name: torch.randn(each.shape, generator=draw, dtype=torch.float64)
            for name, each in chosen.items()
        }
        slope = sum((gradients[name] * each).sum().item() for name, each in way.items())
        losses = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                for name, each in chosen.items():
                    each += step * way[name]
            losses.append(objective.loss())
        with torch.no_grad():
            for name, each in chosen.items():
                each += 1e-6 * way[name]
        assert slope == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5, abs=1e-7), part


def test_nothing_is_dropped_at_random_where_layers_are_recomputed(folders: dict[str, Path]) -> None:
    """`train.recompute` puts the model into training mode, in which the head would drop values."""
    scores = []
    for recompute in ("none", "layer", "layer"):
        model = TrainModel.load(config_of(folders["qwen2_vl"], recompute=recompute))
        [pack] = packs_of(model, tree_batch(model.policy, groups=1))
        scores.append(model.score(pack, 0.8).logprobs.detach())
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_a_sharded_model_points_and_a_batch_without_pointers_has_the_same_gradients(
    folders: dict[str, Path],
) -> None:
    """Train in bfloat16, where FSDP2 gathers the head with the root: every trained tensor has a gradient."""
    config = config_of(folders["qwen2_vl"], model={"dtype": "bfloat16"}, kl_beta=KL)
    model = TrainModel.load(config)
    batch = tree_batch(model.policy, groups=1)
    learner = PolicyLearner(model, config.train)
    text = batch.model_copy(
        update={"samples": [s for s in batch.samples if not s.images and s.weight]}
    )
    for each, moves in ((batch, True), (text, False)):
        assert learner.update(each, 0).applied
        head = {
            name: value.grad
            for name, value in model.trainable().items()
            if name.startswith("pointer_head.")
        }
        assert len(head) == 14
        assert all((grad.norm() > 0) == moves for grad in head.values() if grad is not None)
        assert None not in head.values()


def test_what_a_model_could_not_have_drawn_is_refused(folders: dict[str, Path]) -> None:
    policy = load_policy(folders["qwen2_vl"], pointing="pointer")
    batch = tree_batch(policy, groups=1)
    check_batch(batch, policy)
    pointing = [step for step in steps_of(batch) if step.patches]
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"patches": [999 if each >= 0 else -1 for each in pointing[0].patches]},
            r"patch 999, but .* has \d+ cells",
        ),
        ({"patches": []}, "must have a patch"),
        ({"behaviour_logprobs": [-1.0] * len(pointing[0].token_ids)}, "is forced"),
    ]
    for changes, cause in wrong:
        other = with_steps(batch, [with_changes(pointing[0], **changes)])
        with pytest.raises(ProtocolError, match=cause):
            check_batch(other, policy)
    text = load_policy(folders["qwen2_vl"])
    with pytest.raises(ProtocolError, match="a token that is never sampled"):
        check_batch(batch, text)
    plain = with_changes(pointing[0], token_ids=[5], behaviour_logprobs=[-1.0], patches=[0])
    with pytest.raises(ProtocolError, match="the policy writes numbers"):
        check_batch(with_steps(batch, [plain]), text)


def test_engine_and_trainer_agree_on_patches_before_and_after_a_live_update(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(folders["qwen3_vl"], lr=1e-3, pack_tokens=512)
    learner = PolicyLearner(TrainModel.load(config), config.train)
    engine = TransformersEngine(
        load_policy(folders["qwen3_vl"], pointing="pointer"), load_weights=load
    )
    likely = load_policy(folders["qwen3_vl"], pointing="pointer")
    state = torch.from_numpy(states_of(likely, batch := tree_batch(likely), batch.samples[0])[0][0])
    for policy in (learner.model.policy, engine.policy):
        assert policy.pointer is not None
        with torch.no_grad():  # it points now and then
            policy.model.get_output_embeddings().weight[policy.pointer.start] = 0.12 * state

    def played(version: int) -> Batch:
        trial = Trial(temperature=0.7, max_tokens=9, trajectories=4, texts=2, seed=version)
        responder = PolicyResponder(engine.policy, engine)
        return asyncio.run(play_trial(engine.policy, engine, responder, trial))

    first = played(0)
    assert any(sample.patches for sample in first.samples)
    before = rescore(learner.model, first, 512)
    assert before.mismatch().max <= 1e-5
    update = learner.update(first, 0, policy_version=0)
    assert update.applied
    assert rescore(learner.model, first, 512).mismatch().max > 1e-3, "the step moved it"
    asyncio.run(engine.update_weights(publish(learner.model.weights(), tmp_path, 1).path, 1))
    second = played(1)
    asyncio.run(engine.close())
    assert any(sample.patches for sample in second.samples)
    after = rescore(learner.model, second, 512)
    assert set(after.versions.tolist()) == {1}
    assert after.mismatch().max <= 1e-5

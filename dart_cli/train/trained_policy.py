"""The policy under training: log-probabilities of given tokens, with gradient.

    TrainModel   the trainable policy, with a frozen reference if the objective has a KL term, and a frozen
                 teacher if train.teacher_weight is set
    Scorer       the forward pass over a pack and the scores of its completion tokens, as one module

Forbidden tokens and the temperature are treated by the same code as in the engine
(dart_cli/policy/forward.py), so behaviour and policy log-probabilities are of the same distribution. The
logits of all tokens are never in memory at once (dart_cli/algo/chunked.py).

In float32 and in one process, the parameters are plain tensors. With several ranks, or in bfloat16, the
model is wrapped by FSDP2 (sharded.py), and its trained parameters are float32 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from bus.errors import ModelError
from dart_cli.algo.chunked import token_scores
from dart_cli.config.schema import Config
from dart_cli.config.teacher import CANNOT_SCORE
from dart_cli.hardware.device import pick_device
from dart_cli.policy.forward import ImageFeatures, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.lora import adapters_off
from dart_cli.policy.packed import PackedInputs, packed_hidden, use_recompute
from dart_cli.policy.pointer_head import PointerHead, head_of
from dart_cli.train.base import Tensors, read_all
from dart_cli.train.packs.pack import Pack, PointerRows
from dart_cli.train.sharded import (
    ShardingPlan,
    load_sharded,
    mesh_of_one,
    published_stream,
)
from dart_cli.weights.flat_weights import TensorStream, stream_of


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and entropies of the completion tokens of a pack."""

    logprobs: torch.Tensor  # [N], nats, of the distribution sampled from; with gradient
    entropies: torch.Tensor  # [N], nats, of the same distribution; without gradient


class Scorer(torch.nn.Module):
    """A model's forward pass and its scores in one call, so that hooks on the module enclose both.

    With `always_sees` the vision tower runs on a blank screen for a pack without screens, with no effect on
    the result: ranks that train the tower together must all run it.
    """

    def __init__(self, policy: LoadedPolicy, *, always_sees: bool = False) -> None:
        super().__init__()
        self.model = policy.model
        self.policy = policy
        self._blank = _blank(policy) if always_sees else None

    def forward(
        self,
        inputs: PackedInputs,
        features: ImageFeatures | None,
        rows: torch.Tensor,
        token_ids: torch.Tensor | None,
        temperature: float,
        pointers: PointerRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies [N] of `token_ids` after the pack's tokens `rows`, nats.

        At the end token of a pointer these are of the patch; at a pad they are 0. Without `token_ids`, return
        the hidden states [N, d] at `rows` and an empty tensor.
        """
        if features is None and inputs.images:
            features = image_features(self.model, inputs.images)
        zero: torch.Tensor | None = None
        if self._blank is not None and not inputs.images:
            # The tower runs before the language model, as it does for other packs.
            blank = image_features(self.model, [self._blank])
            parts = [*blank.embeds, *(part for level in blank.deepstack for part in level)]
            zero = torch.stack([part.sum() for part in parts]).sum() * 0
        hidden = packed_hidden(self.model, inputs, features=features)
        if zero is not None:
            hidden = hidden + zero
        states = hidden[rows.to(hidden.device)]
        if token_ids is None:
            return states, states.new_zeros(0)
        token_ids = token_ids.to(hidden.device)
        if self.policy.pointing == "text":
            return self._token_scores(states, token_ids, temperature)
        head = head_of(self.model)
        assert head is not None
        trained = [weight for weight in head.parameters() if weight.requires_grad]
        if trained and (pointers is None or not len(pointers.ends)):
            # The head gets a gradient of 0, so that all ranks reduce gradients of the same tensors.
            states = states + torch.stack([weight.sum() for weight in trained]).sum() * 0
        if pointers is None:
            return self._token_scores(states, token_ids, temperature)
        ends = pointers.ends.to(states.device)
        # Tokens that are drawn from the vocabulary: neither pads nor the ends of pointers.
        is_word = pointers.is_drawn.to(states.device).index_fill(0, ends, value=False)
        scores = self._token_scores(states[is_word], token_ids[is_word], temperature)
        if len(ends):
            assert features is not None
            of_patches = _patch_scores(
                head,
                states[ends],
                features.embeds,
                pointers.screens,
                pointers.patches,
                temperature=temperature,
            )
            places = torch.cat([torch.nonzero(is_word)[:, 0], ends])
            scores = (
                torch.cat([scores[0], of_patches[0]]),
                torch.cat([scores[1], of_patches[1]]),
            )
        else:
            places = torch.nonzero(is_word)[:, 0]
        logprobs, entropies = (
            values.new_zeros(len(states)).index_copy(0, places, values) for values in scores
        )
        return logprobs, entropies

    def _token_scores(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of tokens that were drawn from the vocabulary."""
        head: Any = self.model.get_output_embeddings()
        # Without autocast: the backward pass computes the products again, outside of the caller's autocast.
        with torch.autocast(states.device.type, enabled=False):
            return token_scores(
                states,
                head.weight.to(states.dtype),
                token_ids,
                temperature=temperature,
                forbidden=self.policy.forbidden(states.device),
            )


@dataclass(frozen=True)
class TrainModel:
    """The policy under training. `reference` is the model that the run started from, or None.

    With adapters the reference is the policy itself, scored without its adapters. `teacher` scores with
    another model of the same tokens and screens. It has a vision tower of its own, which sees pixels.
    """

    policy: LoadedPolicy
    scorer: Scorer
    reference: LoadedPolicy | None = None
    reference_scorer: Scorer | None = None
    teacher: Scorer | None = None
    plan: ShardingPlan | None = None  # None: plain tensors of one process
    replays: bool = (
        True  # the policy's routers take the rollout's choice of experts, where there is one
    )

    @classmethod
    def of(cls, policy: LoadedPolicy, reference: LoadedPolicy | None = None) -> TrainModel:
        """Return the model of loaded policies with plain tensors."""
        scorer = Scorer(policy)
        if reference is None:
            return cls(policy, scorer)
        return cls(policy, scorer, reference, scorer if reference is policy else Scorer(reference))

    @classmethod
    def load(cls, config: Config, mesh: DeviceMesh | None = None) -> TrainModel:
        """Load the models of a configuration, sharded over the ranks of `mesh`. Raises ModelError."""
        teacher_folder = config.teacher.model if config.train.teacher_weight else ""
        if teacher_folder:
            check_teacher(config)
        device, compute = pick_device(config.train.device), getattr(torch, config.model.dtype)
        if mesh is None and (compute != torch.float32 or config.train.offload != "none"):
            mesh = mesh_of_one(device)
        plan = None if mesh is None else ShardingPlan.of(mesh, compute, config.train.offload)
        pointing = config.policy.pointing

        def load_model(
            folder: str,
            prepare: Callable[[PreTrainedModel], None],
            has_sharded_tower: Callable[[LoadedPolicy], bool],
            **own: Any,
        ) -> tuple[LoadedPolicy, Scorer]:
            """Load a model folder, and return it with its scorer; `prepare` freezes parameters."""
            if plan is None:
                policy = load_policy(folder, config.model.dtype, device, pointing=pointing, **own)
                prepare(policy.model)
                return policy, Scorer(policy)

            def root(policy: LoadedPolicy) -> Scorer:
                return Scorer(policy, always_sees=has_sharded_tower(policy))

            return load_sharded(folder, plan, prepare=prepare, root=root, pointing=pointing, **own)

        policy, scorer = load_model(
            config.model.path,
            lambda model: _freeze(model, config),
            lambda policy: _trains_tower(policy.model),
            lora=config.model.lora,
            seed=config.run.seed,
            adapters=config.model.adapters,
        )
        if config.train.recompute == "layer":
            use_recompute(policy.model)
        reference, reference_scorer, teacher = None, None, None
        if config.train.kl_beta > 0 and config.model.lora is not None:
            reference, reference_scorer = policy, scorer
        elif config.train.kl_beta > 0:
            reference, reference_scorer = load_model(
                config.model.path,
                lambda model: _as_reference(model, policy),
                lambda _: _trains_tower(policy.model),
            )
        if teacher_folder:
            _, teacher = load_model(
                teacher_folder, lambda model: model.requires_grad_(False), lambda _: True
            )
        return cls(
            policy,
            scorer,
            reference,
            reference_scorer,
            teacher,
            plan,
            replays=config.train.replay_routing,
        )

    @classmethod
    def load_frozen(cls, config: Config) -> TrainModel:
        """Load the model of a configuration only to score tokens. Raises ModelError.

        The weights are plain tensors of the model's type, without float32 masters, gradients and reference.
        It gives the same scores as a model from `load`, bit for bit.
        """
        policy = load_policy(
            config.model.path,
            config.model.dtype,
            pick_device(config.train.device),
            lora=config.model.lora,
            seed=config.run.seed,
            pointing=config.policy.pointing,
            adapters=config.model.adapters,
        )
        policy.model.requires_grad_(False)
        return replace(cls.of(policy), replays=config.train.replay_routing)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which weights and activations are computed, and weights are published."""
        dtype: torch.dtype = self.policy.model.dtype if self.plan is None else self.plan.compute
        return dtype

    def score(self, pack: Pack, temperature: float) -> TokenScores:
        """Return the policy's scores of a pack."""
        return _scores(self.scorer, pack if self.replays else _unrouted(pack), temperature)

    @torch.no_grad()
    def states(self, pack: Pack) -> torch.Tensor:
        """Return the hidden states [S, d] at the last token of each sample's prompt, in main memory."""
        lengths = torch.tensor(pack.lengths, dtype=torch.int64)
        rows = pack.rows[lengths.cumsum(0) - lengths]
        routed = pack if self.replays else _unrouted(pack)
        states, _ = self.scorer(routed.inputs, pack.features, rows, None, 1.0)
        return states.float().cpu()  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack, temperature: float) -> torch.Tensor | None:
        """Return the reference's log-probabilities [N]; None without a reference."""
        if self.reference_scorer is None:
            return None
        without = (
            adapters_off(self.policy.model) if self.reference is self.policy else nullcontext()
        )
        with without:
            # Features, if there are any, are of a frozen tower, which has not changed since the run started.
            return _scores(self.reference_scorer, _unrouted(pack), temperature).logprobs

    @torch.no_grad()
    def teacher_logprobs(self, pack: Pack, temperature: float) -> torch.Tensor | None:
        """Return the teacher's log-probabilities [N]; None without a teacher. The pack must have pixels."""
        if self.teacher is None:
            return None
        return _scores(self.teacher, replace(_unrouted(pack), features=None), temperature).logprobs

    def reshard(self) -> None:
        """Free the weights that a forward pass gathered for a backward pass, if none follows."""
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are updated, by name."""
        parameters = self.policy.model.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    def weights(self) -> Tensors:
        """Return all tensors that are published, by name.

        Every rank calls it; only rank 0 gets whole tensors.
        """
        return read_all(self.stream())

    def stream(self) -> TensorStream:
        """Return a stream of all tensors that are published.

        If the model is sharded over several ranks, every rank must read the whole stream.
        """
        tensors = weight_tensors(self.policy.model)
        return (
            stream_of(tensors)
            if self.plan is None
            else published_stream(tensors, self.plan.compute)
        )


def check_teacher(config: Config) -> None:
    """Raise ModelError unless the teacher's tokens and screens are those of the policy; no weights are read.

    The distributions of both models must be over the same tokens: what one forbids, the other forbids too.
    """
    policy, teacher = (
        load_policy(folder, weights=False, pointing=config.policy.pointing)
        for folder in (config.model.path, config.teacher.model)
    )
    problem = ""
    tokens, others = (
        (each.tokenizer.get_vocab(), each.image_token_id) for each in (policy, teacher)
    )
    if tokens != others:
        problem = "has another tokenizer"
    elif teacher.drawn_token_ids() != policy.drawn_token_ids():
        problem = "has other end tokens (generation_config.json, tokenizer_config.json)"
    elif teacher.pointer != policy.pointer:
        problem = "has other tokens for pointers"
    elif not teacher.images.prepares_as(policy.images):
        problem = "prepares screens otherwise (preprocessor_config.json)"
    if problem:
        text = CANNOT_SCORE.format(detail=problem, teacher=config.teacher, model=config.model)
        raise ModelError(f"teacher.model {text}")


def _freeze(model: PreTrainedModel, config: Config) -> None:
    """Freeze the parameters that the configuration does not train.

    With adapters, all parameters but the adapters are frozen already.
    """
    if config.model.freeze_vision:
        inner: Any = model.model
        inner.visual.requires_grad_(False)
    if config.policy.pointing == "text" and (head := head_of(model)) is not None:
        head.requires_grad_(False)


def _trains_tower(model: PreTrainedModel) -> bool:
    inner: Any = model.model
    return any(parameter.requires_grad for parameter in inner.visual.parameters())


def _as_reference(model: PreTrainedModel, policy: LoadedPolicy) -> None:
    """Freeze a reference model. It shares the policy's vision tower if that is frozen too."""
    model.requires_grad_(False)
    if not _trains_tower(policy.model):
        inner: Any = policy.model.model
        other: Any = model.model
        other.visual = inner.visual


def _blank(policy: LoadedPolicy) -> PreparedImage:
    """Return a small black screen, prepared for the vision tower."""
    side = 2 * policy.images.factor
    return policy.images.of_image("blank", Image.new("RGB", (side, side)))


def _unrouted(pack: Pack) -> Pack:
    """Return a pack in which the routers choose themselves, as those of a model do that sampled nothing."""
    return replace(pack, inputs=replace(pack.inputs, replay=None))


def _scores(scorer: Scorer, pack: Pack, temperature: float) -> TokenScores:
    inputs = pack.inputs, pack.features, pack.rows, pack.token_ids
    return TokenScores(*scorer(*inputs, temperature, pack.pointers))


def _patch_scores(
    head: PointerHead,
    hidden: torch.Tensor,
    visual: Sequence[torch.Tensor],
    screens: torch.Tensor,
    patches: torch.Tensor,
    *,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [M] and entropies [M], nats, of the distributions over patches.

    `hidden` [M, d] are the states of the pads, and `visual` has the embeddings [P, d] of each distinct
    image. A pointer selects from the image `screens` [M], and `patches` [M] are the cells that were drawn.
    `temperature` divides the logits, as it does for tokens. The keys of an image are computed once for all
    of its pointers. The entropies have no gradient. Numbers are in float32 or better.
    """
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    order: list[torch.Tensor] = []
    for screen in sorted(set(screens.tolist())):
        rows = torch.nonzero(screens == screen)[:, 0].to(hidden.device)
        table = F.log_softmax(head(visual[screen], hidden[rows]) / temperature, dim=-1)
        cells = patches.to(hidden.device)[rows]
        logprobs.append(table.gather(1, cells[:, None])[:, 0])
        detached = table.detach()
        entropies.append(-(detached.exp() * detached).sum(dim=-1))
        order.append(rows)
    back = torch.cat(order).argsort()
    return torch.cat(logprobs)[back], torch.cat(entropies)[back]

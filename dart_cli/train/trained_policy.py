"""The policy as the trainer sees it: log-probabilities of given tokens, with gradient.

    TrainModel   the trainable policy, and a frozen reference where the KL asks for one
    Scorer       the forward pass over a pack and the scores of its completion tokens, as one module

The forbidden tokens and the temperature are the engine's own (dart_cli/policy/forward.py), so behaviour
and policy log-probabilities mean the same distribution. The logits of all tokens are never in memory
together (dart_cli/algo/chunked.py).

Float32 in one process is plain tensors. With several ranks, or in bfloat16, the model is FSDP2's
(sharded.py): its trained parameters are float32 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from dart_cli.algo.chunked import token_scores
from dart_cli.config.schema import Config
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
    published,
)
from dart_cli.weights.flat_weights import TensorStream, stream_of


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and entropies of the completion tokens of a pack."""

    logprobs: torch.Tensor  # [N], nats, of the distribution sampled from; with gradient
    entropies: torch.Tensor  # [N], nats, of the same; without gradient


class Scorer(torch.nn.Module):
    """A model's forward pass and its scores in one call, so that hooks on it see both.

    With `always_sees` a pack without screens sees a blank one, which adds nothing: ranks that train the
    vision tower together must all run it.
    """

    def __init__(self, policy: LoadedPolicy, *, always_sees: bool = False) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy
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
        """Log-probabilities and entropies [N] of `token_ids` after the pack's tokens `rows`, nats.

        Those of a pointer's end are of its patch, those of a pad 0. Without `token_ids` the states [N, d] at
        `rows`, and nothing.
        """
        if features is None and inputs.images:
            features = image_features(self.model, inputs.images)
        nothing: torch.Tensor | None = None
        if self._blank is not None and not inputs.images:  # before the language model, as elsewhere
            seen = image_features(self.model, [self._blank])
            parts = [*seen.embeds, *(each for level in seen.deepstack for each in level)]
            nothing = torch.stack([part.sum() for part in parts]).sum() * 0
        hidden = packed_hidden(self.model, inputs, features=features)
        if nothing is not None:
            hidden = hidden + nothing
        states = hidden[rows.to(hidden.device)]
        if token_ids is None:
            return states, states.new_zeros(0)
        token_ids = token_ids.to(hidden.device)
        if self._policy.pointing == "text":
            return self._of_tokens(states, token_ids, temperature)
        head = head_of(self.model)
        assert head is not None
        trained = [each for each in head.parameters() if each.requires_grad]
        if trained and (pointers is None or not len(pointers.ends)):
            # Gradients are of the same tensors on every rank, whether its pack points or not.
            states = states + torch.stack([each.sum() for each in trained]).sum() * 0
        if pointers is None:
            return self._of_tokens(states, token_ids, temperature)
        ends = pointers.ends.to(states.device)
        spoken = pointers.drawn.to(states.device).index_fill(0, ends, value=False)
        found = self._of_tokens(states[spoken], token_ids[spoken], temperature)
        if len(ends):
            assert features is not None
            pointed = _patch_scores(
                head,
                states[ends],
                features.embeds,
                pointers.screens,
                pointers.patches,
                temperature=temperature,
            )
            places = torch.cat([torch.nonzero(spoken)[:, 0], ends])
            found = torch.cat([found[0], pointed[0]]), torch.cat([found[1], pointed[1]])
        else:
            places = torch.nonzero(spoken)[:, 0]
        logprobs, entropies = (
            values.new_zeros(len(states)).index_copy(0, places, values) for values in found
        )
        return logprobs, entropies

    def _of_tokens(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of tokens that were drawn from the vocabulary."""
        head: Any = self.model.get_output_embeddings()
        # Its backward pass makes the products again, outside of an autocast that is around this one.
        with torch.autocast(states.device.type, enabled=False):
            return token_scores(
                states,
                head.weight.to(states.dtype),
                token_ids,
                temperature=temperature,
                forbidden=self._policy.forbidden(states.device),
            )


@dataclass(frozen=True)
class TrainModel:
    """The policy under training. `reference` is the model that the run started from, or None.

    With adapters it is the policy itself, which is scored without them then.
    """

    policy: LoadedPolicy
    scorer: Scorer
    reference: LoadedPolicy | None = None
    reference_scorer: Scorer | None = None
    plan: ShardingPlan | None = None  # None: plain tensors of one process

    @classmethod
    def of(cls, policy: LoadedPolicy, reference: LoadedPolicy | None = None) -> TrainModel:
        """Of loaded policies, whose tensors are plain."""
        scorer = Scorer(policy)
        if reference is None:
            return cls(policy, scorer)
        return cls(policy, scorer, reference, scorer if reference is policy else Scorer(reference))

    @classmethod
    def load(cls, config: Config, mesh: DeviceMesh | None = None) -> TrainModel:
        """Load the model that a configuration begins with, over the ranks of `mesh`. Raises ModelError."""
        device, compute = pick_device(config.train.device), getattr(torch, config.model.dtype)
        if mesh is None and (compute != torch.float32 or config.train.offload != "none"):
            mesh = mesh_of_one(device)
        plan = None if mesh is None else ShardingPlan.of(mesh, compute, config.train.offload)
        pointing = config.policy.pointing

        def made(
            prepare: Callable[[PreTrainedModel], None], trained: LoadedPolicy | None, **own: Any
        ) -> tuple[LoadedPolicy, Scorer]:
            """Return the model folder, with what `prepare` leaves to be trained, beside the `trained` policy."""
            if plan is None:
                policy = load_policy(
                    config.model.path, config.model.dtype, device, pointing=pointing, **own
                )
                prepare(policy.model)
                return policy, Scorer(policy)

            def root(policy: LoadedPolicy) -> Scorer:
                return Scorer(policy, always_sees=_trains_tower((trained or policy).model))

            return load_sharded(
                config.model.path, plan, prepare=prepare, root=root, pointing=pointing, **own
            )

        policy, scorer = made(
            lambda model: _freeze(model, config),
            None,
            lora=config.model.lora,
            seed=config.run.seed,
            adapters=config.model.adapters,
        )
        if config.train.recompute == "layer":
            use_recompute(policy.model)
        if config.train.kl_beta == 0:
            return cls(policy, scorer, plan=plan)
        if config.model.lora is not None:
            return cls(policy, scorer, policy, scorer, plan)
        return cls(policy, scorer, *made(lambda model: _as_reference(model, policy), policy), plan)

    @classmethod
    def load_frozen(cls, config: Config) -> TrainModel:
        """Load what `load` does to score tokens, and to score them alone. Raises ModelError.

        The weights are plain tensors of the model's type, without masters, gradients and reference. The scores
        are those of `load`, bit for bit.
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
        return cls.of(policy)

    @property
    def dtype(self) -> torch.dtype:
        """What weights and activations are computed in, and published in."""
        dtype: torch.dtype = self.policy.model.dtype if self.plan is None else self.plan.compute
        return dtype

    def score(self, pack: Pack, temperature: float) -> TokenScores:
        """Return the policy's scores of a pack."""
        return _scores(self.scorer, pack, temperature)

    @torch.no_grad()
    def states(self, pack: Pack) -> torch.Tensor:
        """Return the policy's states [S, d] at the last token of each sample's prompt, in main memory."""
        lengths = torch.tensor(pack.lengths, dtype=torch.int64)
        rows = pack.rows[lengths.cumsum(0) - lengths]
        found, _ = self.scorer(pack.inputs, pack.features, rows, None, 1.0)
        return found.float().cpu()  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack, temperature: float) -> torch.Tensor | None:
        """Return the reference's log-probabilities [N]; None without a reference."""
        if self.reference_scorer is None:
            return None
        without = (
            adapters_off(self.policy.model) if self.reference is self.policy else nullcontext()
        )
        with without:
            # Features are those of a frozen tower, which is as it was when the run started.
            return _scores(self.reference_scorer, pack, temperature).logprobs

    def reshard(self) -> None:
        """Free what a forward pass gathered for a backward pass that will not come."""
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are updated, by name."""
        named = self.policy.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def weights(self) -> Tensors:
        """All tensors that are published, by name; every rank calls it, what rank 0 gets is of meaning."""
        return read_all(self.stream())

    def stream(self) -> TensorStream:
        """All tensors that are published, one after another. Every rank reads all of it where the model is sharded over several."""
        tensors = weight_tensors(self.policy.model)
        return stream_of(tensors) if self.plan is None else published(tensors, self.plan.compute)


def _freeze(model: PreTrainedModel, config: Config) -> None:
    """Mark what is not trained, beside what adapters leave as it is."""
    if config.model.freeze_vision:
        inner: Any = model.model
        inner.visual.requires_grad_(False)
    if config.policy.pointing == "text" and (head := head_of(model)) is not None:
        head.requires_grad_(False)


def _trains_tower(model: PreTrainedModel) -> bool:
    inner: Any = model.model
    return any(parameter.requires_grad for parameter in inner.visual.parameters())


def _as_reference(model: PreTrainedModel, policy: LoadedPolicy) -> None:
    """Train nothing of it, and give it the policy's vision tower where that is frozen: one copy is enough."""
    model.requires_grad_(False)
    if not _trains_tower(policy.model):
        inner: Any = policy.model.model
        other: Any = model.model
        other.visual = inner.visual


def _blank(policy: LoadedPolicy) -> PreparedImage:
    """Return a small screen of no content."""
    side = 2 * policy.images.factor
    return policy.images.of_image("blank", Image.new("RGB", (side, side)))


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
    """Log-probabilities [M] and entropies [M], nats, of the distributions over patches.

    `hidden` [M, d] are the states of the pads, `visual` [P, d] the embeddings of each distinct image, of
    which `screens` [M] is pointed into, and `patches` [M] the cells that were drawn; `temperature` divides
    the logits, as those of tokens. An image's keys are made once, however many pointers look at it. The
    entropies have no gradient. In float32 or better.
    """
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    order: list[torch.Tensor] = []
    for screen in sorted(set(screens.tolist())):
        rows = torch.nonzero(screens == screen)[:, 0].to(hidden.device)
        table = F.log_softmax(head(visual[screen], hidden[rows]) / temperature, dim=-1)
        chosen = patches.to(hidden.device)[rows]
        logprobs.append(table.gather(1, chosen[:, None])[:, 0])
        told = table.detach()
        entropies.append(-(told.exp() * told).sum(dim=-1))
        order.append(rows)
    back = torch.cat(order).argsort()
    return torch.cat(logprobs)[back], torch.cat(entropies)[back]

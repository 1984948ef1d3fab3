"""The policy under training: log-probabilities of given tokens, with gradient.

    TrainModel   the trainable policy, with a frozen reference if the objective has a KL term, and a frozen
                 teacher if train.teacher_weight is set and teacher.model names one
    Scorer       the forward pass over a pack and the scores of its completion tokens, as one module
    TeacherView  what a teacher predicts at a pack's completion tokens: its states, not its logits
    TaughtSteps  what a teacher predicts at the steps of a batch whose prompts have hints

Forbidden tokens and the temperature are treated by the same code as in the engine
(dart_cli/policy/forward.py), so behaviour and policy log-probabilities are of the same distribution. The
logits of all tokens are never in memory at once (dart_cli/algo/chunked.py).

In float32 and in one process, the parameters are plain tensors. With several ranks, or in bfloat16, the
model is wrapped by FSDP2 (sharded.py), and its trained parameters are float32 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from bus.errors import ModelError
from bus.messages import Sample
from dart_cli.algo.chunked import taught_scores, token_scores
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
    gaps: torch.Tensor | None = None
    """[N], -KL(policy || teacher) of the same distribution, nats; with gradient. None without a teacher."""


@dataclass(frozen=True)
class TeacherView:
    """What a teacher predicts at the completion tokens of a pack, from which its distributions follow.

    Its logits would take V / d times as much memory as its states.
    """

    states: torch.Tensor  # [N, d], its hidden states; 0 where it did not score
    is_scored: torch.Tensor  # [N], bool
    tables: tuple[torch.Tensor | None, ...] = ()
    """[M], log-probabilities of the patches of each pointer's screen, nats; None where it did not score."""
    weight: torch.Tensor | None = None  # [V, d], its output embedding; None: the policy's own


Step = tuple[str, int]
"""A trajectory and a step of it."""


class TaughtSteps:
    """What a teacher predicts at the steps of a batch, in main memory."""

    def __init__(self) -> None:
        self._steps: dict[Step, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def add(self, pack: Pack, states: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """Keep the states [N, d] and the patches' tables [M] of a pack."""
        remaining = iter(tables)
        for sample, own in zip(pack.samples, torch.split(states, pack.lengths), strict=True):
            pointers = sum(patch >= 0 for patch in sample.patches)
            of_sample = [next(remaining).cpu() for _ in range(pointers)]
            self._steps[_step(sample)] = own.to("cpu", copy=True), of_sample

    def view(self, pack: Pack, weight: torch.Tensor | None) -> TeacherView | None:
        """Return what the teacher predicts at a pack's tokens; None if it scored none of them."""
        if not any(_step(sample) in self._steps for sample in pack.samples):
            return None
        width = next(iter(self._steps.values()))[0]
        states, is_scored = [], []
        tables: list[torch.Tensor | None] = []
        for sample in pack.samples:
            own = self._steps.get(_step(sample))
            states.append(own[0] if own else width.new_zeros((len(sample), width.shape[1])))
            is_scored.append(torch.full((len(sample),), own is not None))
            tables += own[1] if own else [None for patch in sample.patches if patch >= 0]
        return TeacherView(torch.cat(states), torch.cat(is_scored), tuple(tables), weight)


def _step(sample: Sample) -> Step:
    return sample.trajectory_id, sample.step


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
        teacher: TeacherView | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities and entropies [N] of `token_ids` after the pack's tokens `rows`, nats.

        At the end token of a pointer these are of the patch; at a pad they are 0. With `teacher` also return
        the negative KL to it [N]. Without `token_ids`, return the hidden states [N, d] at `rows`, and then
        the log-probabilities of the patches of each pointer.
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
            tables: Sequence[torch.Tensor] = ()
            if pointers is not None and len(pointers.ends) and features is not None:
                head = head_of(self.model)
                assert head is not None
                ends = pointers.ends.to(states.device)
                tables = _patch_tables(head, states[ends], features, pointers, temperature)
            return states, *tables
        token_ids = token_ids.to(hidden.device)
        if self.policy.pointing == "text":
            return self._token_scores(states, token_ids, temperature, teacher)
        head = head_of(self.model)
        assert head is not None
        trained = [weight for weight in head.parameters() if weight.requires_grad]
        if trained and (pointers is None or not len(pointers.ends)):
            # The head gets a gradient of 0, so that all ranks reduce gradients of the same tensors.
            states = states + torch.stack([weight.sum() for weight in trained]).sum() * 0
        if pointers is None:
            return self._token_scores(states, token_ids, temperature, teacher)
        ends = pointers.ends.to(states.device)
        # Tokens that are drawn from the vocabulary: neither pads nor the ends of pointers.
        is_word = pointers.is_drawn.to(states.device).index_fill(0, ends, value=False)
        words = teacher
        if teacher is not None:
            words = replace(teacher, states=teacher.states[is_word.to(teacher.states.device)])
        scores = self._token_scores(states[is_word], token_ids[is_word], temperature, words)
        places = torch.nonzero(is_word)[:, 0]
        if len(ends):
            assert features is not None
            of_patches = _patch_scores(
                _patch_tables(head, states[ends], features, pointers, temperature),
                pointers.patches,
                None if teacher is None else teacher.tables,
            )
            places = torch.cat([places, ends])
            scores = tuple(map(torch.cat, zip(scores, of_patches, strict=True)))
        return tuple(
            values.new_zeros(len(states)).index_copy(0, places, values) for values in scores
        )

    def head_weight(self) -> torch.Tensor:
        """Return the output embedding, of a model that is gathered or not sharded."""
        head: Any = self.model.get_output_embeddings()
        weight: torch.Tensor = head.weight
        return weight.detach()

    def _token_scores(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
        teacher: TeacherView | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the scores of tokens that were drawn from the vocabulary."""
        head: Any = self.model.get_output_embeddings()
        weight = head.weight.to(states.dtype)
        options: dict[str, Any] = {
            "temperature": temperature,
            "forbidden": self.policy.forbidden(states.device),
        }
        # Without autocast: the backward pass computes the products again, outside of the caller's autocast.
        with torch.autocast(states.device.type, enabled=False):
            if teacher is None:
                return token_scores(states, weight, token_ids, **options)
            theirs = weight if teacher.weight is None else teacher.weight
            their_states = teacher.states.to(states.device, theirs.dtype)
            return taught_scores(
                states, weight, token_ids, their_states, theirs.to(states.device), **options
            )


@dataclass(frozen=True)
class TrainModel:
    """The policy under training. `reference` is the model that the run started from, or None.

    With adapters the reference is the policy itself, scored without its adapters. `teacher` scores with
    another model of the same tokens and screens. It has a vision tower of its own, which sees pixels. With
    `hints` the teacher's prompts name the next step, and without a `teacher` the reference reads them. The
    present weights would not do: what is learned about prompts without hints changes how they read hints.
    """

    policy: LoadedPolicy
    scorer: Scorer
    reference: LoadedPolicy | None = None
    reference_scorer: Scorer | None = None
    teacher: Scorer | None = None
    hints: bool = False
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
            *,
            keeps_head: bool = False,
            **own: Any,
        ) -> tuple[LoadedPolicy, Scorer]:
            """Load a model folder, and return it with its scorer; `prepare` freezes parameters."""
            if plan is None:
                policy = load_policy(folder, config.model.dtype, device, pointing=pointing, **own)
                prepare(policy.model)
                return policy, Scorer(policy)

            def root(policy: LoadedPolicy) -> Scorer:
                return Scorer(policy, always_sees=has_sharded_tower(policy))

            return load_sharded(
                folder,
                plan,
                prepare=prepare,
                root=root,
                pointing=pointing,
                keeps_head=keeps_head,
                **own,
            )

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
        hints = config.teacher.hints and config.train.teacher_weight > 0
        teaches_itself = hints and not teacher_folder
        if (config.train.kl_beta > 0 or teaches_itself) and config.model.lora is not None:
            reference, reference_scorer = policy, scorer
        elif config.train.kl_beta > 0 or teaches_itself:
            reference, reference_scorer = load_model(
                config.model.path,
                lambda model: _as_reference(model, policy),
                lambda _: _trains_tower(policy.model),
                keeps_head=teaches_itself,
            )
        if teacher_folder:
            _, teacher = load_model(
                teacher_folder,
                lambda model: model.requires_grad_(False),
                lambda _: True,
                keeps_head=True,  # the policy's pass compares both heads' logits
            )
        return cls(
            policy,
            scorer,
            reference,
            reference_scorer,
            teacher,
            hints,
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

    def score(
        self, pack: Pack, temperature: float, teacher: TeacherView | None = None
    ) -> TokenScores:
        """Return the policy's scores of a pack, compared with a teacher's if there is one."""
        routed = pack if self.replays else _unrouted(pack)
        return _scores(self.scorer, routed, temperature, teacher)

    @torch.no_grad()
    def states(self, pack: Pack) -> torch.Tensor:
        """Return the hidden states [S, d] at the last token of each sample's prompt, in main memory."""
        lengths = torch.tensor(pack.lengths, dtype=torch.int64)
        rows = pack.rows[lengths.cumsum(0) - lengths]
        routed = pack if self.replays else _unrouted(pack)
        states, *_ = self.scorer(routed.inputs, pack.features, rows, None, 1.0)
        return states.float().cpu()  # type: ignore[no-any-return]

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack, temperature: float) -> torch.Tensor | None:
        """Return the reference's log-probabilities [N]; None without a reference."""
        if self.reference_scorer is None:
            return None
        with self._as_it_began():
            # Features, if there are any, are of a frozen tower, which has not changed since the run started.
            return _scores(self.reference_scorer, _unrouted(pack), temperature).logprobs

    def _as_it_began(self) -> AbstractContextManager[None]:
        """Return a context in which the policy with adapters is the model that the run started from."""
        return adapters_off(self.policy.model) if self.reference is self.policy else nullcontext()

    def teacher_view(self, pack: Pack, temperature: float) -> TeacherView | None:
        """Return what a teacher's folder predicts at a pack's tokens; None without one, or with hints.

        The pack must have pixels.
        """
        if self.teacher is None or self.hints:
            return None
        states, *tables = _predicted(self.teacher, replace(pack, features=None), temperature)
        is_scored = torch.ones(len(states), dtype=torch.bool)
        return TeacherView(states, is_scored, tuple(tables), self.teacher.head_weight())

    def add_taught(self, taught: TaughtSteps, pack: Pack, temperature: float) -> None:
        """Add what the teacher predicts at the tokens of a pack whose prompts have hints.

        With a teacher of other weights the pack must have pixels.
        """
        if self.teacher is not None:
            states, *tables = _predicted(self.teacher, replace(pack, features=None), temperature)
        else:
            assert self.reference_scorer is not None
            with self._as_it_began():
                states, *tables = _predicted(self.reference_scorer, pack, temperature)
        taught.add(pack, states, tables)

    def taught_view(self, taught: TaughtSteps, pack: Pack) -> TeacherView | None:
        """Return what the teacher predicted, with hints, at a pack's tokens; None if nothing."""
        scorer = self.teacher or self.reference_scorer
        # The head of a policy with adapters is frozen, and its own.
        return taught.view(
            pack, None if scorer is self.scorer or scorer is None else scorer.head_weight()
        )

    def reshard(self) -> None:
        """Free the weights that a forward pass gathered for a backward pass, if none follows."""
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def reshard_teacher(self) -> None:
        """Free the teacher's head, which stays gathered from its forward pass on."""
        apart = None if self.reference is self.policy else self.reference_scorer
        root: object = self.teacher or apart
        if isinstance(root, FSDPModule):
            root.reshard()

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


def _scores(
    scorer: Scorer, pack: Pack, temperature: float, teacher: TeacherView | None = None
) -> TokenScores:
    inputs = pack.inputs, pack.features, pack.rows, pack.token_ids
    return TokenScores(*scorer(*inputs, temperature, pack.pointers, teacher))


@torch.no_grad()
def _predicted(scorer: Scorer, pack: Pack, temperature: float) -> tuple[torch.Tensor, ...]:
    """Return a teacher's states [N, d] that predict a pack's tokens, and its tables of the pointers' patches [M]."""
    states: tuple[torch.Tensor, ...] = scorer(
        _unrouted(pack).inputs, pack.features, pack.rows, None, temperature, pack.pointers
    )
    return states


def _patch_tables(
    head: PointerHead,
    hidden: torch.Tensor,
    features: ImageFeatures,
    pointers: PointerRows,
    temperature: float,
) -> list[torch.Tensor]:
    """Return log-probabilities [M] of the patches [P] of the screen of each pointer, nats.

    `hidden` [M, d] are the states of the pads, and `features` has the embeddings [P, d] of each distinct
    image. `temperature` divides the logits, as it does for tokens. The keys of an image are computed once for
    all of its pointers. Numbers are in float32 or better.
    """
    tables: dict[int, torch.Tensor] = {}
    for screen in sorted(set(pointers.screens.tolist())):
        rows = torch.nonzero(pointers.screens == screen)[:, 0].to(hidden.device)
        of_screen = F.log_softmax(head(features.embeds[screen], hidden[rows]) / temperature, dim=-1)
        tables |= zip(rows.tolist(), of_screen, strict=True)
    return [tables[index] for index in range(len(tables))]


def _patch_scores(
    tables: Sequence[torch.Tensor],
    patches: torch.Tensor,
    teacher: Sequence[torch.Tensor | None] | None,
) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities and entropies [M], nats, of the `patches` [M] that were drawn.

    `tables` [M] are the log-probabilities of all patches. With a `teacher`'s tables [M], also return the
    negative KLs to it, 0 where it has none. The entropies have no gradient.
    """
    cells = patches.tolist()
    logprobs = torch.stack([table[cell] for table, cell in zip(tables, cells, strict=True)])
    entropies = torch.stack(
        [-(table.exp() * table).sum() for table in (table.detach() for table in tables)]
    )
    if teacher is None:
        return logprobs, entropies
    gaps = [
        table.new_zeros(())
        if theirs is None
        else (table.exp() * (theirs.to(table.device, table.dtype) - table)).sum()
        for table, theirs in zip(tables, teacher, strict=True)
    ]
    return logprobs, entropies, torch.stack(gaps)

"""One update from one batch.

    PolicyLearner   model and AdamW; `update` learns from one batch

An update is `train.epochs` passes over the batch, each with one optimizer step on all of it. The
first pass runs on the weights before the update, which are the proximal policy: its own
log-probabilities, detached, are the proximal ones of every pass, and nothing is computed twice
(docs/objective.md).

Rank 0 cuts a batch into shares (packs/share.py), one for each rank; all ranks train on theirs at
once. A rank adds up the gradients of its packs; what decides about the step is gathered first, so that
all ranks skip, clip and end alike.

AdamW steps on float32 weights, which are their own masters: bfloat16 has eight bits, too few for an
update of 1e-6 on a weight of 0.1. A model that computes in bfloat16, or on several ranks, keeps them as
shards (sharded.py), and rounds them where a layer is about to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch

from bus.messages import Batch, StepMismatch
from bus.ranks import Share
from dart_cli.algo.learning_rate import RunPoint, Schedule, learning_rate
from dart_cli.algo.loss import TokenStats, policy_loss
from dart_cli.algo.objective import Objective, ess_factor
from dart_cli.config.schema import TrainConfig
from dart_cli.policy.model import weight_tensors
from dart_cli.train.agreement import gradient_agreement
from dart_cli.train.average import AveragedWeights
from dart_cli.train.base import SavedState, Tensors
from dart_cli.train.logprob_gaps import step_mismatches
from dart_cli.train.model import TokenScores, TrainModel
from dart_cli.train.packs.feed import PackFeed
from dart_cli.train.packs.pack import Pack, batch_shares, check
from dart_cli.train.packs.pointers import pad_of
from dart_cli.train.packs.share import shares_of
from dart_cli.train.parity import ComparedTokens, ParityGate, all_of, compare
from dart_cli.train.ranks.gathering import Found, gathered
from dart_cli.train.ranks.group import RankGroup, SingleRank
from dart_cli.train.sharded import Gradients, whole
from dart_cli.train.state import restore, state_of

TIMES = ("prepare_s", "forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    applied: bool  # False where the weights stayed as they were
    metrics: dict[str, float]  # see docs/objective.md
    note: str = ""  # why they stayed, or what was unusual
    alarm: str = ""  # why the run must stop: engine and trainer disagree (parity.py)
    mismatches: list[StepMismatch] = field(default_factory=list)  # before the update


class PolicyLearner:
    """Updates one model. Not thread-safe: one thread at a time."""

    def __init__(
        self, model: TrainModel, config: TrainConfig, rank_group: RankGroup | None = None
    ) -> None:
        self.model = model
        self.before_change: Callable[[], None] = lambda: None
        self._config = config
        self._rank_group: RankGroup = rank_group or SingleRank()
        self._objective = Objective(
            **{part.name: getattr(config, part.name) for part in fields(Objective)}
        )
        schedule = {part.name: getattr(config, part.name) for part in fields(Schedule)}
        self._schedule = Schedule(**schedule | {"lr": config.rate})
        self._parameters = model.trainable()
        self._averaged: AveragedWeights | None = None
        if config.average:
            self._averaged = AveragedWeights(self._parameters, config.average)
            if config.average_for == "serving":
                model.served.update(self._averaged.tensors)
        self._gate = ParityGate(config, model)
        self._gradients = Gradients(model.scorer, self._parameters.values())
        matrices = [value for value in self._parameters.values() if value.ndim >= 2]
        vectors = [value for value in self._parameters.values() if value.ndim < 2]
        # Biases and gains of norms are not decayed, as usual.
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.rate,
            betas=config.betas,
            fused=True,
        )

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Learn from `batch`, once; `updates_done` places it in the schedule.

        `policy_version` is the published version that the present weights (or their average, where
        that is served) are, if any: for tokens that it sampled, behaviour log-probabilities must agree
        with the trainer's; if they do not, nothing is changed and the update says so (`alarm`).

        Raises ProtocolError if the batch does not fit the model, before anything has changed.
        """
        began = time.monotonic()
        [share] = self.shares(batch, updates_done, policy_version)
        return self.train_on(share, began)

    def shares(
        self, batch: Batch, updates_done: int, policy_version: int | None = None
    ) -> list[Share]:
        """What each rank does for the update on `batch`; as `update`. Changes nothing."""
        check(batch, self.model.policy)
        looked_back, version = self._gate.to_look_back(batch, policy_version)
        return shares_of(
            batch,
            looked_back,
            batch_shares(
                batch,
                self._config.normalise,
                self._config.constant_tokens,
                pad_of(self.model.policy),
            ),
            self.model.policy,
            rate=learning_rate(self._schedule, _run_point(batch, updates_done)),
            policy_version=policy_version,
            looked_back_version=version,
            pack_tokens=self._config.pack_tokens,
            ranks=self._rank_group.size,
        )

    def train_on(self, share: Share, began: float | None = None) -> Update:
        """Take this rank's part in an update; every rank does so, and they return alike.

        `began` is the moment of the monotonic clock when its preparation began. Raises EngineError for
        a screen that does not decode.
        """
        norms: list[float] = []  # of the steps that were taken
        verdict, note, alarm = _Verdict(), "", ""
        parity: dict[str, float] = {}
        agreement: float | None = None
        with PackFeed(
            share.work,
            share.token_weights,
            self.model.policy,
            workers=self._config.image_workers,
            passes=self._config.epochs,
        ) as packs:
            work = _Progress(share, packs, _StageTimer(TIMES, began))
            if share.looked_back.packs:  # the gate puts kept weights in place of the present ones
                self.before_change()
            looked_back = self._gate.look_back(share.looked_back, share.looked_back_version)
            if not share.work.packs:
                note = "no sample with a weight (update skipped)"
            for _ in range(self._config.epochs if share.work.packs else 0):
                found = gathered(self._rank_group, self._accumulate(work, looked_back))
                work.stats.append(found.stats)
                norm = self._clipped()
                if not norms:
                    work.mismatches = found.mismatches
                    parity, alarm = self._gate.report(
                        found.tokens, found.looked_back, share.policy_version
                    )
                    agreement = self._agreement()
                    is_replay = share.work.batch.reuse > 0
                    verdict = self._guard(found.stats.metrics()["ess"], agreement, is_replay)
                    note = verdict.note
                if verdict.factor == 0 or alarm:
                    break
                if not norm < float("inf"):  # infinite or nan
                    note = f"no finite gradient ({'rest of ' if norms else ''}update skipped)"
                    break
                if not norms:
                    self._gate.keep(share.policy_version)
                work.clock.lap("optimizer_s")
                self.before_change()
                work.clock.skip()
                self._step(share.rate * verdict.factor)
                norms.append(norm)
                work.clock.lap("optimizer_s")
            if norms and self._averaged is not None:
                self._averaged.add()
                work.clock.lap("optimizer_s")
        return Update(
            bool(norms),
            _described(work.stats)
            | parity
            | work.clock.sums
            | {
                "grad_norm": max(norms, default=0.0),
                "lr": share.rate * verdict.factor,
                "low_ess": float(verdict.reason == "low_ess"),
                "disagrees": float(verdict.reason == "disagrees"),
                "skipped": float(not norms),
                "passes": float(len(norms)),
                "samples": float(share.samples),
                "tokens": float(share.tokens),
            }
            | ({} if agreement is None else {"gradient_agreement": agreement}),
            note,
            alarm,
            work.mismatches,
        )

    def _accumulate(self, work: _Progress, looked_back: ComparedTokens) -> Found:
        """Pass over this rank's packs: gradients of their part of the loss, and what they show.

        The first pass's log-probabilities are kept for the later ones, and compared with the engine's.
        """
        is_first = not work.stats
        total: TokenStats | None = None
        temperature = work.share.work.batch.temperature
        scored: list[Pack] = []
        count = len(work.share.work.packs)
        self._optimizer.zero_grad(set_to_none=True)
        for index, pack in enumerate(work.packs):
            self._rank_group.doing(f"pack {index + 1} of {count}")
            work.clock.lap("prepare_s")
            if is_first:
                work.references.append(self.model.reference_logprobs(pack, temperature))
                scored.append(_without_screens(pack))
            scores = self.model.score(
                pack, temperature, entropy_gradient=self._objective.entropy_coef > 0
            )
            if is_first:
                work.proximal.append(scores.logprobs.detach())
            loss, stats = self._loss(pack, scores, work, index)
            work.clock.lap("forward_s")
            self._gradients.before(is_last=index + 1 == count)
            loss.backward()  # type: ignore[no-untyped-call]
            work.clock.lap("backward_s")
            total = stats if total is None else total + stats
        assert total is not None  # every rank has as many packs, and there is one
        found = Found(total)
        if is_first:  # after the pass: the device is not waited for between packs
            pairs = list(zip(work.proximal, scored, strict=True))
            found = Found(
                total,
                all_of([compare(*pair) for pair in pairs]),
                looked_back,
                [gap for pair in pairs for gap in step_mismatches(*pair)],
            )
            work.clock.lap("forward_s")
        return found

    def _loss(
        self, pack: Pack, scores: TokenScores, work: _Progress, index: int
    ) -> tuple[torch.Tensor, TokenStats]:
        like = scores.logprobs

        def here(values: torch.Tensor) -> torch.Tensor:
            return values.to(like.device, like.dtype)

        output = policy_loss(
            scores.logprobs,
            work.proximal[index],
            here(pack.behaviour_logprobs),
            here(pack.advantages),
            here(pack.weights),
            self._objective,
            lengths=pack.lengths,
            divisor=work.share.divisor,
            unknown=pack.unknown.to(like.device),
            reference_logprobs=work.references[index],
            entropies=scores.entropies,
        )
        return output.loss, output.stats

    def _clipped(self) -> float:
        """The norm of the whole gradient, which is then clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        return whole(norm).item()

    def _agreement(self) -> float | None:
        """Of the gradient with those of the last updates; only where batches are trained on again."""
        if not self._config.reuse:
            return None
        return gradient_agreement(self._parameters.values(), self._optimizer, self._rank_group)

    def _guard(self, ess: float, agreement: float | None, is_replay: bool) -> _Verdict:
        """What a batch of this effective sample size is good for.

        Of one that is trained on again its gradient's agreement with the last updates counts, too.
        """
        config = self._config
        least = max(config.min_ess, config.reuse_min_ess) if is_replay else config.min_ess
        name = "train.min_ess" if least == config.min_ess else "train.reuse_min_ess"
        factor = ess_factor(ess, least, "skip" if is_replay else config.low_ess)
        if factor < 1:
            done = f"learning rate times {factor:.3g}" if factor else "update skipped"
            low = f"an effective sample size of {ess:.3g}, below {name} = {least:g}"
            return _Verdict(factor, f"{low} ({done})", "low_ess")
        lowest = config.reuse_min_agreement
        if is_replay and agreement is not None and agreement < lowest:
            low = f"a gradient agreement of {agreement:.3g}, below train.reuse_min_agreement = {lowest:g}"
            return _Verdict(0.0, f"{low} (update skipped)", "disagrees")
        return _Verdict()

    def _step(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    # --- its state, for checkpoints -----------------------------------------------------------

    def state(self) -> Tensors:
        """Trained float32 weights by name; by `parameter/name` the optimizer's state and averages."""
        return state_of(self._parameters, self._optimizer, self._averaged)

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it is of another model."""
        _check_names(saved, self._parameters, self.model)
        restore(saved, self._parameters, self._optimizer, self._averaged)


def _check_names(saved: SavedState, masters: Mapping[str, torch.Tensor], model: TrainModel) -> None:
    """Raise ValueError if the checkpoint holds what is not of this model, or is not trained here.

    It may lack what was frozen before and is trained now: that is as in the model folder. Those of
    older dart hold what was frozen, too; then it must be as in the model folder.
    """
    weights = weight_tensors(model.policy.model)
    parameters = {name for name in saved.names if "/" not in name}
    unknown = {key.rpartition("/")[0] or key for key in saved.names} - weights.keys()
    if unknown or not parameters:
        other = f" ({min(unknown)})" if unknown else ""
        raise ValueError(f"its weights have other names or shapes than the model's{other}")
    values = {name: torch.empty_like(weights[name]) for name in parameters - masters.keys()}
    saved.fill(values)
    for name, value in values.items():
        if not torch.equal(value, weights[name]):
            raise ValueError(
                f"{name} was trained before, or is of another folder; here it is frozen"
            )


def _without_screens(pack: Pack) -> Pack:
    """What is compared after the pass, without what is large."""
    return replace(pack, features=None, inputs=replace(pack.inputs, images=(), shown=()))


def _run_point(batch: Batch, updates_done: int) -> RunPoint:
    """The update's place in the run, by what is stored with its batch."""
    return RunPoint(updates_done, batch.run_s, batch.trajectories, batch.success)


def _described(passes: Sequence[TokenStats]) -> dict[str, float]:
    """The first pass's metrics; those of how far the policy moved are the last pass's."""
    if not passes:
        return {}
    last = passes[-1].metrics()
    return passes[0].metrics() | {name: last[name] for name in ("ratio_mean", "clip_fraction")}


@dataclass(frozen=True)
class _Verdict:
    """What a batch is good for."""

    factor: float = 1.0  # of the learning rate; 0 for none
    note: str = ""  # why it is less than 1
    reason: Literal["", "low_ess", "disagrees"] = ""


@dataclass
class _Progress:
    """A rank's share, and the results of the passes over it so far."""

    share: Share
    packs: PackFeed
    clock: _StageTimer
    proximal: list[torch.Tensor] = field(default_factory=list)  # by pack [N]
    references: list[torch.Tensor | None] = field(default_factory=list)  # by pack [N]
    stats: list[TokenStats] = field(default_factory=list)  # by pass, of all ranks
    mismatches: list[StepMismatch] = field(default_factory=list)  # of the first pass, of all ranks


class _StageTimer:
    """Adds the time since the last lap to one of several sums."""

    def __init__(self, names: Iterable[str], began: float | None = None) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        self._since = time.monotonic() if began is None else began

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.sums[name] += now - self._since
        self._since = now

    def skip(self) -> None:
        """Count the time since the last lap nowhere."""
        self._since = time.monotonic()

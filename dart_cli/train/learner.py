"""One update from one batch.

    PolicyLearner   model and AdamW; `update` learns from one batch

An update is one pass over the batch and one optimizer step. The pass runs on the weights before the
update, which are the proximal policy: its log-probabilities, detached, are the proximal ones, and nothing
is computed twice (docs/objective.md).

Rank 0 cuts a batch into shares (packs/share.py), one for each rank; all ranks train on theirs at
once. A rank adds up the gradients of its packs; what decides about the step is gathered first, so that
all ranks skip, clip and end alike.

AdamW steps on float32 weights, which are their own masters: bfloat16 has eight bits, too few for an
update of 1e-6 on a weight of 0.1. A model that computes in bfloat16, or on several ranks, keeps them as
shards (sharded.py), and rounds them where a layer is about to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from math import isfinite

import torch

from bus.errors import ProtocolError
from bus.messages import Batch, Sample, StepMismatch
from bus.ranks import Share
from dart_cli.algo.learning_rate import RunPoint, Schedule, learning_rate
from dart_cli.algo.loss import LossOutput, TokenStats, policy_loss
from dart_cli.algo.objective import Objective
from dart_cli.config.schema import TrainConfig
from dart_cli.policy.loader import weight_tensors
from dart_cli.train.base import BETAS, SavedState, Tensors, Update, restore, state_of
from dart_cli.train.blindness import BLIND, EVERY, sight_of
from dart_cli.train.critic import PREFIX, Critic, Judged, Steps, key_of
from dart_cli.train.packs.pack import Pack, PackFeed
from dart_cli.train.packs.share import batch_shares, check, pad_of, shares_of
from dart_cli.train.parity import ComparedTokens, ParityGate, all_of, compare, step_mismatches
from dart_cli.train.rank_group import Found, RankGroup, SingleRank, gathered
from dart_cli.train.sharded import Gradients, whole
from dart_cli.train.trained_policy import TokenScores, TrainModel

TIMES = ("prepare_s", "forward_s", "backward_s", "optimizer_s")

REPLAY_ESS = 0.9
"""Effective sample size, over tokens, below which a batch that is trained on again is skipped."""


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
            config.clip_low, config.clip_high, config.correction, config.kl_beta
        )
        schedule = {part.name: getattr(config, part.name) for part in fields(Schedule)}
        self._schedule = Schedule(**schedule | {"lr": config.rate})
        self._parameters = model.trainable()
        self._gate = ParityGate(config, model)
        width = int(model.policy.model.config.get_text_config().hidden_size)
        self.critic = None if config.critic == "off" else Critic(width, config.gae_lambda)
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
            betas=BETAS,
            fused=True,
        )

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Learn from `batch`, once; `updates_done` places it in the schedule.

        `policy_version` is the published version that the present weights are, if any: for tokens that
        it sampled, behaviour log-probabilities must agree with the trainer's; if they do not, nothing is
        changed and the update says so (`alarm`).

        Raises ProtocolError if the batch does not fit the model, before anything has changed.
        """
        began = time.monotonic()
        [share] = self.shares(batch, updates_done, policy_version)
        return self.train_on(share, began)

    def shares(
        self, batch: Batch, updates_done: int, policy_version: int | None = None
    ) -> list[Share]:
        """Return what each rank does for the update on `batch`; as `update`. Changes nothing."""
        check(batch, self.model.policy)
        if self.critic is not None:
            for sample in batch.samples:
                if sample.reward is None or sample.expected is None:
                    raise ProtocolError(
                        f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: a critic needs its "
                        "reward and what its tracker expected; start dart data with the same configuration"
                    )
        looked_back, version = self._gate.to_look_back(batch, policy_version)
        return shares_of(
            batch,
            looked_back,
            batch_shares(batch, self._config.normalise, pad_of(self.model.policy)),
            self.model.policy,
            rate=learning_rate(self._schedule, _run_point(batch, updates_done)),
            policy_version=policy_version,
            looked_back_version=version,
            pack_tokens=self._config.pack_tokens,
            ranks=self._rank_group.size,
            looks=updates_done % EVERY == 0,
        )

    def train_on(self, share: Share, began: float | None = None) -> Update:
        """Take this rank's part in an update; every rank does so, and they return alike.

        `began` is the moment of the monotonic clock when its preparation began. Raises EngineError for
        a screen that does not decode.
        """
        clock = _StageTimer(TIMES, began)
        norm, note, alarm = 0.0, "", ""
        is_applied = has_low_ess = False
        metrics: dict[str, float] = {}
        mismatches: list[StepMismatch] = []
        if share.looked_back.packs:  # the gate puts kept weights in place of the present ones
            self.before_change()
        looked_back = self._gate.look_back(share.looked_back, share.looked_back_version)
        judged = self._judged(share, clock)
        if not share.work.packs:
            note = "no sample with a weight (update skipped)"
        else:
            found = gathered(self._rank_group, self._accumulate(share, looked_back, judged, clock))
            norm = self._clipped()
            parity, alarm = self._gate.report(found.tokens, found.looked_back, share.policy_version)
            metrics, mismatches = found.stats.metrics() | parity, found.mismatches
            if found.sight:
                metrics["sees"] = float(max(found.sight) > BLIND)
            has_low_ess = share.work.batch.reuse > 0 and metrics["ess"] < REPLAY_ESS
            if has_low_ess:
                note = f"an effective sample size of {metrics['ess']:.3g}, below {REPLAY_ESS:g} (update skipped)"
            elif not alarm and not isfinite(norm):
                note = "no finite gradient (update skipped)"
            is_applied = not note and not alarm
        if is_applied:
            self._gate.keep(share.policy_version)
            clock.lap("optimizer_s")
            self.before_change()
            clock.skip()
            self._step(share.rate)
            if judged is not None and self.critic is not None:
                self.critic.learn(judged.steps)
            clock.lap("optimizer_s")
        if judged is not None:
            metrics |= judged.metrics()
        metrics |= clock.sums | {
            "grad_norm": norm,
            "lr": share.rate,
            "low_ess": float(has_low_ess),
            "skipped": float(not is_applied),
            "samples": float(share.samples),
            "tokens": float(share.tokens),
        }
        values = judged.told() if judged is not None else []
        return Update(is_applied, metrics, note, alarm, mismatches, values)

    def _judged(self, share: Share, clock: _StageTimer) -> Judged | None:
        """Return what the critic says of all ranks' steps; None without one, and of a batch that has its advantages."""
        count = len(share.work.packs)
        if self.critic is None or share.work.batch.reuse or not count:
            return None
        samples: list[Sample] = []
        states: list[torch.Tensor] = []
        with PackFeed(share.work, share.token_weights, self.model.policy) as packs:
            for index, pack in enumerate(packs):
                self._rank_group.doing(f"judging pack {index + 1} of {count}")
                clock.lap("prepare_s")
                states.append(self.model.states(pack))
                samples += pack.samples
                clock.lap("forward_s")
        self.model.reshard()
        found = self.critic.judge(Steps.of(samples, torch.cat(states), self._rank_group))
        clock.lap("forward_s")
        return found

    def _accumulate(
        self, share: Share, looked_back: ComparedTokens, judged: Judged | None, clock: _StageTimer
    ) -> Found:
        """Pass over this rank's packs: gradients of their part of the loss, and what they show."""
        total: TokenStats | None = None
        scored: list[tuple[torch.Tensor, Pack]] = []
        looked_at: tuple[Pack, torch.Tensor] | None = None
        temperature, count = share.work.batch.temperature, len(share.work.packs)
        self._optimizer.zero_grad(set_to_none=True)
        with PackFeed(share.work, share.token_weights, self.model.policy) as packs:
            for index, pack in enumerate(packs):
                self._rank_group.doing(f"pack {index + 1} of {count}")
                clock.lap("prepare_s")
                pack = pack if judged is None else _judged_pack(pack, judged)
                reference = self.model.reference_logprobs(pack, temperature)
                scores = self.model.score(pack, temperature)
                scored.append((scores.logprobs.detach(), _without_screens(pack)))
                if share.looks and (looked_at is None or not looked_at[0].inputs.images):
                    looked_at = pack, scores.logprobs.detach()
                output = self._loss(pack, scores, reference, share.divisor)
                clock.lap("forward_s")
                self._gradients.before(is_last=index + 1 == count)
                output.loss.backward()  # type: ignore[no-untyped-call]
                clock.lap("backward_s")
                total = output.stats if total is None else total + output.stats
        assert total is not None  # every rank has as many packs, and there is one
        sight = sight_of(self.model, *looked_at, temperature) if looked_at else ()
        # After the pass: the device is not waited for between packs.
        found = Found(
            total,
            all_of([compare(*each) for each in scored]),
            looked_back,
            [gap for each in scored for gap in step_mismatches(*each)],
            sight,
        )
        clock.lap("forward_s")
        return found

    def _loss(
        self, pack: Pack, scores: TokenScores, reference: torch.Tensor | None, divisor: float
    ) -> LossOutput:
        like = scores.logprobs

        def here(values: torch.Tensor) -> torch.Tensor:
            return values.to(like.device, like.dtype)

        return policy_loss(
            like,
            like.detach(),
            here(pack.behaviour_logprobs),
            here(pack.advantages),
            here(pack.weights),
            self._objective,
            divisor=divisor,
            unknown=pack.unknown.to(like.device),
            reference_logprobs=reference,
            entropies=scores.entropies,
        )

    def _clipped(self) -> float:
        """Return the norm of the whole gradient, which is then clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        return whole(norm).item()

    def _step(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    # --- its state, for checkpoints -----------------------------------------------------------

    def state(self) -> Tensors:
        """Trained float32 weights by name; by `parameter/name` the optimizer's state."""
        state = state_of(self._parameters, self._optimizer)
        return state if self.critic is None else state | self.critic.state()

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it is of another model."""
        _check_names(saved, self._parameters, self.model)
        restore(saved, self._parameters, self._optimizer)
        if self.critic is not None:
            self.critic.restore(saved)


def _check_names(saved: SavedState, masters: Mapping[str, torch.Tensor], model: TrainModel) -> None:
    """Raise ValueError if the checkpoint holds what is not of this model, or is not trained here.

    It may lack what was frozen before and is trained now: that is as in the model folder.
    """
    weights = weight_tensors(model.policy.model)
    parameters = {name for name in saved.names if "/" not in name}
    of_policy = [key for key in saved.names if not key.startswith(PREFIX)]
    unknown = {key.rpartition("/")[0] or key for key in of_policy} - weights.keys()
    if unknown or not parameters:
        other = f" ({min(unknown)})" if unknown else ""
        raise ValueError(f"its weights have other names or shapes than the model's{other}")
    if frozen := parameters - masters.keys():
        raise ValueError(f"{min(frozen)} was trained before; here it is frozen")


def _judged_pack(pack: Pack, judged: Judged) -> Pack:
    """Return the pack with the critic's advantages."""
    advantages = [judged.advantages[key_of(sample)] for sample in pack.samples]
    lengths = torch.tensor(pack.lengths, dtype=torch.int64)
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths)
    return replace(pack, advantages=spread)


def _without_screens(pack: Pack) -> Pack:
    """Return what is compared after the pass, without what is large."""
    return replace(pack, features=None, inputs=replace(pack.inputs, images=(), image_order=()))


def _run_point(batch: Batch, updates_done: int) -> RunPoint:
    """Return the update's place in the run, by what is stored with its batch."""
    return RunPoint(updates_done, batch.run_s, batch.trajectories)


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

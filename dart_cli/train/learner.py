"""One update from one batch.

    PolicyLearner   the model and AdamW; `update` learns from one batch

An update is one pass over the batch and one call of the optimizer. The pass runs on the weights before the
update, which are the proximal policy: its log-probabilities, detached, are the proximal ones, so nothing is
computed twice (docs/objective.md).

Rank 0 cuts a batch into shares (packs/rank_shares.py), one for each rank; all ranks train on their shares
at the same time. A rank adds up the gradients of its packs. The numbers that decide about the update are
gathered from all ranks first, so that all ranks skip, clip and stop alike.

AdamW updates float32 weights: bfloat16 has eight bits, too few for a change of 1e-6 to a weight of 0.1. A
model that computes in bfloat16, or on several ranks, keeps the float32 weights as shards (sharded.py) and
rounds them when a layer is about to run.
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
from dart_cli.algo.learning_rate import LearningRateSchedule, RunPoint, learning_rate
from dart_cli.algo.loss import LossOutput, TokenStats, policy_loss
from dart_cli.algo.objective import Objective
from dart_cli.config.schema import TrainConfig
from dart_cli.policy.loader import weight_tensors
from dart_cli.train.base import BETAS, SavedState, Tensors, Update, restore, state_of
from dart_cli.train.blindness import BLIND_LIMIT, EVERY, grey_screen_change
from dart_cli.train.critic import PREFIX, Critic, Estimates, Steps, key_of
from dart_cli.train.logprob_check import (
    ComparedTokens,
    LogprobCheck,
    compare,
    concatenate,
    step_mismatches,
)
from dart_cli.train.packs.batch_check import check_batch
from dart_cli.train.packs.batch_tokens import batch_loss_weights, pad_of
from dart_cli.train.packs.pack import Pack, PackFeed
from dart_cli.train.packs.rank_shares import shares_by_rank
from dart_cli.train.rank_group import PassResults, RankGroup, SingleRank, gather_results
from dart_cli.train.sharded import Gradients, full_tensor
from dart_cli.train.trained_policy import TaughtSteps, TeacherView, TokenScores, TrainModel

TIMES = ("prepare_s", "forward_s", "backward_s", "optimizer_s")
"""Metrics that have the seconds of an update, by stage."""

REPLAY_ESS = 0.9
"""Effective sample size, over tokens, below which a batch that is trained on again is skipped."""


class PolicyLearner:
    """A learner of one model. Not thread-safe: only one thread at a time may call it."""

    def __init__(
        self, model: TrainModel, config: TrainConfig, rank_group: RankGroup | None = None
    ) -> None:
        self.model = model
        self.before_change: Callable[[], None] = lambda: None
        self._config = config
        self._rank_group: RankGroup = rank_group or SingleRank()
        self._objective = Objective(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            correction=config.correction,
            kl_beta=config.kl_beta,
            teacher_weight=config.teacher_weight,
        )
        schedule = {part.name: getattr(config, part.name) for part in fields(LearningRateSchedule)}
        self._schedule = LearningRateSchedule(**schedule | {"lr": config.rate})
        self._parameters = model.trainable()
        self._logprob_check = LogprobCheck(config, model)
        width = int(model.policy.model.config.get_text_config().hidden_size)
        self.critic = None if config.critic == "off" else Critic(width, config.gae_lambda)
        self._gradients = Gradients(model.scorer, self._parameters.values())
        matrices = [value for value in self._parameters.values() if value.ndim >= 2]
        vectors = [value for value in self._parameters.values() if value.ndim < 2]
        # Biases and the gains of norms are not decayed, as usual.
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
        """Learn once from `batch` and return the result; `updates_done` is the number of updates before.

        `policy_version` is the number under which the present weights were published, None if they were not.
        For tokens that this version sampled, the behaviour log-probabilities must agree with the trainer's;
        if they do not, nothing is changed and `alarm` of the result describes the difference.

        Raises ProtocolError if the batch does not fit the model, before anything has changed.
        """
        began = time.monotonic()
        [share] = self.shares(batch, updates_done, policy_version)
        return self.train_on(share, began)

    def shares(
        self, batch: Batch, updates_done: int, policy_version: int | None = None
    ) -> list[Share]:
        """Return the share of each rank in the update on `batch`; changes nothing.

        It takes the arguments of `update` and raises the same errors.
        """
        check_batch(batch, self.model.policy)
        if self.critic is not None:
            for sample in batch.samples:
                if sample.reward is None or sample.expected is None:
                    raise ProtocolError(
                        f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: a critic needs its "
                        "reward and its baseline; start dart data with the same configuration"
                    )
        earlier, version = self._logprob_check.earlier_samples(batch, policy_version)
        return shares_by_rank(
            batch,
            earlier,
            batch_loss_weights(batch, self._config.normalise, pad_of(self.model.policy)),
            self.model.policy,
            rate=learning_rate(self._schedule, _run_point(batch, updates_done)),
            policy_version=policy_version,
            earlier_version=version,
            pack_tokens=self._config.pack_tokens,
            ranks=self._rank_group.size,
            has_hints=self.model.hints,
            tests_sight=updates_done % EVERY == 0,
        )

    def train_on(self, share: Share, began: float | None = None) -> Update:
        """Do this rank's share of an update. Every rank calls it, and all return the same result.

        `began` is the time of the monotonic clock at which its preparation began. Raises EngineError for
        a screen that does not decode.
        """
        clock = _StageTimer(TIMES, began)
        norm, note, alarm = 0.0, "", ""
        is_applied = has_low_ess = False
        metrics: dict[str, float] = {}
        mismatches: list[StepMismatch] = []
        # 1. Score the samples of an earlier version with a copy of its weights.
        if share.looked_back.packs:  # the check puts the copy in place of the present weights
            self.before_change()
        earlier = self._logprob_check.rescore_earlier(share.looked_back, share.looked_back_version)
        # 2. Estimate the value of each step, if there is a critic.
        estimates = self._estimates(share, clock)
        if not share.work.packs:
            note = "no sample with a weight (update skipped)"
        else:
            # 3. Compute the gradients of this rank's packs, and gather the results of all ranks.
            taught = self._taught(share, clock)
            results = gather_results(
                self._rank_group, self._accumulate(share, earlier, estimates, taught, clock)
            )
            self.model.reshard_teacher()
            norm = self._clip_gradients()
            # 4. Decide whether the update is applied, by numbers that are the same on all ranks.
            parity, alarm = self._logprob_check.report(
                results.tokens, results.earlier_tokens, share.policy_version
            )
            metrics, mismatches = results.stats.metrics() | parity, results.mismatches
            differing, replayed = results.routing
            if replayed:
                metrics["routing_differs"] = differing / replayed
                if alarm:
                    alarm += f"; routers would have chosen otherwise in {differing / replayed:.2%} of the cases"
            if results.grey_changes:
                metrics["sees"] = float(max(results.grey_changes) > BLIND_LIMIT)
            has_low_ess = share.work.batch.reuse > 0 and metrics["ess"] < REPLAY_ESS
            if has_low_ess:
                note = f"an effective sample size of {metrics['ess']:.3g}, below {REPLAY_ESS:g} (update skipped)"
            elif not alarm and not isfinite(norm):
                note = "no finite gradient (update skipped)"
            is_applied = not note and not alarm
        # 5. Change the weights.
        if is_applied:
            self._logprob_check.keep(share.policy_version)
            clock.lap("optimizer_s")
            self.before_change()
            clock.skip()
            self._apply_gradients(share.rate)
            if estimates is not None and self.critic is not None:
                self.critic.learn(estimates.steps)
            clock.lap("optimizer_s")
        if estimates is not None:
            metrics |= estimates.metrics()
        metrics |= clock.sums | {
            "grad_norm": norm,
            "lr": share.rate,
            "low_ess": float(has_low_ess),
            "skipped": float(not is_applied),
            "samples": float(share.samples),
            "tokens": float(share.tokens),
        }
        values = estimates.step_values() if estimates is not None else []
        return Update(is_applied, metrics, note, alarm, mismatches, values)

    def _estimates(self, share: Share, clock: _StageTimer) -> Estimates | None:
        """Return the critic's estimates for the steps of all ranks.

        Return None without a critic, and for a batch that is trained on again: it has the advantages of its
        first use.
        """
        count = len(share.work.packs)
        if self.critic is None or share.work.batch.reuse or not count:
            return None
        samples: list[Sample] = []
        states: list[torch.Tensor] = []
        with PackFeed(share.work, share.token_weights, self.model.policy) as packs:
            for index, pack in enumerate(packs):
                self._rank_group.doing(f"estimating values of pack {index + 1} of {count}")
                clock.lap("prepare_s")
                states.append(self.model.states(pack))
                samples += pack.samples
                clock.lap("forward_s")
        self.model.reshard()
        estimates = self.critic.estimate(Steps.of(samples, torch.cat(states), self._rank_group))
        clock.lap("forward_s")
        return estimates

    def _taught(self, share: Share, clock: _StageTimer) -> TaughtSteps:
        """Return what the teacher predicts at the steps whose prompts have hints."""
        taught, count = TaughtSteps(), len(share.hinted.packs)
        if not count:
            return taught
        has_own_tower = self.model.teacher is not None
        no_weights = [0.0] * len(share.hinted.batch.samples)
        with PackFeed(
            share.hinted, no_weights, self.model.policy, keeps_pixels=has_own_tower
        ) as packs:
            for index, pack in enumerate(packs):
                self._rank_group.doing(f"the teacher's pass over pack {index + 1} of {count}")
                clock.lap("prepare_s")
                self.model.add_taught(taught, pack, share.work.batch.temperature)
                clock.lap("forward_s")
        self.model.reshard()  # gathered here if the policy has adapters
        return taught

    def _accumulate(
        self,
        share: Share,
        earlier: ComparedTokens,
        estimates: Estimates | None,
        taught: TaughtSteps,
        clock: _StageTimer,
    ) -> PassResults:
        """Pass over this rank's packs: add up the gradients of their part of the loss, return the results."""
        total: TokenStats | None = None
        scored: list[tuple[torch.Tensor, Pack]] = []
        sight_test: tuple[Pack, torch.Tensor] | None = None  # a pack, if possible one with screens
        temperature, count = share.work.batch.temperature, len(share.work.packs)
        self._optimizer.zero_grad(set_to_none=True)
        with PackFeed(
            share.work,
            share.token_weights,
            self.model.policy,
            keeps_pixels=self.model.teacher is not None and not self.model.hints,
        ) as packs:
            for index, pack in enumerate(packs):
                self._rank_group.doing(f"pack {index + 1} of {count}")
                clock.lap("prepare_s")
                pack = pack if estimates is None else _with_advantages(pack, estimates)
                reference = None
                if self._objective.kl_beta > 0:
                    reference = self.model.reference_logprobs(pack, temperature)
                teacher = (
                    self.model.taught_view(taught, pack)
                    if self.model.hints
                    else self.model.teacher_view(pack, temperature)
                )
                scores = self.model.score(pack, temperature, teacher)
                scored.append((scores.logprobs.detach(), _without_screens(pack)))
                if share.looks and (sight_test is None or not sight_test[0].inputs.images):
                    sight_test = pack, scores.logprobs.detach()
                output = self._loss(pack, scores, reference, teacher, share.divisor)
                clock.lap("forward_s")
                self._gradients.before(is_last=index + 1 == count)
                output.loss.backward()  # type: ignore[no-untyped-call]
                clock.lap("backward_s")
                total = output.stats if total is None else total + output.stats
        assert total is not None  # every rank has as many packs, and there is one
        # Before the next forward pass of one of these packs, which notes other differences. Only the tokens that
        # predict completions count: how often a prompt is computed depends on the packs.
        counts = [
            pack.inputs.replay.counts(pack.rows)
            for _, pack in scored
            if pack.inputs.replay is not None
        ]
        routing = sum(one for one, _ in counts), sum(other for _, other in counts)
        grey_changes: tuple[float, ...] = ()
        if sight_test is not None:
            grey_changes = grey_screen_change(self.model, *sight_test, temperature)
        # Compared after the pass, so that nothing waits for the device between packs.
        results = PassResults(
            stats=total,
            tokens=concatenate([compare(logprobs, pack) for logprobs, pack in scored]),
            earlier_tokens=earlier,
            mismatches=[
                mismatch
                for logprobs, pack in scored
                for mismatch in step_mismatches(logprobs, pack)
            ],
            routing=routing,
            grey_changes=grey_changes,
        )
        clock.lap("forward_s")
        return results

    def _loss(
        self,
        pack: Pack,
        scores: TokenScores,
        reference: torch.Tensor | None,
        teacher: TeacherView | None,
        divisor: float,
    ) -> LossOutput:
        """Return the loss of a pack, with all tensors on the device and in the type of its scores."""
        like = scores.logprobs

        def here(values: torch.Tensor) -> torch.Tensor:
            return values.to(like.device, like.dtype)

        gaps, is_taught = scores.gaps, None if teacher is None else teacher.is_scored
        if self._objective.teacher_weight and gaps is None:  # no step of the pack has a hint
            gaps, is_taught = torch.zeros_like(like), torch.zeros_like(pack.unknown)
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
            teacher_gaps=gaps,
            taught=None if is_taught is None else is_taught.to(like.device),
            entropies=scores.entropies,
        )

    def _clip_gradients(self) -> float:
        """Clip the gradient of the whole model, and return the norm that it had before."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        return full_tensor(norm).item()

    def _apply_gradients(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    # --- its state, for checkpoints -----------------------------------------------------------

    def state(self) -> Tensors:
        """Return trained float32 weights by name, and the optimizer's state as `parameter/name`."""
        state = state_of(self._parameters, self._optimizer)
        return state if self.critic is None else state | self.critic.state()

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it belongs to another model."""
        _check_names(saved, self._parameters, self.model)
        restore(saved, self._parameters, self._optimizer)
        if self.critic is not None:
            self.critic.restore(saved)


def _check_names(saved: SavedState, trained: Mapping[str, torch.Tensor], model: TrainModel) -> None:
    """Raise ValueError if a checkpoint has weights that this model lacks, or that are frozen here.

    It may lack weights that were frozen before and are trained now: these stay as in the model folder.
    """
    weights = weight_tensors(model.policy.model)
    parameters = {name for name in saved.names if "/" not in name}
    of_policy = [key for key in saved.names if not key.startswith(PREFIX)]
    unknown = {key.rpartition("/")[0] or key for key in of_policy} - weights.keys()
    if unknown or not parameters:
        other = f" ({min(unknown)})" if unknown else ""
        raise ValueError(f"its weights have other names or shapes than the model's{other}")
    if frozen := parameters - trained.keys():
        raise ValueError(f"{min(frozen)} was trained before; here it is frozen")


def _with_advantages(pack: Pack, estimates: Estimates) -> Pack:
    """Return the pack with the critic's advantages."""
    advantages = [estimates.advantages[key_of(sample)] for sample in pack.samples]
    lengths = torch.tensor(pack.lengths, dtype=torch.int64)
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths)
    return replace(pack, advantages=spread)


def _without_screens(pack: Pack) -> Pack:
    """Return a pack without its screens and features, which are large.

    What remains is compared after the pass.
    """
    return replace(pack, features=None, inputs=replace(pack.inputs, images=(), image_order=()))


def _run_point(batch: Batch, updates_done: int) -> RunPoint:
    """Return the update's place in the run, from the numbers that are stored with its batch."""
    return RunPoint(updates_done, batch.run_s, batch.trajectories)


class _StageTimer:
    """A clock that adds the time since its last lap to one of several sums."""

    def __init__(self, names: Iterable[str], began: float | None = None) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        self._since = time.monotonic() if began is None else began

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.sums[name] += now - self._since
        self._since = now

    def skip(self) -> None:
        """Begin a new lap without counting the time since the last one."""
        self._since = time.monotonic()

"""One update from one batch.

    PolicyLearner   model, AdamW and learning-rate schedule; `update` learns from one batch
    learning_rate   the schedule

An update is `train.epochs` passes over the batch, each with one optimizer step on all of it. The
first pass runs on the weights before the update, which are the proximal policy: its own
log-probabilities, detached, are the proximal ones of every pass, and nothing is computed twice
(docs/objective.md).

AdamW steps on float32 master weights. Parameters of float32 are their own masters; those of bfloat16
have eight bits, too few for an update of 1e-6 on a weight of 0.1, so they are rounded from a master
after each step, and the gradients of the micro-batches are summed in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from bus.messages import Batch, StepMismatch
from dart_cli.algo.loss import TokenStats, policy_loss
from dart_cli.algo.normalise import Shares
from dart_cli.algo.objective import Objective, ess_factor
from dart_cli.config.schema import TrainConfig
from dart_cli.train.base import SavedState, Tensors
from dart_cli.train.batch import (
    MicroBatch,
    batch_shares,
    check,
    completion_tokens,
    micro_batches,
    trajectory_of,
)
from dart_cli.train.logprob_gaps import step_mismatches
from dart_cli.train.model import TokenScores, TrainModel
from dart_cli.train.parity import ComparedTokens, ParityGate, compare, joined
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

    def __init__(self, model: TrainModel, config: TrainConfig) -> None:
        self.model = model
        self._config = config
        self._objective = Objective(
            **{part.name: getattr(config, part.name) for part in fields(Objective)}
        )
        self._parameters = model.trainable()
        self._gate = ParityGate(config, model)
        self._masters = {name: _master(value) for name, value in self._parameters.items()}
        matrices = [value for value in self._masters.values() if value.ndim >= 2]
        vectors = [value for value in self._masters.values() if value.ndim < 2]
        # Biases and gains of norms are not decayed, as usual.
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            fused=True,
        )

    def update(self, batch: Batch, updates_done: int, policy_version: int | None = None) -> Update:
        """Learn from `batch`, once; `updates_done` places it in the schedule.

        `policy_version` is the published version whose weights the model holds now, if any: for
        tokens that it sampled, behaviour and proximal log-probabilities must agree; if they do
        not, nothing is changed and the update says so (`alarm`).

        Raises ProtocolError if the batch does not fit the model, before anything has changed.
        """
        check(batch, self.model.policy)
        rate = learning_rate(updates_done, self._config, batch.run_s)
        shares = batch_shares(batch, self._config.normalise, self._config.constant_tokens)
        work = _BatchProgress(batch, shares)
        looked_back = self._gate.look_back(batch, policy_version)
        norms: list[float] = []  # of the steps that were taken
        factor, note, alarm = 1.0, "", ""
        parity: dict[str, float] = {}
        for _ in range(self._config.epochs):
            norm = self._accumulate(work)
            if not work.stats:
                note = "no sample with a weight (update skipped)"
                break
            if not norms:
                tokens = joined(work.compared)
                parity, alarm = self._gate.report(tokens, looked_back, policy_version)
                factor, note = self._guard(work.stats[0].metrics()["ess"])
            if factor == 0 or alarm:
                break
            if not norm < float("inf"):  # infinite or nan
                note = f"no finite gradient ({'rest of ' if norms else ''}update skipped)"
                break
            if not norms:
                self._gate.keep(policy_version)
            self._step(rate * factor)
            norms.append(norm)
            work.clock.lap("optimizer_s")
        return Update(
            bool(norms),
            _described(work.stats)
            | parity
            | work.clock.sums
            | {
                "grad_norm": max(norms, default=0.0),
                "lr": rate * factor,
                "low_ess": float(factor < 1),
                "skipped": float(not norms),
                "passes": float(len(norms)),
                "samples": float(len(batch.samples)),
                "tokens": float(completion_tokens(batch)),
            },
            note,
            alarm,
            work.mismatches,
        )

    def _accumulate(self, work: _BatchProgress) -> float:
        """Pass over the batch: gradients of the whole loss; returns their norm before clipping.

        Adds the pass to `work`, and the first pass's log-probabilities for the later ones.
        """
        is_first = not work.stats
        total: TokenStats | None = None
        self._forget_gradients()
        parts = micro_batches(work.batch, self.model.policy, self._config.micro_batch)
        for index, part in enumerate(parts):
            work.clock.lap("prepare_s")
            temperature = work.batch.temperature
            scores = self.model.score(
                part, temperature, entropy_gradient=self._objective.entropy_coef > 0
            )
            if is_first:
                work.proximal.append(scores.logprobs.detach())
                work.compared.append(compare(scores, part))
            loss, stats = self._loss(part, scores, work.proximal[index], temperature, work.shares)
            work.clock.lap("forward_s")
            if is_first:
                work.mismatches += step_mismatches(work.proximal[index], part)
            loss.backward()  # type: ignore[no-untyped-call]
            self._gather_gradients()
            work.clock.lap("backward_s")
            total = stats if total is None else total + stats
        if total is not None:
            work.stats.append(total)
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._config.grad_clip)
        return norm.item()

    def _loss(
        self,
        part: MicroBatch,
        scores: TokenScores,
        proximal: torch.Tensor,
        temperature: float,
        shares: Shares,
    ) -> tuple[torch.Tensor, TokenStats]:
        device = scores.logprobs.device
        lengths = [len(sample) for sample in part.samples]
        share = torch.tensor(
            [shares.of(trajectory_of(sample), len(sample)) for sample in part.samples]
        ).repeat_interleave(torch.tensor(lengths))
        output = policy_loss(
            scores.logprobs,
            proximal,
            part.behaviour_logprobs.to(device),
            part.advantages.to(device),
            (part.weights * share).to(device),
            self._objective,
            lengths=lengths,
            divisor=shares.divisor,
            unknown=part.unknown.to(device),
            reference_logprobs=self.model.reference_logprobs(part, temperature),
            entropies=scores.entropies,
        )
        return output.loss, output.stats

    def _guard(self, ess: float) -> tuple[float, str]:
        """(factor of the learning rate, note) for a batch of this effective sample size."""
        factor = ess_factor(ess, self._config.min_ess, self._config.low_ess)
        if factor == 1:
            return factor, ""
        done = f"learning rate times {factor:.3g}" if factor else "update skipped"
        low = (
            f"an effective sample size of {ess:.3g}, below train.min_ess = {self._config.min_ess:g}"
        )
        return factor, f"{low} ({done})"

    def _step(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._round_masters()

    # --- masters ------------------------------------------------------------------------------

    def _rounded(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters whose master is another tensor, with it."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                yield parameter, self._masters[name]

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for parameter, _ in self._rounded():  # an update that raised may have left one
            parameter.grad = None

    def _gather_gradients(self) -> None:
        """Add the parameters' gradients to their masters' and free them."""
        for parameter, master in self._rounded():
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self._rounded():
            parameter.copy_(master)

    # --- its state, for checkpoints -----------------------------------------------------------

    def state(self) -> Tensors:
        """Masters by parameter, and the optimizer's state by `parameter/name`, e.g. `.../exp_avg`."""
        return state_of(self._masters, self._optimizer)

    def restore(self, saved: SavedState) -> None:
        """Restore a checkpoint's state. Raises ValueError if it is of another model."""
        _check_names(saved, self._masters, self.model)
        restore(saved, self._masters, self._optimizer)
        self._round_masters()


def _check_names(saved: SavedState, masters: Mapping[str, torch.Tensor], model: TrainModel) -> None:
    """Raise ValueError if the checkpoint holds what is not of this model, or is not trained here.

    It may lack what was frozen before and is trained now: that is as in the model folder. Those of
    older dart hold what was frozen, too; then it must be as in the model folder.
    """
    weights = model.weights()
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


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The float32 tensor that is optimized: the parameter itself where it has that precision."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def learning_rate(updates_done: int, config: TrainConfig, run_s: float = 0.0) -> float:
    """Rate of the update after `updates_done`: a linear rise, then a linear fall to `lr_end`.

    Without `max_minutes` the first update after `warmup` has the full rate, the last of the run
    `lr * lr_end`. A run ends with its updates or its minutes, whichever comes first, so the fall
    follows whichever is further: at the end of either the rate is `lr * lr_end`.

    `run_s` is the batch's, stored with it, not a clock: a batch that is trained again after a restart
    gets the same rate.
    """
    rise = (updates_done + 1) / (config.warmup + 1)
    span = config.updates - 1 - config.warmup
    progress = (updates_done - config.warmup) / span if span > 0 else 0.0
    if config.max_minutes:
        progress = max(progress, run_s / (60 * config.max_minutes))
    fall = 1.0 - (1.0 - config.lr_end) * min(max(progress, 0.0), 1.0)
    return config.lr * min(rise, fall)


def _described(passes: Sequence[TokenStats]) -> dict[str, float]:
    """The first pass's metrics; those of how far the policy moved are the last pass's."""
    if not passes:
        return {}
    last = passes[-1].metrics()
    return passes[0].metrics() | {name: last[name] for name in ("ratio_mean", "clip_fraction")}


@dataclass
class _BatchProgress:
    """A batch, and the results of the passes over it so far."""

    batch: Batch
    shares: Shares
    proximal: list[torch.Tensor] = field(default_factory=list)  # by micro-batch [N]
    compared: list[ComparedTokens] = field(default_factory=list)  # the first pass, by micro-batch
    stats: list[TokenStats] = field(default_factory=list)  # by pass
    clock: _StageTimer = field(default_factory=lambda: _StageTimer(TIMES))
    mismatches: list[StepMismatch] = field(default_factory=list)  # of the first pass


class _StageTimer:
    """Adds the time since the last lap to one of several sums."""

    def __init__(self, names: Iterable[str]) -> None:
        self.sums = dict.fromkeys(names, 0.0)
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.sums[name] += now - self._since
        self._since = now

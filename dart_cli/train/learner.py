"""One optimizer update from one batch.

    Learner         model, AdamW and learning-rate schedule; `update` is the whole of learning
    learning_rate   the schedule

A batch is used for one update. The policy before the update and the proximal policy are then the
same weights, so the proximal log-probabilities are the policy's own, detached: nothing is computed
twice (docs/objective.md).

AdamW steps on float32 masters. Parameters of float32 are their own; those of bfloat16 have eight
bits, in which an update of 1e-6 on a weight of 0.1 is nothing, so they are rounded from a master
after each step, and the gradients of the micro-batches add up in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bus.messages import Batch
from dart_cli.algo.loss import TokenStats, policy_loss
from dart_cli.config import TrainConfig
from dart_cli.train.batch import MicroBatch, check, completion_tokens, micro_batches
from dart_cli.train.model import Scores, TrainModel

Tensors = dict[str, torch.Tensor]

_MASTER = "master"


@dataclass(frozen=True)
class Update:
    """What an update did."""

    applied: bool  # False where the gradient was not finite and the weights stayed
    metrics: dict[str, float]  # see docs/objective.md


class Learner:
    """Updates one model. Not thread-safe: one thread at a time."""

    def __init__(self, model: TrainModel, config: TrainConfig) -> None:
        self.model = model
        self._config = config
        self._parameters = model.trainable()
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
        """Take one gradient step on `batch`; `updates_done` places it in the schedule.

        `policy_version` is the published version whose weights the model holds now, if any: for
        tokens that it sampled, behaviour and proximal log-probabilities must agree (`parity_max`).

        Raises ProtocolError if the batch does not fit the model, before anything has changed.
        """
        check(batch, self.model.policy)
        timing = dict.fromkeys(("prepare_s", "forward_s", "backward_s", "optimizer_s"), 0.0)
        tokens = completion_tokens(batch)
        stats: TokenStats | None = None
        fresh_gaps: list[float] = []
        self._forget_gradients()
        clock = _Laps(timing)
        for part in micro_batches(batch, self.model.policy, self._config.micro_batch):
            clock.lap("prepare_s")
            scores = self.model.score(part, batch.temperature)
            loss, part_stats = self._loss(part, scores, batch.temperature, tokens)
            fresh_gaps += _gaps(scores, part, policy_version)
            clock.lap("forward_s")
            loss.backward()  # type: ignore[no-untyped-call]
            self._gather_gradients()
            clock.lap("backward_s")
            stats = part_stats if stats is None else stats + part_stats
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._config.grad_clip).item()
        lr = learning_rate(updates_done, self._config)
        applied = stats is not None and norm < float("inf")  # neither infinite nor nan
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._round_masters()
        clock.lap("optimizer_s")
        metrics = {} if stats is None else stats.metrics()
        if fresh_gaps:
            metrics["parity_max"] = max(fresh_gaps)
        return Update(
            applied,
            metrics
            | timing
            | {
                "grad_norm": norm if applied else 0.0,
                "lr": lr,
                "skipped": 0.0 if applied else 1.0,
                "samples": float(len(batch.samples)),
                "tokens": float(tokens),
            },
        )

    def _loss(
        self, part: MicroBatch, scores: Scores, temperature: float, tokens: int
    ) -> tuple[torch.Tensor, TokenStats]:
        device = scores.logprobs.device
        output = policy_loss(
            scores.logprobs,
            scores.logprobs.detach(),
            part.behaviour_logprobs.to(device),
            part.advantages.to(device),
            part.weights.to(device),
            batch_tokens=tokens,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            is_cap=self._config.is_cap,
            kl_beta=self._config.kl_beta,
            reference_logprobs=self.model.reference_logprobs(part, temperature),
            entropies=scores.entropies,
        )
        return output.loss, output.stats

    # --- masters ------------------------------------------------------------------------------

    def _rounded(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters that have a master apart from themselves, with it."""
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

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state by `parameter/name`, e.g. `lm_head.weight/exp_avg`, `.../master`."""
        tensors = {
            f"{name}/{key}": value
            for name, master in self._masters.items()
            for key, value in self._optimizer.state[master].items()
        }
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"{name}/{_MASTER}"] = master.detach()
        return tensors

    @torch.no_grad()
    def restore(self, weights: Tensors, optimizer: Tensors) -> None:
        """Stand where a checkpoint stood. Raises ValueError if it is of another model."""
        mine = self.model.weights()
        if {name: value.shape for name, value in mine.items()} != {
            name: value.shape for name, value in weights.items()
        }:
            raise ValueError("its weights have other names or shapes than the model's")
        unknown = {key.rpartition("/")[0] for key in optimizer} - self._parameters.keys()
        if unknown:
            raise ValueError(f"its optimizer holds {min(unknown)}, which is not trained here")
        for name, value in mine.items():
            value.copy_(weights[name])
        for name, master in self._masters.items():
            master.copy_(optimizer.get(f"{name}/{_MASTER}", weights[name]))
        self._optimizer.state.clear()
        for key, value in optimizer.items():
            name, _, part = key.rpartition("/")
            if part != _MASTER:
                master = self._masters[name]
                self._optimizer.state[master][part] = value.clone().to(master.device)


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The float32 tensor that is optimized: the parameter itself where it has that precision."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def learning_rate(updates_done: int, config: TrainConfig) -> float:
    """Rate of the update after `updates_done`: a linear rise, then a linear fall to `lr_end`.

    The first update after `warmup` has the full rate, the last of the run `lr * lr_end`.
    """
    if updates_done < config.warmup:
        return config.lr * (updates_done + 1) / (config.warmup + 1)
    span = config.updates - 1 - config.warmup
    progress = min(1.0, (updates_done - config.warmup) / span) if span > 0 else 0.0
    return config.lr * (1.0 - (1.0 - config.lr_end) * progress)


def _gaps(scores: Scores, part: MicroBatch, policy_version: int | None) -> list[float]:
    """The largest |proximal - behaviour| of the tokens that these very weights sampled, if any."""
    if policy_version is None:
        return []
    fresh = part.versions.eq(policy_version)
    if not fresh.any():
        return []
    gaps = (scores.logprobs.detach().cpu() - part.behaviour_logprobs).abs()
    return [gaps[fresh].max().item()]


class _Laps:
    """Adds the time since the last lap to one of several sums."""

    def __init__(self, sums: dict[str, float]) -> None:
        self._sums = sums
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._sums[name] += now - self._since
        self._since = now

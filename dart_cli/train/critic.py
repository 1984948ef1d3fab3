"""The critic: it estimates the reward to come from the policy's hidden state (train.critic).

    Steps         steps of a batch, each with its reward, its baseline and the policy's hidden state before it
    Critic        estimates V(state), the reward to expect, and learns from rewards
    Estimates     values of the steps of a batch, and the advantages that follow from them
    explained_variance   the share of the rewards' variance that expected rewards explain

The value of a step takes the place of its baseline in the advantage. V is the sigmoid of the baseline's
logit plus the output of a small network (the head), which is 0 at first: so V begins as the baseline. The
hidden state is the output of the policy's last layer at the last token of the step's prompt, before anything
is sampled. No gradient of the head reaches the policy. A batch's values are estimated before the head learns
from the batch, since they would otherwise depend on its rewards. A batch that is trained on again keeps the
advantages of its first use.

The head is small, in main memory, and the same on every rank, since each rank learns from the steps of all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from bus.codec import BATCH_LIMITS, joined, parted
from bus.messages import Sample, StepValue
from bus.packed import float64s, int32s
from bus.ranks import StepStates
from dart_cli.algo.advantage import step_advantages
from dart_cli.train.base import SavedState, Tensors, restore, state_of
from dart_cli.train.rank_group import RankGroup

UNITS = 64
"""Hidden units of the head."""
NEWEST_STEPS = 4096
"""The head learns from this many of the newest steps."""
PASSES = 2
"""Passes over these steps after each batch."""
RATE = 1e-3
"""AdamW's learning rate for the head."""

LOGIT_MARGIN = 0.02
"""A baseline is clamped this far from 0 and 1 before its logit is taken."""

PREFIX = "critic/"
"""Prefix of the critic's tensors in a checkpoint."""

_NAMES = tuple(PREFIX + name for name in ("states", "offsets", "rewards", "counts"))

Key = tuple[str, str, int]
"""Group, trajectory, step."""


def key_of(sample: Sample) -> Key:
    """Return the key that identifies the step of a sample."""
    return sample.group_id, sample.trajectory_id, sample.step


@dataclass(frozen=True)
class Steps:
    """Steps [S] of a batch, in order of their keys."""

    keys: tuple[Key, ...]
    rewards: torch.Tensor  # [S], of their trajectories
    baselines: torch.Tensor  # [S], the expected reward without a critic
    advantages: torch.Tensor  # [S], float64, relative to the baselines
    is_own: torch.Tensor  # [S], bool: False for steps of the pool, which the policy did not play
    states: torch.Tensor  # [S, d]

    @classmethod
    def of(cls, samples: Sequence[Sample], states: torch.Tensor, rank_group: RankGroup) -> Self:
        """Return the steps of all ranks; `samples` [s] and `states` [s, d] are this rank's."""
        mine = StepStates(
            groups=[sample.group_id for sample in samples],
            trajectories=[sample.trajectory_id for sample in samples],
            steps=int32s(sample.step for sample in samples),
            numbers=float64s(
                value
                for sample in samples
                for value in (
                    sample.reward or 0.0,
                    sample.expected or 0.0,
                    sample.advantage,
                    float(bool(sample.version_spans)),
                )
            ),
            states=float64s(states.double().numpy().tobytes()),
        )
        messages = [parted(part, BATCH_LIMITS) for part in rank_group.gather(joined(mine))]
        ranks = [message for message in messages if isinstance(message, StepStates)]
        keys = [
            key
            for rank in ranks
            for key in zip(rank.groups, rank.trajectories, rank.steps, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        numbers = torch.cat([_table(rank.numbers, 4) for rank in ranks])[order]
        rewards, baselines, advantages, is_own = numbers.unbind(1)
        return cls(
            keys=tuple(keys[index] for index in order),
            rewards=rewards.float(),
            baselines=baselines.float(),
            advantages=advantages,
            is_own=is_own > 0,
            states=torch.cat([_table(rank.states, states.shape[1]) for rank in ranks])[
                order
            ].float(),
        )

    @property
    def offsets(self) -> torch.Tensor:
        """[S], logits of the baselines."""
        return torch.logit(self.baselines, LOGIT_MARGIN)


@dataclass(frozen=True)
class Estimates:
    """A critic's estimates for the steps of a batch."""

    steps: Steps
    values: torch.Tensor  # [S], the expected reward
    advantages: dict[Key, float]

    def step_values(self) -> list[StepValue]:
        """Return the values and advantages that are finite, to be stored with the steps."""
        return [
            StepValue(
                group_id=key[0],
                trajectory_id=key[1],
                step=key[2],
                value=value,
                advantage=self.advantages[key],
            )
            for key, value in zip(self.steps.keys, self.values.tolist(), strict=True)
            if isfinite(self.advantages[key]) and isfinite(value)
        ]

    def metrics(self) -> dict[str, float]:
        """Return how much of the rewards' variance the baselines and the critic explain."""
        expectations = {"baseline_explained": self.steps.baselines, "critic_explained": self.values}
        shares = {
            name: explained_variance(self.steps.rewards, expected)
            for name, expected in expectations.items()
        }
        return {name: share for name, share in shares.items() if share is not None}


class Critic:
    """An estimator of the reward to expect in states [.., d], which learns from rewards. Not thread-safe."""

    def __init__(self, width: int, gae_lambda: float) -> None:
        """Make a head for states of `width` numbers; `gae_lambda` is lambda of generalised advantages."""
        self._gae_lambda = gae_lambda
        first, last = torch.nn.Linear(width, UNITS), torch.nn.Linear(UNITS, 1)
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        torch.nn.init.kaiming_uniform_(first.weight, a=5**0.5, generator=generator)
        for parameter in (first.bias, last.weight, last.bias):
            torch.nn.init.zeros_(parameter)
        self._net = torch.nn.Sequential(torch.nn.LayerNorm(width), first, torch.nn.GELU(), last)
        self._parameters = {
            PREFIX + name: parameter for name, parameter in self._net.named_parameters()
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=RATE, weight_decay=0.01)
        self._newest = torch.zeros(0, width), torch.zeros(0), torch.zeros(0)
        """States [K, d], logits of baselines [K] and rewards [K] of the newest steps."""
        self._batches = 0  # batches that it has learned from

    @torch.no_grad()
    def estimate(self, steps: Steps) -> Estimates:
        """Return the reward to expect before each step, and the advantages that follow from it."""
        values = torch.sigmoid(self._net(steps.states)[:, 0] + steps.offsets)
        by_episode: dict[tuple[str, str], list[int]] = {}
        for index, (group, trajectory, _) in enumerate(steps.keys):
            by_episode.setdefault((group, trajectory), []).append(index)
        advantages = {}
        for places in by_episode.values():
            of_steps = step_advantages(
                values[places].double().tolist(), float(steps.rewards[places[0]]), self._gae_lambda
            )
            for index, value in zip(places, of_steps, strict=True):
                # The batch's advantage is reward - baseline + margin: only reward - baseline is replaced.
                from_baseline = float(steps.rewards[index] - steps.baselines[index])
                advantages[steps.keys[index]] = (
                    float(steps.advantages[index]) + value - from_baseline
                )
        return Estimates(steps, values, advantages)

    def learn(self, steps: Steps) -> None:
        """Add the policy's own steps of a batch to the newest steps, then train the head on these."""
        is_own = steps.is_own
        new = steps.states[is_own], steps.offsets[is_own], steps.rewards[is_own]
        states, offsets, rewards = (
            torch.cat(columns)[-NEWEST_STEPS:] for columns in zip(self._newest, new, strict=True)
        )
        self._newest = states, offsets, rewards
        rng = np.random.default_rng(self._batches)
        self._batches += 1
        for _ in range(PASSES):
            order = torch.from_numpy(rng.permutation(len(states)))
            for part in torch.split(order, 256) if len(states) else ():
                logits = self._net(states[part])[:, 0] + offsets[part]
                loss = F.binary_cross_entropy_with_logits(logits, rewards[part])
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()

    def state(self) -> Tensors:
        """Return the head, its optimizer's state and the newest steps, for a checkpoint.

        The steps are padded with zeros, so that the shapes are always the same.
        """
        rows = len(self._newest[0])
        states, offsets, rewards = (
            torch.cat([column, column.new_zeros(NEWEST_STEPS - rows, *column.shape[1:])])
            for column in self._newest
        )
        counts = torch.tensor([rows, self._batches])
        return state_of(self._parameters, self._optimizer) | dict(
            zip(_NAMES, (states, offsets, rewards, counts), strict=True)
        )

    def restore(self, saved: SavedState) -> None:
        """Restore the critic from a checkpoint; a checkpoint without a critic changes nothing."""
        if not saved.names.issuperset(_NAMES):
            return
        restore(saved, self._parameters, self._optimizer)
        tensors = {name: torch.zeros(saved.shape(name), dtype=saved.dtype(name)) for name in _NAMES}
        saved.fill(tensors)
        states, offsets, rewards, counts = tensors.values()
        rows, self._batches = counts.tolist()
        self._newest = states[:rows], offsets[:rows], rewards[:rows]


def explained_variance(rewards: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return 1 - Var(R - V) / Var(R) of rewards R [S] and expected rewards V [S]; None if all R are equal."""
    spread = rewards.double().var(unbiased=False).item() if len(rewards) else 0.0
    if spread == 0:
        return None
    return 1 - (rewards - expected).double().var(unbiased=False).item() / spread


def _table(values: Any, columns: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.float64).reshape(-1, columns)

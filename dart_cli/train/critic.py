"""What the policy's own state tells of the reward to come: a value in the place of running baselines (train.critic).

    Steps         steps of a batch, each with its reward, what its baseline expected, and the policy's state before it
    Critic        V(state), which learns from rewards; and the advantages by it
    explained     how much of the rewards some expectations explain

V begins as what running baselines expect: the head's logit is added to theirs, and it is 0 at first. The state is the policy's
last hidden state at the last token of the step's prompt, before anything is sampled. It is read, not changed: no
gradient of the head reaches the policy. A batch's values are told before the head learns of it, else they would know its
rewards; a batch that is trained on again has the advantages of its first use.

The head is small, in main memory, and the same on every rank: each learns from the steps of all.
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

UNITS, KEPT, PASSES, RATE = 64, 4096, 2, 1e-3
"""Of the head: its hidden units, the newest steps that it learns from, its passes over them after each batch, and
AdamW's rate."""

SURE = 0.02
"""What a baseline expects is held this far from 0 and 1 before its logit is taken."""

PREFIX = "critic/"
"""Of its tensors in a checkpoint."""

_NAMES = tuple(PREFIX + name for name in ("states", "offsets", "rewards", "counts"))

Key = tuple[str, str, int]
"""Group, trajectory, step."""


def key_of(sample: Sample) -> Key:
    """Which step it is."""
    return sample.group_id, sample.trajectory_id, sample.step


@dataclass(frozen=True)
class Steps:
    """Steps [S] of a batch, in order of their keys."""

    keys: tuple[Key, ...]
    rewards: torch.Tensor  # [S], of their trajectories
    expected: torch.Tensor  # [S], by running baselines
    advantages: torch.Tensor  # [S], float64, by running baselines
    own: torch.Tensor  # [S], bool: of the policy's own episodes; not of a member of the pool
    states: torch.Tensor  # [S, d]

    @classmethod
    def of(cls, samples: Sequence[Sample], states: torch.Tensor, rank_group: RankGroup) -> Self:
        """Return the steps of all ranks; `samples` [s] and `states` [s, d] are this one's."""
        mine = StepStates(
            groups=[each.group_id for each in samples],
            trajectories=[each.trajectory_id for each in samples],
            steps=int32s(each.step for each in samples),
            numbers=float64s(
                value
                for each in samples
                for value in (
                    each.reward or 0.0,
                    each.expected or 0.0,
                    each.advantage,
                    float(bool(each.version_spans)),
                )
            ),
            states=float64s(states.double().numpy().tobytes()),
        )
        found = [parted(each, BATCH_LIMITS) for each in rank_group.gathered(joined(mine))]
        ranks = [each for each in found if isinstance(each, StepStates)]
        keys = [
            key
            for each in ranks
            for key in zip(each.groups, each.trajectories, each.steps, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        numbers = torch.cat([_table(each.numbers, 4) for each in ranks])[order]
        rewards, expected, advantages, own = numbers.unbind(1)
        return cls(
            tuple(keys[index] for index in order),
            rewards.float(),
            expected.float(),
            advantages,
            own > 0,
            torch.cat([_table(each.states, states.shape[1]) for each in ranks])[order].float(),
        )

    @property
    def offsets(self) -> torch.Tensor:
        """[S], logits of what baselines expect."""
        return torch.logit(self.expected, SURE)


@dataclass(frozen=True)
class Judged:
    """What a critic says of a batch."""

    steps: Steps
    values: torch.Tensor  # [S], of the reward that is to come
    advantages: dict[Key, float]

    def told(self) -> list[StepValue]:
        """To be stored with the steps."""
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
        """How much baselines and the critic explain of the rewards of this batch."""
        by = {"baseline_explained": self.steps.expected, "critic_explained": self.values}
        found = {name: explained(self.steps.rewards, each) for name, each in by.items()}
        return {name: value for name, value in found.items() if value is not None}


class Critic:
    """P(pass), or the expected reward, of states [.., d]. Not thread-safe."""

    def __init__(self, width: int, share: float) -> None:
        """`share` is lambda of generalised advantages."""
        self._share = share
        first, last = torch.nn.Linear(width, UNITS), torch.nn.Linear(UNITS, 1)
        draw = torch.Generator().manual_seed(0)  # the same on every rank
        torch.nn.init.kaiming_uniform_(first.weight, a=5**0.5, generator=draw)
        for each in (first.bias, last.weight, last.bias):
            torch.nn.init.zeros_(each)
        self._net = torch.nn.Sequential(torch.nn.LayerNorm(width), first, torch.nn.GELU(), last)
        self._parameters = {PREFIX + name: each for name, each in self._net.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=RATE, weight_decay=0.01)
        self._kept = torch.zeros(0, width), torch.zeros(0), torch.zeros(0)
        """States [K, d], logits of what baselines expected [K], and rewards [K] of the newest steps."""
        self._batches = 0  # that it has learned of

    @torch.no_grad()
    def judge(self, steps: Steps) -> Judged:
        """Return what to expect before each step, and advantages by it."""
        values = torch.sigmoid(self._net(steps.states)[:, 0] + steps.offsets)
        by_episode: dict[tuple[str, str], list[int]] = {}
        for index, (group, trajectory, _) in enumerate(steps.keys):
            by_episode.setdefault((group, trajectory), []).append(index)
        advantages = {}
        for places in by_episode.values():
            of_steps = step_advantages(
                values[places].double().tolist(), float(steps.rewards[places[0]]), self._share
            )
            for index, value in zip(places, of_steps, strict=True):
                # What baselines made of it holds the margin, too: only their part is replaced.
                theirs = float(steps.rewards[index] - steps.expected[index])
                advantages[steps.keys[index]] = float(steps.advantages[index]) + value - theirs
        return Judged(steps, values, advantages)

    def learn(self, steps: Steps) -> None:
        """Take in the policy's own steps of a batch, then pass over the newest steps."""
        new = steps.states[steps.own], steps.offsets[steps.own], steps.rewards[steps.own]
        states, offsets, rewards = (
            torch.cat(each)[-KEPT:] for each in zip(self._kept, new, strict=True)
        )
        self._kept = states, offsets, rewards
        rng = np.random.default_rng(self._batches)
        self._batches += 1
        for _ in range(PASSES):
            order = torch.from_numpy(rng.permutation(len(states)))
            for part in torch.split(order, 256) if len(states) else ():
                told = self._net(states[part])[:, 0] + offsets[part]
                loss = F.binary_cross_entropy_with_logits(told, rewards[part])
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()

    def state(self) -> Tensors:
        """For checkpoints: the head, its optimizer, and the steps that it keeps. Of the same shapes at all times."""
        rows = len(self._kept[0])
        kept = (
            torch.cat([each, each.new_zeros(KEPT - rows, *each.shape[1:])]) for each in self._kept
        )
        counts = torch.tensor([rows, self._batches])
        return state_of(self._parameters, self._optimizer) | dict(
            zip(_NAMES, (*kept, counts), strict=True)
        )

    def restore(self, saved: SavedState) -> None:
        """Restore the critic from a checkpoint; one of a run that had no critic changes nothing."""
        if not saved.names.issuperset(_NAMES):
            return
        restore(saved, self._parameters, self._optimizer)
        found = {name: torch.zeros(saved.shape(name), dtype=saved.dtype(name)) for name in _NAMES}
        saved.fill(found)
        states, offsets, rewards, counts = found.values()
        rows, self._batches = counts.tolist()
        self._kept = states[:rows], offsets[:rows], rewards[:rows]


def explained(rewards: torch.Tensor, expected: torch.Tensor) -> float | None:
    """1 - Var(R - V) / Var(R) of [S]; None where all rewards are alike."""
    spread = rewards.double().var(unbiased=False).item() if len(rewards) else 0.0
    if spread == 0:
        return None
    return 1 - (rewards - expected).double().var(unbiased=False).item() / spread


def _table(values: Any, columns: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.float64).reshape(-1, columns)

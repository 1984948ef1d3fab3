"""The losses of other libraries and papers, written again in plain Python and float64, without dart_cli.

    Case        completions with their log-probabilities, and the numbers of an objective
    Dual        a number with its derivatives by every token's log-probability
    FORMULAS    variant -> its loss of a case, as a Dual

Each formula follows its source and not dart_cli/algo: loops over sequences and tokens, sums that are
written out, derivatives by forward differentiation. A sequence is one completion; a trajectory is one
or several of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Numbers:
    """The numbers of an objective."""

    clip_low: float
    clip_high: float
    cap: float
    kl_beta: float


@dataclass(frozen=True)
class Sequence:
    """One completion: lists by token."""

    trajectory: int
    advantage: float
    policy: list[float]
    proximal: list[float]
    behaviour: list[float]
    reference: list[float]

    def __len__(self) -> int:
        return len(self.policy)


@dataclass(frozen=True)
class Case:
    """A batch."""

    sequences: list[Sequence]
    numbers: Numbers

    @property
    def tokens(self) -> int:
        """The number of tokens N of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class Dual:
    """A dual number, value + slope . dp, with the slope by all log-probabilities [N]."""

    value: float
    slope: np.ndarray = field(repr=False)

    def __add__(self, other: Dual | float) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value + other.value, self.slope + other.slope)
        return Dual(self.value + other, self.slope)

    def __mul__(self, other: Dual | float) -> Dual:
        if isinstance(other, Dual):
            return Dual(
                self.value * other.value, self.slope * other.value + other.slope * self.value
            )
        return Dual(self.value * other, self.slope * other)

    def __neg__(self) -> Dual:
        return self * -1.0

    def __sub__(self, other: Dual | float) -> Dual:
        return self + (-other)

    def __truediv__(self, other: float) -> Dual:
        return self * (1.0 / other)

    def exp(self) -> Dual:
        """Return the exponential."""
        grown = math.exp(self.value)
        return Dual(grown, self.slope * grown)

    def constant(self) -> float:
        """Return the value without its derivative: a stopped gradient."""
        return self.value


def clip(number: Dual, low: float, high: float) -> Dual:
    """Return the clamped value, with no derivative outside the bounds."""
    if low <= number.value <= high:
        return number
    return Dual(min(max(number.value, low), high), np.zeros_like(number.slope))


def least(one: Dual, other: Dual) -> Dual:
    """Return the smaller one, with its derivative."""
    return one if one.value <= other.value else other


def total(numbers: Iterable[Dual]) -> Dual:
    """Return the sum of at least one value."""
    first, *rest = numbers
    for other in rest:
        first = first + other
    return first


class Tape:
    """The case's log-probabilities as Duals."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.numbers = case.numbers
        self.sequences = case.sequences
        self._starts = np.cumsum([0, *map(len, case.sequences)]).tolist()

    def policy(self, sequence: int, token: int) -> Dual:
        """Return the log-probability under the current weights."""
        return self._input(self.sequences[sequence].policy[token], self._starts[sequence] + token)

    def _input(self, value: float, place: int) -> Dual:
        slope = np.zeros(self.case.tokens)
        slope[place] = 1.0
        return Dual(value, slope)


Token = Callable[[Tape, int, int], Dual]
"""The loss of a token: (tape, sequence, token)."""


# --- what the loss is a mean over -----------------------------------------------------------------


def token_mean(loss: Token) -> Callable[[Case], Dual]:
    """Return 1 / (all tokens): DAPO eq. 8; TRL `bnpo` and `dapo`; verl `token-mean`."""

    def of(case: Case) -> Dual:
        tape = Tape(case)
        return total(_all(tape, loss)) / case.tokens

    return of


def sequence_mean(loss: Token) -> Callable[[Case], Dual]:
    """Return GRPO's eq. 3; TRL `grpo`; verl and DART's release `seq-mean-token-mean`."""

    def of(case: Case) -> Dual:
        tape = Tape(case)
        means = [
            total(loss(tape, i, t) for t in range(len(sequence))) / len(sequence)
            for i, sequence in enumerate(case.sequences)
        ]
        return total(means) / len(means)

    return of


def trajectory_mean(loss: Token) -> Callable[[Case], Dual]:
    """Return the mean over trajectories of the mean over all tokens of each."""

    def of(case: Case) -> Dual:
        tape = Tape(case)
        sums: dict[int, list[Dual]] = {}
        for i, sequence in enumerate(case.sequences):
            sums.setdefault(sequence.trajectory, []).extend(
                loss(tape, i, t) for t in range(len(sequence))
            )
        return total(total(tokens) / len(tokens) for tokens in sums.values()) / len(sums)

    return of


def _all(tape: Tape, loss: Token) -> list[Dual]:
    return [
        loss(tape, i, t) for i, sequence in enumerate(tape.sequences) for t in range(len(sequence))
    ]


# --- losses of a token ----------------------------------------------------------------------------


def ppo(tape: Tape, i: int, t: int) -> Dual:
    """Return PPO eq. 7 against the behaviour policy, as TRL's GRPO."""
    sequence, n = tape.sequences[i], tape.numbers
    ratio = (tape.policy(i, t) - sequence.behaviour[t]).exp()
    clipped = clip(ratio, 1 - n.clip_low, 1 + n.clip_high)
    return -least(ratio * sequence.advantage, clipped * sequence.advantage)


def decoupled(tape: Tape, i: int, t: int) -> Dual:
    """Return decoupled PPO (arXiv 2110.00641): PPO's clip against the proximal policy."""
    sequence, n = tape.sequences[i], tape.numbers
    ratio = (tape.policy(i, t) - sequence.proximal[t]).exp()
    clipped = clip(ratio, 1 - n.clip_low, 1 + n.clip_high)
    return -least(ratio * sequence.advantage, clipped * sequence.advantage)


def truncated(tape: Tape, i: int, t: int) -> Dual:
    """Return DART section 3: min(proximal / behaviour, C); TRL `token_truncate`, slime's TIS."""
    sequence = tape.sequences[i]
    weight = math.exp(sequence.proximal[t] - sequence.behaviour[t])
    return decoupled(tape, i, t) * min(weight, tape.numbers.cap)


def with_kl(tape: Tape, i: int, t: int) -> Dual:
    """Return TRL's sum of PPO and beta (exp(ref - p) - (ref - p) - 1), without a bound."""
    gap = -tape.policy(i, t) + tape.sequences[i].reference[t]
    return ppo(tape, i, t) + (gap.exp() - gap - 1.0) * tape.numbers.kl_beta


def with_clamped_kl(tape: Tape, i: int, t: int) -> Dual:
    """Return verl's `low_var_kl` and DART's release: log-ratio within +-20, value within +-10."""
    gap = clip(-tape.policy(i, t) + tape.sequences[i].reference[t], -20.0, 20.0)
    k3 = clip(gap.exp() - gap - 1.0, -10.0, 10.0)
    return ppo(tape, i, t) + k3 * tape.numbers.kl_beta


def cloned(tape: Tape, i: int, t: int) -> Dual:
    """Return DAPG's demonstration term: its advantage times the gradient of behaviour cloning."""
    own = tape.policy(i, t)
    return (own - own.constant()).exp() * -tape.sequences[i].advantage


FORMULAS: dict[str, Callable[[Case], Dual]] = {
    "grpo_token_mean": token_mean(ppo),
    "grpo_sequence_mean": sequence_mean(ppo),
    "grpo_trajectory_mean": trajectory_mean(ppo),
    "dapo_clip_higher": token_mean(ppo),
    "decoupled_ppo": token_mean(decoupled),
    "truncated_is": token_mean(truncated),
    "dart_step_mean": sequence_mean(truncated),
    "kl_k3": sequence_mean(with_kl),
    "kl_k3_clamped": token_mean(with_clamped_kl),
    "demonstrations_cloned": token_mean(cloned),
}

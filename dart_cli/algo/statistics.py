"""Confidence intervals of shares of episodes, and tests whether two policies or raters differ.

wilson            the confidence interval of a share of episodes that passed
pass_at_k         the probability that at least one of k attempts passes
pass_hat_k        the probability that all of k attempts pass
counts_of         the values of k that are reported for a number of attempts
over_tasks        a mean over tasks with its bootstrap interval
interval_of_mean  the bootstrap interval of a mean
mcnemar           an exact test of pairs of episodes that pass or fail
sign_flip         a test of pairs of rewards, by random signs of their differences
Agreement         how far two raters of the same episodes agree: their share and Cohen's kappa, with intervals
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, fsum

import numpy as np

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(passed: int, episodes: int) -> tuple[float, float]:
    """Return the 95 % score interval of the share of `episodes` that passed (Wilson 1927).

    It is (0, 1) without an episode.
    """
    if episodes == 0:
        return 0.0, 1.0
    share, z2 = passed / episodes, Z_95**2
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = (
        Z_95
        / (1 + z2 / episodes)
        * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes**2))
    )
    # The interval always holds the share; rounding may put a bound of 0 or 1 a little beside it.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


RESAMPLES = 10_000
"""Number of resamples of the bootstrap."""
LEAST_DRAWN = 10
"""Least number of values for a bootstrap. Its 95 % interval holds the mean of 10 normal values in 90 % of
cases, of 3 values in 75 %."""
_RESAMPLES_AT_ONCE = 500  # resamples drawn at once, which bounds memory


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Return pass@k = 1 - C(n - c, k) / C(n, k), of n attempts at one instance, of which c passed.

    It is the unbiased estimate of the probability that at least one of k independent attempts passes (Chen et
    al. 2021, arXiv 2107.03374, eq. 1). Needs k <= n.
    """
    _check(attempts, passed, k)
    return float(1 - Fraction(comb(attempts - passed, k), comb(attempts, k)))


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """Return pass^k = C(c, k) / C(n, k), of n attempts at one instance, of which c passed.

    It is the unbiased estimate of the probability that all of k independent attempts pass (tau-bench, arXiv
    2406.12045, section 3). Needs k <= n.
    """
    _check(attempts, passed, k)
    return float(Fraction(comb(passed, k), comb(attempts, k)))


def counts_of(attempts: int) -> list[int]:
    """Return the values of k that are reported: the powers of two up to `attempts`, and `attempts` itself."""
    powers = [1 << bit for bit in range(attempts.bit_length()) if 1 << bit <= attempts]
    return powers if not attempts or powers[-1] == attempts else [*powers, attempts]


def over_tasks(
    by_task: Sequence[Sequence[float]], *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean over tasks of their mean over instances, and its 95 % interval.

    `by_task` has the values of the instances of each task: [T][I]. The interval is the percentile
    bootstrap's over tasks: T tasks are drawn with replacement, each with all its instances, since
    instances of one task are alike. If there is one task, its instances are drawn. The interval is None
    if there are fewer than LEAST_DRAWN values to draw from.
    """
    means = [fsum(values) / len(values) for values in by_task]
    values = list(by_task[0]) if len(by_task) == 1 else means
    mean = fsum(means) / len(means)
    if len(values) < LEAST_DRAWN:
        return mean, None
    return mean, interval_of_mean(values, seed=seed, resamples=resamples)


def interval_of_mean(
    values: Sequence[float], *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the 2.5 % and 97.5 % quantiles of the mean over values [T] drawn with replacement.

    Return None for fewer than two values.
    """
    if len(values) < 2:
        return None
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = np.concatenate(
        [
            array[
                rng.integers(
                    0, len(array), (min(_RESAMPLES_AT_ONCE, resamples - start), len(array))
                )
            ].mean(1)
            for start in range(0, resamples, _RESAMPLES_AT_ONCE)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _check(attempts: int, passed: int, k: int) -> None:
    if not 0 <= passed <= attempts or not 1 <= k <= attempts:
        raise ValueError(
            f"want 0 <= passed <= attempts and 1 <= k <= attempts: {attempts}, {passed}, {k}"
        )


DRAWS = 20_000
"""Number of draws of random signs in `sign_flip`."""
_DRAWS_AT_ONCE = 1_000  # drawn at once, which bounds memory
_SAME = 1e-9  # sums that differ by less are equal but for rounding


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p of McNemar's exact test (McNemar 1947; the binomial form).

    The counts are the pairs of which only the first passed, and only the second. Without a difference
    both are equally likely, so the smaller count is Binomial(n, 1/2) of the n pairs that differ.
    """
    differ = first_only + second_only
    tail = sum(comb(differ, count) for count in range(min(first_only, second_only) + 1))
    return float(min(1.0, 2 * tail / 2**differ))


def sign_flip(differences: Sequence[float], *, seed: int, draws: int = DRAWS) -> float:
    """Return the two-sided p of the differences [P] of pairs: how often random signs give a sum as large.

    Without a difference between the policies both signs of each difference are equally likely. For
    differences of -1, 0 and 1 it estimates `mcnemar`. It is never 0: the observed signs count as one draw.
    """
    nonzero = np.asarray([value for value in differences if value], dtype=np.float64)
    if not len(nonzero):
        return 1.0
    rng = np.random.default_rng(seed)
    observed, as_large = abs(nonzero.sum()), 0
    for start in range(0, draws, _DRAWS_AT_ONCE):
        shape = (min(_DRAWS_AT_ONCE, draws - start), len(nonzero))
        sums = np.where(rng.integers(0, 2, shape), nonzero, -nonzero).sum(1)
        as_large += int((np.abs(sums) >= observed - _SAME).sum())
    return (1 + as_large) / (1 + draws)


@dataclass(frozen=True)
class Agreement:
    """Numbers of episodes by the verdicts of the judge and of the evaluator."""

    both_pass: int
    both_fail: int
    judge_alone: int  # the judge passes what the evaluator fails
    evaluator_alone: int

    @property
    def n(self) -> int:
        """Number of episodes for which both gave a verdict."""
        return self.both_pass + self.both_fail + self.judge_alone + self.evaluator_alone

    @property
    def share(self) -> float | None:
        """Share of episodes in which they agree; None without an episode."""
        return (self.both_pass + self.both_fail) / self.n if self.n else None

    @property
    def share_interval(self) -> tuple[float, float]:
        """95 % score interval of the share (Wilson 1927); (0, 1) without an episode."""
        return wilson(self.both_pass + self.both_fail, self.n)

    @property
    def kappa(self) -> float | None:
        """Agreement beyond chance (Cohen 1960); None if chance alone would always agree."""
        if self.share is None or self._chance == 1:
            return None
        return (self.share - self._chance) / (1 - self._chance)

    @property
    def kappa_interval(self) -> tuple[float, float] | None:
        """95 % interval of kappa from its large-sample variance (Fleiss, Cohen and Everitt 1969).

        None if kappa is None. If the raters agree on all episodes, or on none, the variance is 0 and says
        nothing about certainty: look at `n`.
        """
        kappa, n = self.kappa, self.n
        if kappa is None:
            return None
        table = self._table
        judge, evaluator = self._margins
        same = sum(
            table[i][i] * (1 - (judge[i] + evaluator[i]) * (1 - kappa)) ** 2 for i in range(2)
        )
        other = (1 - kappa) ** 2 * sum(
            table[i][1 - i] * (evaluator[i] + judge[1 - i]) ** 2 for i in range(2)
        )
        rest = (kappa - self._chance * (1 - kappa)) ** 2
        variance = max(0.0, same + other - rest) / ((1 - self._chance) ** 2 * n)
        half = Z_95 * math.sqrt(variance)
        return max(-1.0, kappa - half), min(1.0, kappa + half)

    @property
    def _table(self) -> list[list[float]]:
        """Shares of the four cases, [judge][evaluator], pass first."""
        n = self.n
        return [
            [self.both_pass / n, self.judge_alone / n],
            [self.evaluator_alone / n, self.both_fail / n],
        ]

    @property
    def _margins(self) -> tuple[list[float], list[float]]:
        """Shares of pass and fail, of the judge and of the evaluator."""
        table = self._table
        return [sum(row) for row in table], [table[0][i] + table[1][i] for i in range(2)]

    @property
    def _chance(self) -> float:
        judge, evaluator = self._margins
        return sum(a * b for a, b in zip(judge, evaluator, strict=True))

"""How certain shares of episodes are, and whether two policies or raters differ.

wilson        passes of episodes -> the interval of their share
pass_at_k     probability that at least one of k attempts passes; pass_hat_k: that all do
counts_of     the k that are told for so many attempts
over_tasks    a mean over tasks with its bootstrap interval
mcnemar       exact, of pairs of episodes that pass or fail; sign_flip: of pairs of fractions
Agreement     two raters of the same episodes: pass and fail, Cohen's kappa; with intervals
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
    """95 % score interval of a proportion (Wilson 1927); (0, 1) for no episode."""
    if episodes == 0:
        return 0.0, 1.0
    share, z2 = passed / episodes, Z_95**2
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = (
        Z_95
        / (1 + z2 / episodes)
        * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes**2))
    )
    # It always holds the share; rounding puts a bound of 0 or 1 a little beside it.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


RESAMPLES = 10_000
"""Of the bootstrap."""
LEAST_DRAWN = 10
"""The values that a bootstrap needs: its 95 % interval of 10 normal values holds their mean in 90 % of cases, of 3 in 75 %."""
_RESAMPLES_AT_ONCE = 500  # resamples drawn at once, which bounds memory


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), of n attempts at one instance of which c passed.

    The unbiased estimate of the probability that at least one of k independent attempts passes (Chen et
    al. 2021, arXiv 2107.03374, eq. 1). Needs k <= n.
    """
    _check(attempts, passed, k)
    return float(1 - Fraction(comb(attempts - passed, k), comb(attempts, k)))


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """C(c, k) / C(n, k): the same for all of k attempts (tau-bench, arXiv 2406.12045, section 3)."""
    _check(attempts, passed, k)
    return float(Fraction(comb(passed, k), comb(attempts, k)))


def counts_of(attempts: int) -> list[int]:
    """Return the powers of two up to `attempts`, and `attempts` itself."""
    powers = [1 << bit for bit in range(attempts.bit_length()) if 1 << bit <= attempts]
    return powers if not attempts or powers[-1] == attempts else [*powers, attempts]


def over_tasks(
    by_task: Sequence[Sequence[float]], *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean over tasks of their mean over instances, and its 95 % interval.

    `by_task` has the values of the instances of each task: [T][I]. The interval is that of the percentile
    bootstrap over tasks: T tasks are drawn with replacement, each with all its instances, since
    instances of one task are alike. With one task its instances are drawn. None where fewer than LEAST_DRAWN
    are drawn.
    """
    means = [fsum(values) / len(values) for values in by_task]
    drawn = list(by_task[0]) if len(by_task) == 1 else means
    mean = fsum(means) / len(means)
    if len(drawn) < LEAST_DRAWN:
        return mean, None
    return mean, interval_of_mean(drawn, seed=seed, resamples=resamples)


def interval_of_mean(
    values: Sequence[float], *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the 2.5 % and 97.5 % quantiles of the mean over values [T] drawn with replacement; None for one value."""
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
"""Of random signs."""
_DRAWS_AT_ONCE = 1_000  # drawn at once, which bounds memory
_SAME = 1e-9  # sums that differ by less are equal but for rounding


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided p of McNemar's exact test (McNemar 1947; the binomial form).

    The counts are of pairs of which the first alone passed, and the second alone. Without a difference
    each is as likely, so the smaller count is Binomial(n, 1/2) of the n pairs that differ.
    """
    differ = first_only + second_only
    tail = sum(comb(differ, count) for count in range(min(first_only, second_only) + 1))
    return float(min(1.0, 2 * tail / 2**differ))


def sign_flip(differences: Sequence[float], *, seed: int, draws: int = DRAWS) -> float:
    """Two-sided p of the differences [P] of pairs: how often their sum is as large with random signs.

    Without a difference either sign of each is as likely. Of differences of -1, 0 and 1 it estimates
    `mcnemar`. Never 0: the observed signs count as one draw.
    """
    given = np.asarray([each for each in differences if each], dtype=np.float64)
    if not len(given):
        return 1.0
    rng = np.random.default_rng(seed)
    observed, as_large = abs(given.sum()), 0
    for start in range(0, draws, _DRAWS_AT_ONCE):
        shape = (min(_DRAWS_AT_ONCE, draws - start), len(given))
        sums = np.where(rng.integers(0, 2, shape), given, -given).sum(1)
        as_large += int((np.abs(sums) >= observed - _SAME).sum())
    return (1 + as_large) / (1 + draws)


@dataclass(frozen=True)
class Agreement:
    """Numbers of episodes by what the judge and the evaluator say."""

    both_pass: int
    both_fail: int
    judge_alone: int  # the judge passes what the evaluator fails
    evaluator_alone: int

    @property
    def n(self) -> int:
        """Episodes of which both have an opinion."""
        return self.both_pass + self.both_fail + self.judge_alone + self.evaluator_alone

    @property
    def share(self) -> float | None:
        """Of episodes in which they agree; None without any."""
        return (self.both_pass + self.both_fail) / self.n if self.n else None

    @property
    def share_interval(self) -> tuple[float, float]:
        """95 % score interval of the share (Wilson 1927); (0, 1) without an episode."""
        return wilson(self.both_pass + self.both_fail, self.n)

    @property
    def kappa(self) -> float | None:
        """Agreement beyond chance (Cohen 1960); None where chance alone agrees always."""
        if self.share is None or self._chance == 1:
            return None
        return (self.share - self._chance) / (1 - self._chance)

    @property
    def kappa_interval(self) -> tuple[float, float] | None:
        """95 %, from the large-sample variance (Fleiss, Cohen and Everitt 1969); wide is as wide as it gets.

        None where kappa is. Where all agree, or all differ, the variance is 0 and tells nothing: see `n`.
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
        """Shares, [judge][evaluator], pass first."""
        n = self.n
        return [
            [self.both_pass / n, self.judge_alone / n],
            [self.evaluator_alone / n, self.both_fail / n],
        ]

    @property
    def _margins(self) -> tuple[list[float], list[float]]:
        """Shares of pass and fail of the judge, of the evaluator."""
        table = self._table
        return [sum(row) for row in table], [table[0][i] + table[1][i] for i in range(2)]

    @property
    def _chance(self) -> float:
        judge, evaluator = self._margins
        return sum(a * b for a, b in zip(judge, evaluator, strict=True))

"""How far two raters of the same episodes agree.

Agreement   their table of pass and fail, the share in which they agree, Cohen's kappa; with intervals
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dart_cli.algo.proportion import Z_95, wilson


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

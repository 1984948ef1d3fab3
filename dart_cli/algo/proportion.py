"""How certain a share of passes is.

wilson   the score interval of a proportion
"""

from __future__ import annotations

import math

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

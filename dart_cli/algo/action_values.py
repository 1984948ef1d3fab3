"""Which action an explorer tries next: values over a memory of what was tried, and draws by them.

    Memory           what is known of each state's actions, and their values
    untried_value    of an action that was never tried
    frontier_value   of a state, by its untried actions
    sweep            values one step further along what is known
    softmax          values -> probabilities
    shortlist        a few different actions, drawn by their values

GUI-Bee's Q-ICRL (arXiv 2501.13896) as we implement it. An action that changed nothing, or was an error,
is worth 0. One that was never tried is worth 1, and a quarter more where the policy is sure of it. One that led
to a state is worth 0.9 of the best that can be had from there: untried actions of that state, or a tried one that
leads on. Where it led to several, their mean counts: a dialog leads back to where it was opened, and two screens
that look alike are one.

At each step values are swept from 0 until they settle. A few sweeps from the values before, in their place,
leave what is used up in circles, where each screen is worth 0.9 of the other, for dozens of steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate

State = str
Move = tuple[Hashable, ...]
"""What can be done in a state, e.g. (place, action)."""

DISCOUNT = 0.9
"""Of a value, for each action on the way to it."""
PRIOR_WEIGHT = 0.25
"""What the policy's own probability adds to an action that was never tried, at most."""
SETTLED = 1e-4
"""Change of a value below which sweeps end."""
MOST_SWEEPS = 100
"""Of each step; 0.9 ** 100 is below any change that counts."""
TEMPERATURE = 0.25
"""Of the softmax over values."""
CANDIDATES = 5
"""Actions in a shortlist."""


def untried_value(prior: float = 0.0) -> float:
    """Value of an action that was never tried, by the policy's probability of it."""
    return 1.0 + PRIOR_WEIGHT * prior


def frontier_value(untried: Sequence[float], actions: int) -> float:
    """Value of a state with so many actions: the best of the untried ones' values [U], times their share."""
    return max(untried) * len(untried) / actions if untried else 0.0


def sweep(
    values: Mapping[tuple[State, Move], float],
    outcomes: Mapping[tuple[State, Move], Mapping[State | None, int]],
    frontier: Mapping[State, float],
) -> dict[tuple[State, Move], float]:
    """Return the values of tried actions, from those before; all at once, in no order.

    `outcomes` has how often each led to which state; None for a no-op or an error.
    """
    best: dict[State, float] = {}
    for (state, _), value in values.items():
        best[state] = max(value, best.get(state, 0.0))
    return {
        key: DISCOUNT
        * sum(
            count * max(frontier.get(after, 0.0), best.get(after, 0.0))
            for after, count in led_to.items()
            if after is not None
        )
        / sum(led_to.values())
        for key, led_to in outcomes.items()
    }


def softmax(values: Sequence[float], temperature: float = TEMPERATURE) -> list[float]:
    """Probabilities [N] by values [N]; sums to 1."""
    highest = max(values)
    weights = [math.exp((value - highest) / temperature) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def shortlist(
    values: Sequence[float],
    uniform: Callable[[], float],
    most: int = CANDIDATES,
    temperature: float = TEMPERATURE,
) -> list[int]:
    """Return indices of up to `most` different actions, in the order drawn: each by softmax among those left.

    `uniform` gives numbers in [0, 1), one for each draw.
    """
    left = [*range(len(values))]
    drawn: list[int] = []
    while left and len(drawn) < most:
        shares = softmax([values[index] for index in left], temperature)
        place = min(bisect_right([*accumulate(shares)], uniform()), len(left) - 1)
        drawn.append(left.pop(place))
    return drawn


class Memory:
    """What is known of each state's actions. Several explorers may share one.

    What a state offers is what it offered at the newest visit.
    """

    def __init__(self) -> None:
        self._offered: dict[State, tuple[Move, ...]] = {}
        self._priors: dict[State, dict[Move, float]] = {}
        self._running: Counter[tuple[State, Move]] = Counter()
        self._outcomes: dict[tuple[State, Move], Counter[State | None]] = {}
        self._values: dict[tuple[State, Move], float] = {}
        self._frontier: dict[State, float] = {}
        self._left: dict[State, int] = {}  # untried actions

    def see(
        self, state: State, offered: Iterable[Move], priors: Mapping[Move, float] | None = None
    ) -> None:
        """Note that a state was visited and offered these actions.

        `priors` are the policy's, where it gave some.
        """
        self._offered[state] = tuple(dict.fromkeys(offered))
        if priors is not None:
            self._priors[state] = dict(priors)
        self._look_again(state)

    def begin(self, state: State, move: Move) -> None:
        """Note that an action is under way: to other explorers it is tried, and led nowhere yet."""
        self._running[state, move] += 1
        self._look_again(state)

    def end(self, state: State, move: Move, after: State | None) -> None:
        """Note that an action is over: it led to another state, or to none (a no-op or an error)."""
        key = state, move
        self._running[key] = max(0, self._running[key] - 1)
        self._outcomes.setdefault(key, Counter())[None if after == state else after] += 1
        self._look_again(state)

    def sweep(self, most: int = MOST_SWEEPS) -> None:
        """Bring the values up to date, by at most so many sweeps."""
        values: dict[tuple[State, Move], float] = {}
        for _ in range(most):
            before, values = values, sweep(values, self._outcomes, self._frontier)
            if all(value - before.get(key, 0.0) < SETTLED for key, value in values.items()):
                break
        self._values = values

    def values(self, state: State) -> list[float]:
        """Return the values of what the state offers, in its order."""
        return [
            untried_value(self._prior(state, move))
            if self._is_untried(state, move)
            else self._values.get((state, move), 0.0)
            for move in self._offered.get(state, ())
        ]

    def tries(self, state: State, move: Move) -> int:
        """How often an action was tried; one that is under way counts."""
        key = state, move
        return self._outcomes.get(key, Counter()).total() + self._running[key]

    def untried(self, states: Iterable[State] | None = None) -> int:
        """Actions of these states, or of all that are known, that were never tried."""
        return sum(self._left.get(state, 0) for state in (self._left if states is None else states))

    def _look_again(self, state: State) -> None:
        untried = [untried_value(self._prior(state, move)) for move in self._untried(state)]
        self._left[state] = len(untried)
        self._frontier[state] = frontier_value(untried, len(self._offered.get(state, ())))

    def _untried(self, state: State) -> list[Move]:
        return [move for move in self._offered.get(state, ()) if self._is_untried(state, move)]

    def _is_untried(self, state: State, move: Move) -> bool:
        return not self.tries(state, move)

    def _prior(self, state: State, move: Move) -> float:
        return self._priors.get(state, {}).get(move, 0.0)

"""Which action an explorer of applications tries next: values of actions, and draws by these values.

    Memory           the actions of each state, what they led to, and their values
    untried_value    the value of an action that was never tried
    frontier_value   the value that untried actions give a state
    sweep            values of all tried actions, from the values of the sweep before
    softmax          values -> probabilities
    shortlist        a few different actions, drawn by their values

This is our form of GUI-Bee's Q-ICRL (arXiv 2501.13896). An action that changed nothing, or was an error, is
worth 0. An action that was never tried is worth 1, and up to a quarter more by the policy's probability of
it. An action that led to a state is worth 0.9 of the best that can be reached from there: the untried
actions of that state, or a tried one that leads further. If it led to several states, their mean counts: a
dialog leads back to where it was opened, and two screens that look alike are one state.

At each step values are swept from 0 until they settle. It does not suffice to do a few sweeps from the
values of the step before: two exhausted screens that lead to each other would each keep 0.9 of the other's
value, for dozens of steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate

State = str
Move = tuple[Hashable, ...]
"""One action in a state, for example (place, action)."""

DISCOUNT = 0.9
"""Factor of a value for each action on the way to it."""
PRIOR_WEIGHT = 0.25
"""The most that the policy's probability adds to the value of an untried action."""
SETTLED = 1e-4
"""Sweeps end when no value grows by as much as this."""
MOST_SWEEPS = 100
"""Most sweeps in a step; 0.9 ** 100 is below any change that counts."""
TEMPERATURE = 0.25
"""Temperature of the softmax over values."""
CANDIDATES = 5
"""Number of actions in a shortlist."""


def untried_value(prior: float = 0.0) -> float:
    """Return the value of an action that was never tried; `prior` is the policy's probability of it."""
    return 1.0 + PRIOR_WEIGHT * prior


def frontier_value(untried: Sequence[float], actions: int) -> float:
    """Return the value that a state has by its untried actions, whose values are `untried` [U].

    It is the best of them times the untried share of the state's `actions`; 0 without one.
    """
    return max(untried) * len(untried) / actions if untried else 0.0


def sweep(
    values: Mapping[tuple[State, Move], float],
    outcomes: Mapping[tuple[State, Move], Mapping[State | None, int]],
    frontier: Mapping[State, float],
) -> dict[tuple[State, Move], float]:
    """Return the values of tried actions, from the `values` of the sweep before; all are updated at once.

    `outcomes` counts how often each action led to which state; None stands for a no-op or an error.
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
    """Return the probabilities [N] of values [N]; they sum to 1."""
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
    """Return the indices of up to `most` different actions, each drawn by softmax among the remaining ones.

    They are in the order in which they were drawn. `uniform` returns a number in [0, 1) for each draw.
    """
    remaining = [*range(len(values))]
    draws: list[int] = []
    while remaining and len(draws) < most:
        shares = softmax([values[index] for index in remaining], temperature)
        place = min(bisect_right([*accumulate(shares)], uniform()), len(remaining) - 1)
        draws.append(remaining.pop(place))
    return draws


class Memory:
    """The actions of each state, what they led to, and their values. Several explorers may share one.

    The actions of a state are those that it offered at its newest visit.
    """

    def __init__(self) -> None:
        self._offered: dict[State, tuple[Move, ...]] = {}
        self._priors: dict[State, dict[Move, float]] = {}
        self._running: Counter[tuple[State, Move]] = Counter()
        self._outcomes: dict[tuple[State, Move], Counter[State | None]] = {}
        self._values: dict[tuple[State, Move], float] = {}
        self._frontier: dict[State, float] = {}
        self._untried_counts: dict[State, int] = {}

    def see(
        self, state: State, offered: Iterable[Move], priors: Mapping[Move, float] | None = None
    ) -> None:
        """Record that a state was visited and offered these actions.

        `priors` are the policy's probabilities of them, if it gave any.
        """
        self._offered[state] = tuple(dict.fromkeys(offered))
        if priors is not None:
            self._priors[state] = dict(priors)
        self._count_untried(state)

    def begin(self, state: State, move: Move) -> None:
        """Record that an action is under way: other explorers count it as tried, with no outcome yet."""
        self._running[state, move] += 1
        self._count_untried(state)

    def end(self, state: State, move: Move, after: State | None) -> None:
        """Record that an action is over: it led to the state `after`, or to none (a no-op or an error)."""
        key = state, move
        self._running[key] = max(0, self._running[key] - 1)
        self._outcomes.setdefault(key, Counter())[None if after == state else after] += 1
        self._count_untried(state)

    def sweep(self, most: int = MOST_SWEEPS) -> None:
        """Compute the values again, by at most `most` sweeps from 0."""
        values: dict[tuple[State, Move], float] = {}
        for _ in range(most):
            before, values = values, sweep(values, self._outcomes, self._frontier)
            if all(value - before.get(key, 0.0) < SETTLED for key, value in values.items()):
                break
        self._values = values

    def values(self, state: State) -> list[float]:
        """Return the values of the actions that a state offers, in their order."""
        return [
            untried_value(self._prior(state, move))
            if self._is_untried(state, move)
            else self._values.get((state, move), 0.0)
            for move in self._offered.get(state, ())
        ]

    def tries(self, state: State, move: Move) -> int:
        """Return how often an action was tried, including tries that are under way."""
        key = state, move
        return self._outcomes.get(key, Counter()).total() + self._running[key]

    def untried(self, states: Iterable[State] | None = None) -> int:
        """Return how many actions were never tried, of these states or (None) of all states."""
        counts = self._untried_counts
        return sum(counts.get(state, 0) for state in (counts if states is None else states))

    def _count_untried(self, state: State) -> None:
        """Update the number of untried actions of a state, and its frontier value."""
        untried = [untried_value(self._prior(state, move)) for move in self._untried(state)]
        self._untried_counts[state] = len(untried)
        self._frontier[state] = frontier_value(untried, len(self._offered.get(state, ())))

    def _untried(self, state: State) -> list[Move]:
        return [move for move in self._offered.get(state, ()) if self._is_untried(state, move)]

    def _is_untried(self, state: State, move: Move) -> bool:
        return not self.tries(state, move)

    def _prior(self, state: State, move: Move) -> float:
        return self._priors.get(state, {}).get(move, 0.0)

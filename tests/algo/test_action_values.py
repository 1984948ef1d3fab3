"""Q-ICRL's values and draws, compared with counts path by path and tuple by tuple."""

from __future__ import annotations

import itertools
import math
from collections import deque
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.action_values import (
    DISCOUNT,
    Memory,
    frontier_value,
    shortlist,
    softmax,
    untried_value,
)

Graph = dict[str, dict[str, str | None]]
"""State -> action -> the state to which it led when it was tried; None for a no-op."""

STATES, MOVES = "abcdef", "1234"


def random_graph(rng: Random) -> tuple[Graph, dict[tuple[str, str], float]]:
    graph: Graph = {
        state: {
            move: rng.choice([None, *STATES])
            for move in MOVES
            if rng.random() < rng.choice((0.3, 0.9))
        }
        for state in STATES
    }
    priors = {(state, move): rng.random() for state in STATES for move in MOVES}
    return graph, priors


def remembered(graph: Graph, priors: dict[tuple[str, str], float]) -> Memory:
    memory = Memory()
    for state in STATES:
        memory.see(
            state, [(move,) for move in MOVES], {(move,): priors[state, move] for move in MOVES}
        )
    for state, tried in graph.items():
        for move, after in tried.items():
            memory.begin(state, (move,))
            memory.end(state, (move,), after)
    return memory


def along_all_paths(
    graph: Graph, priors: dict[tuple[str, str], float], state: str, move: str, longest: int
) -> float:
    """Return the value of a tried action: of the best state at most `longest` actions away, including it."""
    if graph[state][move] in (None, state):
        return 0.0
    best, values_seen = 0.0, {graph[state][move]: 1}
    waiting = deque([graph[state][move]])
    while waiting:
        at = waiting.popleft()
        untried = [1 + priors[at, each] / 4 for each in MOVES if each not in graph[at]]
        if untried:
            best = max(best, 0.9 ** values_seen[at] * max(untried) * len(untried) / len(MOVES))
        for after in graph[at].values():
            if after is not None and after not in values_seen and values_seen[at] < longest:
                values_seen[after] = values_seen[at] + 1
                waiting.append(after)
    return best


@pytest.mark.parametrize("sweeps", [1, 2, 3, 100])
def test_a_sweep_looks_one_action_further(sweeps: int) -> None:
    rng = Random(sweeps)
    for _ in range(60):
        graph, priors = random_graph(rng)
        memory = remembered(graph, priors)
        memory.sweep(sweeps)
        for state in STATES:
            for move, value in zip(MOVES, memory.values(state), strict=True):
                expected = (
                    along_all_paths(graph, priors, state, move, sweeps)
                    if move in graph[state]
                    else 1 + priors[state, move] / 4
                )
                assert value == pytest.approx(expected, abs=1e-12)


def test_what_is_used_up_is_worth_nothing_at_once_also_around_circles() -> None:
    rng = Random(3)
    for _ in range(20):
        graph, priors = random_graph(rng)
        memory = remembered(graph, priors)
        memory.sweep()
        for state in STATES:  # nothing is left to try anywhere
            for move in MOVES:
                if move not in graph[state]:
                    memory.end(state, (move,), rng.choice([None, *STATES]))
        memory.sweep()
        assert all(memory.values(state) == [0.0] * len(MOVES) for state in STATES)


def test_an_action_that_led_to_several_states_is_worth_their_mean() -> None:
    """Compare with value iteration on matrices, with the share of each outcome as its probability."""
    rng = Random(5)
    for _ in range(20):
        memory = Memory()
        counts = np.zeros((len(STATES), len(MOVES), len(STATES) + 1))
        for state in STATES:
            memory.see(state, [(move,) for move in MOVES])
        for _ in range(40):
            state, move = rng.randrange(len(STATES)), rng.randrange(len(MOVES))
            after = rng.randrange(len(STATES) + 1)
            nowhere = after == len(STATES) or after == state
            counts[state, move, len(STATES) if nowhere else after] += 1
            memory.end(STATES[state], (MOVES[move],), None if nowhere else STATES[after])
        memory.sweep()
        tries = counts.sum(axis=2)
        share = counts / np.maximum(tries, 1)[..., None]
        frontier = (tries == 0).sum(axis=1) / len(MOVES)
        q = np.zeros((len(STATES), len(MOVES)))
        for _ in range(500):
            ahead = np.maximum(frontier, np.where(tries > 0, q, 0).max(axis=1))
            q = 0.9 * share @ np.append(ahead, 0.0)
        q[tries == 0] = 1.0
        for state, expected in zip(STATES, q, strict=True):
            np.testing.assert_allclose(memory.values(state), expected, atol=1e-3)


def test_an_action_under_way_is_no_frontier_for_the_others() -> None:
    memory = Memory()
    memory.see("a", [("x",), ("y",)])
    assert memory.values("a") == [1.0, 1.0]
    assert memory.untried() == memory.untried("ab") == 2
    memory.begin("a", ("x",))
    assert memory.values("a") == [0.0, 1.0]
    assert (memory.untried(), memory.tries("a", ("x",))) == (1, 1)
    memory.see("b", [("z",)])
    memory.end("a", ("x",), "b")
    memory.sweep(1)
    assert memory.values("a") == [DISCOUNT, 1.0]
    assert memory.tries("a", ("x",)) == 1


def test_the_frontier_is_the_best_untried_times_their_share() -> None:
    assert untried_value() == 1.0
    assert untried_value(1.0) == 1.25
    assert frontier_value([1.0, 1.2], 8) == pytest.approx(0.3)
    assert frontier_value([], 8) == 0.0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.floats(0.05, 5))
def test_softmax_is_the_one_of_numpy(values: list[float], temperature: float) -> None:
    expected = np.exp(np.array(values) / temperature - max(values) / temperature)
    np.testing.assert_allclose(softmax(values, temperature), expected / expected.sum(), atol=1e-12)


def test_shortlists_are_drawn_one_after_the_other_among_those_left() -> None:
    """Check that each pair's share of a fine grid of uniform numbers is its probability."""
    values, grid = [1.0, 0.0, 0.9, 0.4], 200
    counted: dict[tuple[int, ...], int] = {}
    for pair in itertools.product(range(grid), repeat=2):
        numbers = iter([(at + 0.5) / grid for at in pair])
        drawn = tuple(shortlist(values, lambda numbers=numbers: next(numbers), most=2))
        counted[drawn] = counted.get(drawn, 0) + 1
    weights = [math.exp(value / 0.25) for value in values]
    for first, second in itertools.permutations(range(4), 2):
        share = weights[first] / sum(weights)
        share *= weights[second] / (sum(weights) - weights[first])
        assert counted.get((first, second), 0) / grid**2 == pytest.approx(share, abs=3 / grid)


def test_a_shortlist_has_each_action_once() -> None:
    rng = Random(0)
    assert sorted(shortlist([0.0, 1.0, 1.0], rng.random)) == [0, 1, 2]
    assert len(shortlist([0.5] * 9, rng.random)) == 5
    assert shortlist([1.0], lambda: 1 - 2**-53) == [0]

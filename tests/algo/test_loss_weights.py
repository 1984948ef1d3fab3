"""The weight of a token, compared with nested means in fractions, and in words."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.objective import loss_weights

samples_of_batches = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=20
)


@given(samples_of_batches)
def test_every_token_step_or_trajectory_weighs_the_same(samples: list[tuple[str, int]]) -> None:
    def weights(normalise: str) -> list[float]:
        shares = loss_weights(samples, normalise)  # type: ignore[arg-type]
        return [shares.of(*sample) / shares.divisor for sample in samples]

    tokens = sum(count for _, count in samples)
    assert weights("tokens") == pytest.approx([float(Fraction(1, tokens))] * len(samples))
    by_step = [w * count for w, (_, count) in zip(weights("samples"), samples, strict=True)]
    assert by_step == pytest.approx([float(Fraction(1, len(samples)))] * len(samples))
    by_trajectory: dict[str, float] = defaultdict(float)
    for weight, (name, count) in zip(weights("trajectories"), samples, strict=True):
        by_trajectory[name] += weight * count
    assert list(by_trajectory.values()) == pytest.approx(
        [1 / len(by_trajectory)] * len(by_trajectory)
    )


def test_by_default_it_is_the_mean_over_tokens() -> None:
    shares = loss_weights([("a", 3), ("b", 5), ("a", 2)])
    assert [shares.of("a", 3), shares.divisor] == [1.0, 10.0]

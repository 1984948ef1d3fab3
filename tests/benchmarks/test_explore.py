"""benchmarks/learning/explore.py: every arm has the same budget, and the last line has what was asked for."""

from __future__ import annotations

from benchmarks.learning.explore import APPLICATIONS, ARMS, means_of, of_application


def test_arms_are_compared_at_one_budget() -> None:
    app = APPLICATIONS["pop-ups"]
    told = of_application("pop-ups", app, 2)
    assert list(told["arms"]) == list(ARMS)
    for arm in told["arms"].values():
        assert len(arm["by_seed"]) == 2
        assert len(arm["curve"]) == app.steps + 1
        assert arm["curve"][0] == 1.0
        assert arm["curve"][-1] == arm["screens"] <= told["known"]
    means = means_of({"pop-ups": told})
    assert means["screens_qicrl"] == told["arms"]["q"]["screens"]
    assert means["screens_random"] == told["arms"]["random"]["screens"]
    assert 0 <= means["ahead"] <= 1

"""What is trained on and why: rules, sums, and advantages against numpy."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Outcome
from dart_cli.algo.advantage import Estimator
from dart_cli.data.curate import (
    FinishedGroup,
    Member,
    curate,
    drop_decisions,
    may_join,
    no_gradient,
    plan_samples,
    use_decisions,
)
from envs.contract.base import reward_of
from tests.data.parts import finished_group

ALL_OUTCOMES: list[Outcome] = ["pass", "fail", "invalid"]
outcomes = st.sampled_from(ALL_OUTCOMES)


entropies = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 8)


members = st.tuples(outcomes, st.lists(entropies, max_size=4), st.integers(0, 10))


@st.composite
def a_group(draw: st.DrawFn, number: int = 0) -> FinishedGroup:
    """Of any size, outcomes, lengths, ages and entropies, maybe with a success from the pool."""
    drawn = draw(st.lists(members, max_size=8))
    own = tuple(
        Member(f"g{number}-{index}", outcome, len(of_steps), behind, tuple(of_steps))
        for index, (outcome, of_steps, behind) in enumerate(drawn)
    )
    steps = draw(st.none() | st.integers(1, 3))
    pool = None if steps is None else Member(f"x{number}", "pass", steps)
    return FinishedGroup(f"g{number}", own, pool)


def judged(drawn: list[Outcome]) -> list[tuple[Outcome, float | None]]:
    """Outcomes with the rewards that follow from them."""
    return [(outcome, reward_of(outcome)) for outcome in drawn]


@st.composite
def groups(draw: st.DrawFn) -> list[FinishedGroup]:
    """Any finished groups."""
    return [draw(a_group(number)) for number in range(draw(st.integers(0, 6)))]


shares = st.sampled_from([0.01, 0.5, 0.8, 1.0])


@given(groups(), st.integers(1, 4), st.integers(0, 6))
def test_every_group_is_chosen_waiting_or_dropped_with_a_reason(
    given_groups: list[FinishedGroup], per_batch: int, max_staleness: int
) -> None:
    result = curate(
        given_groups,
        groups_per_batch=per_batch,
        max_staleness=max_staleness,
    )
    out = [*result.batch, *result.waiting, *(group for group, _ in result.dropped)]
    assert Counter(group.id for group in out) == Counter(group.id for group in given_groups)
    assert all(reason for _, reason in result.dropped)
    assert len(result.batch) in (0, per_batch)
    assert result.batch or len(result.waiting) < per_batch
    for group in result.batch:
        assert {member.outcome for member in group.compared} == {"pass", "fail"}
        assert group.behind <= max_staleness


@given(groups(), st.integers(1, 4), shares)
def test_a_batch_is_every_step_of_every_valid_member_once_and_of_the_pools(
    given_groups: list[FinishedGroup], per_batch: int, share: float
) -> None:
    result = curate(
        given_groups,
        groups_per_batch=per_batch,
        max_staleness=10,
        high_entropy_share=share,
    )
    wanted = [
        (member.trajectory_id, step, member is group.pool)
        for group in result.batch
        for member in [*group.members, *([group.pool] if group.pool else [])]
        if member.outcome != "invalid"
        for step in range(member.steps)
    ]
    got = [(each.trajectory_id, each.step, each.reason == "pool") for each in result.samples]
    assert got == wanted
    assert all((each.weight == 0) == (each.reason == "low_entropy") for each in result.samples)


@given(a_group(), shares)
def test_the_steps_left_out_are_those_of_lowest_entropy_of_their_own_group(
    group: FinishedGroup, share: float
) -> None:
    own = [each for each in plan_samples(group, "group_std", share) if each.reason != "pool"]
    kept = [each.entropy or 0.0 for each in own if each.weight]
    out = [each.entropy or 0.0 for each in own if not each.weight]
    assert bool(kept) == bool(own)
    assert len(kept) >= share * len(own)
    assert max(out, default=-1.0) < min(kept, default=0.0)


@given(a_group(), st.randoms(use_true_random=False), shares)
def test_which_steps_are_left_out_depends_on_no_order(
    group: FinishedGroup, shuffle: random.Random, share: float
) -> None:
    other = FinishedGroup(
        group.id, tuple(shuffle.sample(group.members, len(group.members))), group.pool
    )
    one, two = (
        {(each.trajectory_id, each.step): each for each in plan_samples(g, "group_mean", share)}
        for g in (group, other)
    )
    assert one.keys() == two.keys()
    for key, each in one.items():
        assert each.reason == two[key].reason
        assert each.advantage == pytest.approx(two[key].advantage, abs=1e-12)


@given(st.integers(2, 15), st.sampled_from(["group_std", "group_mean", "leave_one_out"]))
def test_a_success_of_the_pool_is_compared_as_one_member_more(
    fails: int, advantage: Estimator
) -> None:
    group = finished_group("g", ["fail"] * fails)
    pool = Member("x1", "pass", 2)
    joined = FinishedGroup("g", group.members, pool)
    rewards = np.array([0.0] * fails + [1.0])
    result = curate([joined], groups_per_batch=1, max_staleness=9, advantage=advantage)
    centred = rewards - rewards.mean()
    wanted = {
        "group_std": centred / (rewards.std() + 1e-6),
        "group_mean": centred,
        "leave_one_out": rewards - (rewards.sum() - rewards) / fails,
    }[advantage]
    got = [sample.advantage for sample in result.samples]
    np.testing.assert_allclose(got, np.repeat(wanted, 2), rtol=1e-9)
    assert [sample.reason for sample in result.samples][-2:] == ["pool", "pool"]
    assert result.reward == 0.0


@pytest.mark.parametrize(
    ("valid", "ratio", "joins"),
    [(7, 0.125, True), (6, 0.125, False), (8, 0.125, True), (9, 0.1, True), (8, 0.0, False)],
)
def test_the_pool_is_at_most_its_ratio_of_a_group(valid: int, ratio: float, joins: bool) -> None:
    assert may_join(valid, ratio) == joins


@given(st.lists(outcomes, min_size=2, max_size=16))
def test_advantages_are_those_of_numpy_over_trajectories(drawn: list[Outcome]) -> None:
    valid = [outcome for outcome in drawn if outcome != "invalid"]
    group = finished_group("g", drawn)
    result = curate([group], groups_per_batch=1, max_staleness=10)
    if no_gradient(judged(drawn)):
        assert not result.samples
        return
    rewards = np.array([float(outcome == "pass") for outcome in valid])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    got = [sample.advantage for sample in result.samples]
    np.testing.assert_allclose(got, np.repeat(advantages, 2), rtol=1e-9)
    assert result.reward == pytest.approx(rewards.mean())


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        (["pass"] * 8, "all_success"),
        (["fail"] * 8, "all_fail"),
        (["fail", "invalid"], "single_member"),
        (["invalid"] * 3, "no_valid_member"),
        ([], "no_valid_member"),
        (["pass", "invalid", "pass"], "all_success"),
        (["pass", "invalid", "fail"], None),
    ],
)
def test_a_group_without_a_gradient_says_why(drawn: list[Outcome], reason: str | None) -> None:
    assert no_gradient(judged(drawn)) == reason


@pytest.mark.parametrize(("behind", "stale"), [(4, False), (5, True)])
def test_a_group_is_stale_when_its_oldest_token_is(behind: int, stale: bool) -> None:
    members = (Member("a", "pass", 1, 1), Member("b", "fail", 1, behind))
    result = curate(
        [FinishedGroup("g", members)],
        groups_per_batch=1,
        max_staleness=4,
    )
    assert [reason for _, reason in result.dropped] == (["stale"] if stale else [])


def test_groups_are_chosen_in_the_order_given() -> None:
    made = [finished_group(f"g{i}", ["pass", "fail"]) for i in range(3)]
    result = curate(made, groups_per_batch=2, max_staleness=10)
    assert [group.id for group in result.batch] == ["g0", "g1"]
    assert [group.id for group in result.waiting] == ["g2"]


def test_each_member_of_a_group_gets_one_decision() -> None:
    group = finished_group("g", ["pass", "invalid", "fail"])
    used = use_decisions(group, 7, {})
    assert [(d.subject, d.used, d.reason) for d in used] == [
        ("g", True, "mixed"),
        ("g-00", True, "mixed"),
        ("g-01", False, "invalid"),
        ("g-02", True, "mixed"),
    ]
    dropped = drop_decisions(group, "stale")
    assert [d.subject for d in dropped] == ["g", "g-00", "g-01", "g-02"]
    assert not any(d.used or d.weight for d in dropped)


def test_a_trajectory_of_which_nothing_is_trained_on_is_used_with_weight_zero() -> None:
    members = (
        Member("g-00", "pass", 2, 0, (2.0, 3.0)),
        Member("g-01", "fail", 2, 0, (0.1, 0.2)),
        Member("g-02", "fail", 0),
    )
    group = FinishedGroup("g", members)
    result = curate([group], groups_per_batch=1, max_staleness=10, high_entropy_share=0.5)
    assert [(each.trajectory_id, each.weight) for each in result.samples] == [
        ("g-00", 1.0),
        ("g-00", 1.0),
        ("g-01", 0.0),
        ("g-01", 0.0),
    ]
    used = use_decisions(group, 1, result.weights)
    assert [(d.subject, d.used, d.weight) for d in used] == [
        ("g", True, 1.0),
        ("g-00", True, 1.0),
        ("g-01", True, 0.0),
        ("g-02", True, 1.0),
    ]


def test_a_group_that_the_pool_made_fit_is_marked() -> None:
    group = finished_group("g", ["fail", "fail"])
    joined = FinishedGroup("g", group.members, Member("x1", "pass", 1))
    assert [(d.subject, d.used, d.reason) for d in use_decisions(joined, 1, {})] == [
        ("g", True, "pool"),
        ("g-00", True, "mixed"),
        ("g-01", True, "mixed"),
        ("x1", True, "pool"),
    ]
    assert [d.subject for d in drop_decisions(joined, "stale")] == ["g", "g-00", "g-01"]


@given(groups(), st.integers(1, 4), st.integers(0, 6))
def test_with_a_teacher_no_group_with_a_verdict_is_dropped_for_its_rewards(
    given_groups: list[FinishedGroup], per_batch: int, max_staleness: int
) -> None:
    result = curate(
        given_groups, groups_per_batch=per_batch, max_staleness=max_staleness, has_teacher=True
    )
    for group, reason in result.dropped:
        assert reason == "stale" if group.compared else reason == "no_valid_member"
    for group in result.batch:
        of_group = [sample for sample in result.samples if sample.group_id == group.id]
        equal = len({member.reward for member in group.compared}) == 1
        for sample in of_group:
            if sample.reason not in ("pool", "low_entropy"):
                assert sample.reason == ("teacher" if equal else "mixed")
            if equal:
                assert sample.advantage == 0.0


def test_a_group_that_only_a_teacher_made_fit_is_marked() -> None:
    group = finished_group("g", ["fail", "fail", "invalid"])
    assert [(d.subject, d.used, d.reason) for d in use_decisions(group, 1, {})] == [
        ("g", True, "teacher"),
        ("g-00", True, "teacher"),
        ("g-01", True, "teacher"),
        ("g-02", False, "invalid"),
    ]


def test_with_a_teacher_steps_of_low_entropy_are_left_out_as_ever() -> None:
    members = (Member("g-00", "fail", 2, 0, (2.0, 0.1)), Member("g-01", "fail", 2, 0, (0.2, 3.0)))
    result = curate(
        [FinishedGroup("g", members)],
        groups_per_batch=1,
        max_staleness=9,
        high_entropy_share=0.5,
        has_teacher=True,
    )
    assert [(each.reason, each.weight) for each in result.samples] == [
        ("teacher", 1.0),
        ("low_entropy", 0.0),
        ("low_entropy", 0.0),
        ("teacher", 1.0),
    ]


@given(groups(), shares)
def test_groups_of_one_batch_are_each_compared_within_themselves(
    given_groups: list[FinishedGroup], share: float
) -> None:
    fit = [g for g in given_groups if not no_gradient([(m.outcome, m.reward) for m in g.compared])]
    if not fit:
        return
    result = curate(
        fit,
        groups_per_batch=len(fit),
        max_staleness=10,
        high_entropy_share=share,
    )
    alone = [sample for group in fit for sample in plan_samples(group, "group_std", share)]
    assert list(result.samples) == alone

"""What is trained on and why: rules, sums, and advantages against numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Outcome
from dart_cli.data.curate import (
    FinishedGroup,
    Member,
    curate,
    drop_decisions,
    no_gradient,
    use_decisions,
)
from tests.data.parts import finished_group

ALL_OUTCOMES: list[Outcome] = ["pass", "fail", "invalid"]
outcomes = st.sampled_from(ALL_OUTCOMES)


@st.composite
def groups(draw: st.DrawFn) -> list[FinishedGroup]:
    """Any finished groups: of any size, outcome, length and age."""
    made = []
    for number in range(draw(st.integers(0, 12))):
        members = tuple(
            Member(
                f"g{number}-{index}",
                draw(outcomes),
                draw(st.integers(0, 4)),
                draw(st.none() | st.integers(0, 10)),
            )
            for index in range(draw(st.integers(0, 8)))
        )
        made.append(FinishedGroup(f"g{number}", members))
    return made


@given(groups(), st.integers(1, 4), st.integers(0, 12), st.integers(0, 6))
def test_every_group_is_chosen_waiting_or_dropped_with_a_reason(
    given_groups: list[FinishedGroup], per_batch: int, version: int, max_staleness: int
) -> None:
    result = curate(
        given_groups,
        groups_per_batch=per_batch,
        trainer_version=version,
        max_staleness=max_staleness,
    )
    out = [*result.chosen, *result.waiting, *(group for group, _ in result.dropped)]
    assert Counter(group.id for group in out) == Counter(group.id for group in given_groups)
    assert all(reason for _, reason in result.dropped)
    assert len(result.chosen) in (0, per_batch)
    assert result.chosen or len(result.waiting) < per_batch
    for group in result.chosen:
        assert {member.outcome for member in group.valid} == {"pass", "fail"}
        assert group.oldest_version is None or version - group.oldest_version <= max_staleness


@given(groups(), st.integers(1, 4))
def test_a_batch_is_every_step_of_every_valid_member_once(
    given_groups: list[FinishedGroup], per_batch: int
) -> None:
    result = curate(given_groups, groups_per_batch=per_batch, trainer_version=0, max_staleness=0)
    wanted = [
        (member.trajectory_id, step)
        for group in result.chosen
        for member in group.members
        if member.outcome != "invalid"
        for step in range(member.steps)
    ]
    assert [(sample.trajectory_id, sample.step) for sample in result.samples] == wanted


@given(st.lists(outcomes, min_size=2, max_size=16))
def test_advantages_are_those_of_numpy_over_trajectories(drawn: list[Outcome]) -> None:
    valid = [outcome for outcome in drawn if outcome != "invalid"]
    group = finished_group("g", drawn)
    result = curate([group], groups_per_batch=1, trainer_version=0, max_staleness=0)
    if no_gradient(drawn):
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
    assert no_gradient(drawn) == reason


@pytest.mark.parametrize(("version", "stale"), [(4, False), (5, True)])
def test_a_group_is_stale_when_its_oldest_token_is(version: int, stale: bool) -> None:
    members = (Member("a", "pass", 1, 3), Member("b", "fail", 1, 0))
    result = curate(
        [FinishedGroup("g", members)],
        groups_per_batch=1,
        trainer_version=version,
        max_staleness=4,
    )
    assert [reason for _, reason in result.dropped] == (["stale"] if stale else [])


def test_groups_are_chosen_in_the_order_given() -> None:
    made = [finished_group(f"g{i}", ["pass", "fail"]) for i in range(3)]
    result = curate(made, groups_per_batch=2, trainer_version=0, max_staleness=0)
    assert [group.id for group in result.chosen] == ["g0", "g1"]
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

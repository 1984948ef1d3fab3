"""The diagnosis: stalls are reported with their cause, waits for a turn are not."""

from __future__ import annotations

import re

import pytest

from bus.snapshot import (
    GroupsView,
    OwnView,
    ProcessView,
    QueuesView,
    StallView,
    TaskView,
)
from dart_cli.data.stalls import (
    FAILED_TRAJECTORIES,
    FAILED_UPDATES,
    LONG,
    MODEL_S,
    TELLING_DROPS,
    diagnose,
)
from tests.snapshots import process, snapshot, wait

STALL_S = 20.0
GROUPS = GroupsView(open=3, ready=2, batched=1, trained=9, limit=24)


def found(*processes: ProcessView, **changes: object) -> list[StallView]:
    """Findings for a run of these processes that makes progress all the time."""
    calm = {"stall_s": STALL_S, "quiet_s": 1.0, "tasks": [], "syncs": [], "groups": GROUPS}
    return diagnose(snapshot(**{"processes": list(processes)} | calm | changes))


RESET = process("env-2", ("env-2/0 to reset X (at most 120 s)", "environment", 94.0))
BATCH = process("train", ("a batch: 0 of 2 groups", "batch", 90.0))


def test_an_environment_that_may_take_long_is_reported_late_unless_all_wait_for_it() -> None:
    slow = wait("a reset", "environment", 94.0, count=1, deadline_s=300.0)
    env = process("env-2").model_copy(update={"waits": [slow]})
    assert found(env) == []
    assert [stall.kind for stall in found(env, quiet_s=90.0)] == ["waits"]
    late = slow.model_copy(update={"longest_s": 101.0})
    assert [stall.kind for stall in found(env.model_copy(update={"waits": [late]}))] == [
        "environment"
    ]


@pytest.mark.parametrize(
    ("liveness", "kind", "cure"),
    [
        ("gone", "gone", "start it again, logs/env-0.log shows why"),
        ("stopped", "stopped", "kill -CONT 42"),
        ("blocked", "silent", "see dmesg"),
        ("running", "silent", "dart status --stacks"),
        ("", "silent", "see that its host is up"),
    ],
)
def test_a_silent_process_is_reported_with_what_its_host_knows(
    liveness: str, kind: str, cure: str
) -> None:
    dead = process("env-0", alive=False, heartbeat_age_s=12.0, liveness=liveness)
    [stall] = found(dead)
    assert (stall.kind, stall.who, stall.since_s) == (kind, "env-0", 12.0)
    assert stall.text.startswith("env-0 (pid 42 on box) ")
    assert cure in stall.text


def test_a_process_that_said_that_it_ends_is_not_missed() -> None:
    ended = process("rollout-0", alive=False, state="stopping", liveness="gone")
    assert found(ended) == []


@pytest.mark.parametrize(
    ("others", "leases", "is_told"),
    [
        (["serve-0"], 0, True),
        (["serve-0"], 2, False),
        (["serve-0", "env-0"], 0, False),
        ([], 0, False),
    ],
)
def test_a_run_that_no_agent_plays_names_the_address_to_open_a_session_at(
    others: list[str], leases: int, is_told: bool
) -> None:
    players = [process(name, endpoint="http://127.0.0.1:8480/v1") for name in others]
    queues = QueuesView(leases=leases)
    [stall] = found(BATCH, *players, quiet_s=88.0, queues=queues)
    cure = "; an agent must open a session at http://127.0.0.1:8480/v1"
    assert (cure in stall.text) is is_told


def test_a_waiting_trainer_is_reported_with_what_delays_its_batch() -> None:
    [cause, effect] = found(
        RESET, BATCH, quiet_s=88.0, next_batch="0 of 2 groups are ready; 3 of 8 trajectories of X"
    )
    assert (cause.kind, cause.who, cause.since_s) == ("environment", "env-2", 94.0)
    assert effect.text == (
        "train has waited 90 s for a batch: 0 of 2 groups are ready; 3 of 8 trajectories of X; "
        "env-2 has waited 94 s for env-2/0 to reset X (at most 120 s)"
    )


def test_a_slow_batch_is_no_stall_while_steps_come_in() -> None:
    assert found(BATCH) == []


def test_a_batch_that_never_fills_is_reported_though_steps_come_in() -> None:
    [stall] = found(process("train", ("a batch: all were solved", "batch", LONG * STALL_S)))
    assert "too easy or too hard" in stall.text
    usual = {"waiting_s": LONG * STALL_S}
    assert found(process("train", ("a batch", "batch", LONG * STALL_S)), metrics=usual) == []


def test_a_wait_for_a_lease_or_a_batch_is_not_reported_while_the_trainer_computes() -> None:
    train = process("train", ("the update on batch 7", "update", 300.0))
    env = process("env-0", ("a lease from data: 24 groups are open", "lease", 300.0))
    assert found(train, env, quiet_s=300.0) == []


def test_an_update_that_takes_far_longer_than_the_last_is_reported() -> None:
    train = process("train", ("the update on batch 7", "update", LONG * STALL_S + 1))
    [stall] = found(train, metrics={"step_s": 4.0})
    assert (stall.kind, stall.who) == ("update", "train")
    assert found(train, metrics={"step_s": 400.0}) == []


def test_an_engine_without_tokens_is_reported_and_a_slow_one_is_not() -> None:
    env = process("env-0", ("a completion from rollout-0", "rollout-0", 25.0))
    slow, stuck = (process("rollout-0", still_s=still) for still in (2.0, 25.0))
    assert found(env, slow) == []
    [stall] = found(env, stuck)
    assert (stall.kind, stall.who) == ("engine", "env-0")
    assert "4 completions of rollout-0, which has brought no token for 25 s" in stall.text


def test_a_permit_held_for_long_is_reported_only_while_another_worker_waits_for_it() -> None:
    holder = process("rollout-0")
    waiter = process("rollout-1", ("its turn to take weights v5", "permit", 25.0))
    [stall] = found(holder, waiter, permits={"rollout-0": 30.0})
    assert re.match("rollout-1 waits for rollout-0, which has held the permit.* 30 s", stall.text)
    assert found(holder, permits={"rollout-0": 30.0}) == []
    assert found(holder, waiter, permits={"rollout-0": 3.0}) == []


def test_nothing_waits_long_without_a_word_in_a_run_where_nothing_happens() -> None:
    env = process("env-0", ("something new", "", 25.0))
    assert found(env) == []
    [stall] = found(env, quiet_s=25.0)
    assert stall.text == "env-0 has waited 25 s for something new"


def test_a_model_may_load_for_long_and_the_others_wait_for_it() -> None:
    env = process("env-0", ("a rollout worker", "rollout", 120.0))
    assert (
        found(process("rollout-0", ("the model to load", "model", 120.0)), env, quiet_s=120.0) == []
    )
    late = found(
        process("rollout-0", ("the model to load", "model", MODEL_S)), env, quiet_s=MODEL_S
    )
    assert [stall.who for stall in late] == ["rollout-0", "env-0"]


def test_a_run_that_is_over_has_no_stalls() -> None:
    assert found(RESET, BATCH, quiet_s=88.0, stopping=True) == []


def groups(ready: int = 0, **dropped: int) -> GroupsView:
    """Groups that ended since the last batch, by what became of them."""
    return GroupsView(
        open=3, ready=ready, batched=0, trained=0, limit=24, dropped_since_batch=dropped
    )


@pytest.mark.parametrize(
    ("reason", "cure"), [("all_fail", "data.pool_ratio"), ("all_success", "add harder ones")]
)
def test_a_run_whose_groups_have_no_gradient_needs_attention(reason: str, cure: str) -> None:
    [stall] = found(groups=groups(ready=2, **{reason: TELLING_DROPS}))
    assert stall.kind == "tasks"
    assert f"{TELLING_DROPS} of the {TELLING_DROPS + 2} groups" in stall.text
    assert reason in stall.text
    assert cure in stall.text


def broken_task(name: str, invalid: int, share: float) -> TaskView:
    """A task of which so many episodes were invalid, and which share of the recent ones."""
    return TaskView(
        suite="mini",
        task_id=f"mini/{name}",
        trajectories=20,
        passed=10,
        invalid=invalid,
        success=0.5,
        weight=0.5,
        invalid_share=share,
        invalid_after_action=invalid - 1,
    )


def test_a_task_whose_episodes_are_often_invalid_needs_attention() -> None:
    tasks = [broken_task("popup", 9, 0.31), broken_task("menu", 7, 0.25)]
    [stall] = found(tasks=tasks)
    assert (stall.kind, stall.who) == ("invalid", "env")
    assert "31% of the recent episodes of mini/popup are invalid (9 in all, 8 of them" in stall.text
    assert "1 other" in stall.text
    assert "ActionCausedError" in stall.text
    assert found(tasks=[broken_task("popup", 4, 0.9), broken_task("menu", 90, 0.05)]) == []


def outcomes(*passed: int, of: int = TELLING_DROPS) -> list[TaskView]:
    """Tasks of which so many trajectories passed."""
    return [
        TaskView(
            suite="mini", task_id=f"mini/{number}", trajectories=of, passed=count, invalid=0,
            success=count / of, weight=0.5,
        )
        for number, count in enumerate(passed)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("passed", "reason", "cure"),
    [(0, "all_fail", "data.pool_ratio"), (TELLING_DROPS, "all_success", "add harder ones")],
)
def test_a_run_without_groups_whose_outcomes_are_all_the_same_needs_attention(
    passed: int, reason: str, cure: str
) -> None:
    by_baseline = groups().model_copy(update={"by_baseline": True})
    [stall] = found(groups=by_baseline, tasks=outcomes(passed, passed))
    assert (stall.kind, stall.who) == ("tasks", "train")
    assert reason in stall.text
    assert cure in stall.text
    assert found(groups=by_baseline, tasks=outcomes(passed, 16)) == []
    assert found(groups=by_baseline, tasks=outcomes(0, 0, of=TELLING_DROPS // 2 - 1)) == []
    assert found(groups=groups(), tasks=outcomes(passed, passed)) == []  # its groups are dropped
    assert found(groups=by_baseline) == []


def failing(**changes: object) -> OwnView:
    """Play without a success, just long enough to be reported."""
    return OwnView.model_validate(
        {"failed_since": FAILED_TRAJECTORIES, "updates_since": FAILED_UPDATES} | changes
    )


@pytest.mark.parametrize("passed", [0, 40])
def test_updates_without_a_success_of_the_policys_own_need_attention(passed: int) -> None:
    [stall] = found(own=failing(passed=passed))
    assert (stall.kind, stall.who) == ("success", "train")
    assert f"none of the last {FAILED_TRAJECTORIES} trajectories" in stall.text
    assert f"over {FAILED_UPDATES} updates" in stall.text
    for cure in ("dart data collect", "dart tune", "easier tasks", "train.lr"):
        assert cure in stall.text


def test_a_success_of_any_task_or_too_little_play_is_no_stall() -> None:
    assert found(own=failing(failed_since=FAILED_TRAJECTORIES - 1)) == []
    assert found(own=failing(updates_since=FAILED_UPDATES - 1)) == []
    assert found(own=failing(passed=1, failed_since=3, updates_since=0)) == []


def test_rewards_that_rise_without_a_pass_are_no_stall() -> None:
    assert found(own=failing(reward_first=0.2, reward=0.5)) == []
    assert [each.kind for each in found(own=failing(reward_first=0.2, reward=0.2))] == ["success"]


def test_a_model_that_does_not_see_is_reported() -> None:
    [stall] = found(metrics={"sees": 0.0})
    assert stall.kind == "sight"
    assert "preprocessor_config.json" in stall.text
    assert found(metrics={"sees": 1.0}) == []


def test_a_run_that_never_passes_is_reported_once() -> None:
    kinds = [each.kind for each in found(own=failing(), groups=groups(all_fail=TELLING_DROPS))]
    assert kinds == ["tasks"]


def texts(first: float, newest: float, windows: int = 4) -> OwnView:
    """Play of whose first and newest completions these shares were no action."""
    return OwnView(
        passed=9,
        completions=1000 * windows,
        window=1000,
        malformed_first=first,
        malformed=newest,
    )


@pytest.mark.parametrize(("first", "newest"), [(0.0, 0.25), (0.03, 0.61), (0.4, 0.55)])
def test_actions_that_are_ever_more_malformed_need_attention(first: float, newest: float) -> None:
    [stall] = found(own=texts(first, newest, windows=2))
    assert (stall.kind, stall.who) == ("actions", "rollout")
    assert f"{newest:.0%} of the policy's last 1000 completions are no action" in stall.text
    assert f"{first:.0%} of its first 1000" in stall.text
    assert "dart tune" in stall.text


def test_completions_that_are_mostly_no_action_from_the_start_need_attention() -> None:
    [stall] = found(own=texts(0.97, 0.95))
    assert "rollout.max_tokens" in stall.text
    assert found(own=texts(0.97, 0.95, windows=3)) == []  # it may still learn them


@pytest.mark.parametrize(
    ("first", "newest"), [(0.0, 0.0), (0.02, 0.15), (0.92, 0.52), (0.4, 0.45), (0.3, 0.1)]
)
def test_a_share_of_malformed_actions_that_is_small_or_falls_is_no_stall(
    first: float, newest: float
) -> None:
    assert found(own=texts(first, newest)) == []
    assert found(own=texts(0.0, 1.0, windows=1)) == []  # the two windows are one


def test_some_groups_without_a_gradient_are_no_stall() -> None:
    assert found(groups=groups(all_fail=TELLING_DROPS - 1)) == []
    assert found(groups=groups(all_success=TELLING_DROPS, ready=8)) == []
    assert found(groups=groups(all_success=TELLING_DROPS, all_fail=TELLING_DROPS)) == []
    assert found(groups=groups(stale=5 * TELLING_DROPS)) == []

"""Where the time of the run's processes goes, over deaths and restarts of any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.messages import Heartbeat
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.workers import Usage


def beat(
    worker: str = "env-0",
    *,
    started_at: float = 100.0,
    slots: float = 2.0,
    state: str = "ready",
    **phases: float,
) -> Heartbeat:
    """A heartbeat that says where its process's time went so far."""
    role = worker.partition("-")[0]
    gauges = {"slots": slots} | {f"seconds.{phase}": value for phase, value in phases.items()}
    return Heartbeat.model_validate(
        {
            "role": role,
            "worker": worker,
            "host": "here",
            "pid": 1,
            "started_at": started_at,
            "sent_at": 0.0,
            "endpoint": "",
            "policy_version": -1,
            "state": state,
            "waiting_for": "",
            "waiting_s": 0.0,
            "gauges": gauges,
            "trajectories": [],
        }
    )


def total(usage: Usage, role: str = "env", now: float = 0.0) -> dict[str, float]:
    return usage.by_role(now)[role].total


def test_seconds_of_several_processes_of_a_role_add_up() -> None:
    usage = Usage()
    usage.observe(beat("env-0", playing=3.0, idle=1.0), 10.0)
    usage.observe(beat("env-1", playing=2.0), 10.0)
    usage.observe(beat("rollout-0", busy=1.0), 10.0)
    assert total(usage) == {"playing": 5.0, "idle": 1.0}
    assert total(usage, "rollout") == {"busy": 1.0}


def test_a_heartbeat_is_cumulative_and_counts_what_is_new() -> None:
    usage = Usage()
    for second in range(1, 11):
        usage.observe(beat(playing=2.0 * second), float(second))
    view = usage.by_role(10.0)["env"]
    assert view.total == {"playing": 20.0}
    assert view.minute == {"playing": 20.0}


def test_the_last_minute_forgets_what_is_older() -> None:
    usage = Usage()
    for second in range(1, 201):
        playing = 2.0 * min(second, 100)
        usage.observe(beat(playing=playing, idle=2.0 * second - playing), float(second))
    assert usage.by_role(200.0)["env"].minute == {"playing": 0.0, "idle": pytest.approx(122.0)}
    assert usage.by_role(400.0)["env"].minute == {}


def test_a_process_heard_for_the_first_time_fills_at_most_a_minute_of_its_slots() -> None:
    usage = Usage()
    usage.observe(beat(playing=9000.0, idle=3000.0), 1.0)
    view = usage.by_role(1.0)["env"]
    assert view.minute == {"playing": pytest.approx(90.0), "idle": pytest.approx(30.0)}
    assert view.total == {"playing": 9000.0, "idle": 3000.0}


def test_a_restarted_process_adds_to_what_its_predecessor_did() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.observe(beat(started_at=128.0, playing=1.0, idle=1.0), 29.0)
    seconds = total(usage)
    assert (seconds["playing"], seconds["idle"]) == (51.0, 1.0)


def test_slots_are_dead_from_the_last_heartbeat_of_a_process_until_its_successors_first() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.observe(beat(started_at=128.0, playing=2.0), 29.0)  # 2 slots, 4 s, 2 s of them told
    assert total(usage)["dead"] == pytest.approx(6.0)
    assert sum(total(usage).values()) == pytest.approx(2 * 29.0)


def test_a_silent_process_is_dead_as_long_as_it_is_silent_and_counted_once() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    for second in range(26, 60):
        usage.tend(float(second))
    assert total(usage)["dead"] == pytest.approx(2 * 34.0)
    usage.observe(beat(started_at=160.0, playing=2.0), 61.0)
    assert total(usage)["dead"] == pytest.approx(2 * 36.0 - 2.0)
    assert sum(total(usage).values()) == pytest.approx(2 * 61.0)


def test_a_short_silence_is_no_death() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.tend(34.0)
    assert total(usage) == {"playing": 50.0}


def test_a_process_that_was_only_silent_accounts_for_its_time_itself() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.tend(45.0)
    usage.observe(beat(playing=50.0, waiting=42.0), 46.0)
    view = usage.by_role(46.0)["env"]
    assert view.total == {"playing": 50.0, "waiting": 42.0, "dead": 0.0}
    assert view.minute["dead"] == 0.0


def test_a_process_that_announced_its_stop_is_not_dead() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0, state="stopping"), 25.0)
    usage.tend(100.0)
    usage.observe(beat(started_at=300.0, playing=1.0), 200.0)
    assert total(usage) == {"playing": 51.0}


def test_silence_that_was_the_listeners_own_counts_against_no_worker() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.discount_pause(100.0)
    usage.tend(130.0)
    assert total(usage) == {"playing": 50.0}


def test_a_late_heartbeat_of_the_predecessor_counts_nothing() -> None:
    usage = Usage()
    usage.observe(beat(playing=50.0), 25.0)
    usage.observe(beat(started_at=128.0, playing=8.0), 29.0)
    before = total(usage)
    usage.observe(beat(playing=50.5), 29.1)
    assert total(usage) == before


def test_totals_go_on_where_an_earlier_data_process_saved_them(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        usage = Usage(store.usage())
        usage.observe(beat(playing=10.0), 5.0)
        usage.observe(beat(started_at=110.0, playing=4.0), 8.0)
        store.save_usage(usage.changed())
    with open_store(tmp_path) as store:
        usage = Usage(store.usage())
        usage.observe(beat(started_at=110.0, playing=7.0), 1.0)  # the same process, later
        usage.observe(beat(started_at=120.0, playing=1.0), 2.0)  # a new one
        store.save_usage(usage.changed())
        assert total(usage)["playing"] == 18.0
    with open_reader(tmp_path) as reader:
        saved = {row.phase: row.total_s for row in reader.usage()}
    assert saved == total(usage)


def test_only_what_changed_is_saved_and_the_rows_are_as_many_as_workers_and_phases() -> None:
    usage = Usage()
    usage.observe(beat("env-0", playing=1.0, idle=1.0), 1.0)
    usage.observe(beat("env-1", playing=1.0), 1.0)
    assert len(usage.changed()) == 3
    assert usage.changed() == []
    for start in range(200, 300):
        usage.observe(beat("env-1", started_at=float(start), playing=1.0), float(start))
    assert {(row.worker, row.phase) for row in usage.changed()} == {
        ("env-1", "playing"),
        ("env-1", "dead"),
    }

"""`dart data why` explains what happened to a trajectory, with the numbers that decided."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dart_cli.data.scheduler import task_seed
from dart_cli.data.store.open import open_store
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.run_dir import claim
from tests.data.parts import (
    ask_lease,
    make_ledger,
    next_batch,
    play,
    play_group,
    pool_member,
    small_config,
)
from tests.data.test_baselines import stream_config
from tests.inspection.parts import REPORTED, PlayedRun, events_of, events_text, run


def test_the_events_of_one_that_is_trained_on(run_content: PlayedRun, reader: Reader) -> None:
    text = events_text(reader, f"{run_content.mixed}-00")
    assert "leased to env-0, slot 0" in text
    assert "step 2: Action: click(start_box='(1,2)') -> click 1,2 (v0, rollout-0" in text
    assert "pass after 3 steps: because (stopped: done)" in text
    assert f"its group {run_content.mixed} is over: 2 pass, 2 fail; ready for a batch" in text
    assert "part of batch 1: formed when the trainer was at v0" in text
    assert "batch 1 is trained: weights v9" in text


def test_each_step_is_used_or_left_out_with_its_numbers(
    run_content: PlayedRun, reader: Reader
) -> None:
    rows = [row for row in reader.batch_rows(1) if row.reason != "pool"]
    assert {row.reason for row in rows} == {"mixed", "low_entropy"}
    for row in rows:
        events = events_of(reader, row.trajectory_id)
        [text] = [e.text for e in events if e.text.startswith(f"step {row.step} is ")]
        assert f"{row.entropy:.4f} nats" in text
        if row.weight:
            assert f"advantage {row.advantage:+.3f}, weight 1" in text
            assert "sampled by weights v0, 0 versions behind" in text
        else:
            group = row.trajectory_id.rpartition("-")[0]
            kept = [r.entropy for r in rows if r.weight and r.trajectory_id.startswith(group)]
            assert (
                f"the lowest entropy that is trained on in its group is {min(kept):.4f} nats"
                in text
            )


def test_a_pool_member_and_the_group_it_joined_name_each_other(
    run_content: PlayedRun, reader: Reader
) -> None:
    member = reader.groups_by_id([run_content.helped])[run_content.helped].pool_member
    assert member is not None
    of_group = events_text(reader, f"{run_content.helped}-00")
    assert f"{member} of the pool joined the group" in of_group
    assert "it played another instance, seed 7" in of_group
    text = events_text(reader, member)
    assert "source oracle" in text
    assert "log-probabilities unknown" in text
    assert (
        f"part of batch 1 with the all-fail group {run_content.helped} (another instance, seed 7)"
        in text
    )
    assert "step 0 is trained on (pool)" in text


def test_a_success_of_the_same_instance_says_so_and_what_the_baselines_expected(
    tmp_path: Path,
) -> None:
    config = stream_config(tmp_path, groups_per_batch=1, pool_ratio=0.5)
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"tasks": config.env.tasks[:1]})}
    )
    row, steps, images = pool_member("xa", task_id=config.env.tasks[0])
    first = task_seed(config.run.seed, 1)
    with open_store(tmp_path) as store:
        store.add_pool_member(replace(row, task_seed=first), steps, images)
        ledger = make_ledger(config, store)
        lease = play(ledger, 0, "fail")
        next_batch(ledger, 0)
        text = events_text(store, lease.trajectory_id)
        assert f"it played the same instance, seed {first}" in text
        assert "step 0 is trained on (baseline): advantage -0.500 (expected reward 0.500" in text
        assert f"({lease.group_id} (the same instance" not in events_text(store, "xa")
        assert f"group {lease.group_id} (the same instance" in events_text(store, "xa")


def test_what_is_dropped_names_the_rule_and_the_numbers(
    run_content: PlayedRun, reader: Reader
) -> None:
    assert "all 4 valid members passed" in events_text(reader, f"{run_content.solved}-01")
    assert "dropped (invalid): its environment or evaluator broke" in events_text(
        reader, run_content.invalid
    )
    assert "no step and no heartbeat for 60 s" in events_text(reader, run_content.expired)
    text = events_text(reader, run_content.stale)
    assert (
        "oldest token was sampled by v1 (update 1), the trainer was at v9 (update 9): "
        "8 versions behind, "
        "data.max_staleness = 4" in text
    )
    assert events_text(reader, run_content.playing).endswith("it is leased now")


@pytest.mark.parametrize(
    ("pool_ratio", "why"),
    [
        (0.0, "data.pool_ratio = 0, so no success of the pool joins"),
        (0.1, "one success among 5 would be a larger share than data.pool_ratio = 0.1"),
        (0.25, "the pool had no success of mini/click"),
    ],
)
def test_an_all_fail_group_explains_why_the_pool_did_not_help(
    pool_ratio: float, why: str, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "run", pool_ratio=pool_ratio)
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"tasks": ["mini/click"]})}
    )
    with open_store(config.run.dir) as store:
        group = play_group(make_ledger(config, store), ["fail"] * 4)
        assert f"all 4 valid members failed: equal rewards teach nothing; {why}" in events_text(
            store, f"{group}-00"
        )


def test_the_last_event_is_the_outcome(run_content: PlayedRun, reader: Reader) -> None:
    ends = {
        "trained": "is trained: weights",
        "dropped": ("dropped", "equal rewards", "versions behind"),
        "finished": "waits for",
        "leased": "it is leased now",
    }
    for row in reader.trajectories():
        assert any(
            word in events_text(reader, row.id)
            for word in ([ends[row.state]] if isinstance(ends[row.state], str) else ends[row.state])
        ), row


def test_why_prints_moments_or_json(
    run_content: PlayedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{run_content.mixed}-00"
    assert run("why", name, "--run", run_content.config.run.dir) == 0
    assert "1970-01-01" in capsys.readouterr().out
    assert run("why", name, "--run", run_content.config.run.dir, "--json") == 0
    text = json.loads(capsys.readouterr().out)
    assert text["id"] == name
    assert text["worker"] == "env-0"
    assert text["story"][0]["text"].startswith("leased to env-0")


def test_what_a_run_that_ended_left_behind_waits_for_nothing(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        ready = play_group(ledger, ["pass", "fail", "fail", "pass"])
        begun, playing = play(ledger, 0, "pass"), ask_lease(ledger, 1).trajectory_id
        names = (f"{ready}-00", begun.trajectory_id, playing)
        with claim(config, "data"):
            ends = [events_text(store, name).splitlines()[-1] for name in names]
        assert ["waits for a batch" in ends[0], "waits for its group" in ends[1]] == [True, True]
        assert ends[2] == "it is leased now"
        lock = config.run.dir / "workers" / "data.lock"
        ended = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"],
            check=True,
            capture_output=True,
            text=True,
        )
        lock.write_text(ended.stdout)
        ends = [events_text(store, name).splitlines()[-1] for name in names]
        assert "ended before a batch took it" in ends[0]
        assert "ended before its group" in ends[1]
        assert "ended while it was leased" in ends[2]


def test_what_the_application_reported_comes_after_the_verdict(
    run_content: PlayedRun, reader: Reader
) -> None:
    texts = [event.text for event in events_of(reader, run_content.stale)]
    verdict = next(at for at, text in enumerate(texts) if text.startswith("fail after 1 steps"))
    assert texts[verdict + 1 : verdict + 3] == [
        f"the application reported: {REPORTED}",
        "the application reported: step 0: GET /a: 404",
    ]
    assert "reported" not in events_text(reader, f"{run_content.mixed}-00")

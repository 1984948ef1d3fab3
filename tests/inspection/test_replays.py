"""What is told of batches that were trained on again, and of those that were not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.messages import BatchTrained
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.reader import Reader
from tests.data.parts import (
    MIXED,
    a_batch,
    batch_trained,
    make_ledger,
    next_batch,
    play_group,
    small_config,
)
from tests.inspection.parts import events_text, run


@pytest.fixture
def reused(tmp_path: Path) -> Iterator[Reader]:
    """Two batches, the first of which was trained on again; the trainer skipped the second."""
    config = small_config(tmp_path / "run", train={"reuse": 1}, groups_per_batch=1)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        for number in (1, 2, 3):
            if number < 3:
                play_group(ledger, MIXED, version=number - 1)
            assert a_batch(next_batch(ledger, number - 1)).reuse == (number == 3)
            ledger.batch_trained(batch_trained(number, is_skipped=number == 2))
        store.commit()
        with open_reader(config.run.dir) as reader:
            yield reader


def test_a_trajectory_says_when_it_was_trained_on_again_and_why_not(reused: Reader) -> None:
    first, second = (reused.batch_groups(number)[0] for number in (1, 2))
    text = events_text(reused, f"{first}-00")
    assert "batch 1 is replayed (use 2) as batch 3, which is trained: weights v3" in text
    assert "not trained on again" not in text
    text = events_text(reused, f"{second}-00")
    assert (
        "batch 2 is not trained on again (low_ess): the trainer skipped it: its effective sample size "
        "was too low" in text
    )


def test_a_replay_that_was_skipped_is_none_that_was_trained_on(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", train={"reuse": 1}, groups_per_batch=1)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        group = play_group(ledger, MIXED)
        for number in (1, 2, 3):
            if isinstance(next_batch(ledger, number - 1), NotYet):
                play_group(ledger, MIXED, version=number - 1)
            next_batch(ledger, number - 1)
            metrics = {f"replay_{name}": float(number == 3) for name in ("skipped", "low_ess")}
            ledger.batch_trained(
                BatchTrained(batch_id=number, policy_version=number, metrics=metrics)
            )
        store.commit()
        with open_reader(config.run.dir) as reader:
            text = events_text(reader, f"{group}-00")
            assert "batch 1 is replayed (use 2) as batch 3, which the trainer skipped" in text
            assert "batch 1 is not trained on again (low_ess)" in text
            counts = reader.replay_counts()
            assert (counts.updates, counts.replays, counts.refused) == (3, 0, {"low_ess": 1})


def test_a_trajectory_shows_the_batches_that_trained_on_it_again(
    reused: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{reused.batch_groups(1)[0]}-00"
    assert run("show", name, "--run", reused.path.parent) == 0
    assert "batch 1 is replayed (use 2) as batch 3" in " ".join(capsys.readouterr().out.split())
    assert run("show", name, "--run", reused.path.parent, "--json") == 0
    assert json.loads(capsys.readouterr().out)["again_in"] == [3]


def test_stats_count_the_updates_on_a_batch_again(
    reused: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = reused.path.parent
    assert run("stats", run_dir, "--json") == 0
    counted = json.loads(capsys.readouterr().out)["replays"]
    assert counted == {"updates": 3, "replays": 1, "refused": {"low_ess": 1}}
    assert run("stats", run_dir) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 updates trained on a batch again; 1 batch not again: 1 low_ess" in text

"""What a training says that it learned: on rows that it has not seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dart_cli.collect import CollectOptions
from dart_cli.collect.collector import run_collect
from dart_cli.config.model_folder import TUNED
from dart_cli.config.schema import Config
from dart_cli.tune import pace
from dart_cli.tune.held_out import MOST_ROWS, Measurement, Outcome, first_and_last_loss, split_rows
from dart_cli.tune.training_state import BEFORE
from scripts.make_grounding_set import make_set
from tests.tune.stopping import run_and_stop

Keys = dict[str, Any]
Tune = Callable[..., Any]


# --- which rows -----------------------------------------------------------------------------


def names(groups: int, rows: int = 3) -> list[str]:
    return [f"episode {group}" for group in range(groups) for _ in range(rows)]


def test_whole_episodes_are_held_out_the_same_ones_for_the_same_seed() -> None:
    group_names = names(48)
    split = split_rows(group_names, 0.125, seed=0)
    assert split.heldout_groups == 6
    assert len(split.heldout_rows) == 18
    held, learned = (
        {group_names[row] for row in rows} for rows in (split.heldout_rows, split.learned_rows)
    )
    assert not held & learned
    assert sorted(split.heldout_rows + split.learned_rows) == list(range(len(group_names)))
    assert split_rows(group_names, 0.125, seed=0) == split
    assert split_rows(group_names, 0.125, seed=1) != split


@pytest.mark.parametrize(("groups", "share"), [(23, 0.125), (1, 0.5), (48, 0.0)])
def test_of_few_episodes_all_are_learned(groups: int, share: float) -> None:
    split = split_rows(names(groups), share, seed=0)
    assert (split.heldout_rows, split.learned_rows) == ([], list(range(3 * groups)))


def test_of_a_large_set_only_as_many_are_held_out_as_tell_something() -> None:
    assert 200 < len(split_rows(names(10_000), 0.125, seed=0).heldout_rows) <= MOST_ROWS


# --- what is said ---------------------------------------------------------------------------


def outcome(before: tuple[float, int], after: tuple[float, int], fell: float = 0.5) -> Outcome:
    measured = [Measurement(loss=loss, right=right) for loss, right in (before, after)]
    return Outcome(20, 4, False, *measured, first_loss=1.0, last_loss=1 - fell)


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (outcome((5.15, 0), (5.12, 0), 0.01), "tune.lr = 5e-05"),
        (
            outcome((1.0, 2), (1.4, 2), 0.9),
            "only on the learned rows, which were learned by heart: ",
        ),
        (outcome((1.0, 2), (1.4, 2), 0.4), "the loss fell only on the learned rows: collect more"),
        (outcome((1.0, 2), (1.0, 3), 0.0), "did not fall"),
        (outcome((0.01, 20), (0.01, 20), 0.0), "could do this before"),
    ],
)
def test_a_training_that_taught_nothing_says_so_with_a_cure(given: Outcome, cure: str) -> None:
    assert not given.learned
    assert given.summary()["learned"] is False
    line = given.lines(5e-6, 12)[-1]
    assert line.startswith("NOTHING WAS LEARNED")
    assert cure in line


@pytest.mark.parametrize(
    "given",
    [outcome((2.7, 0), (0.1, 20)), outcome((1.0, 2), (1.1, 15)), outcome((2.0, 5), (1.8, 5))],
)
def test_a_lower_loss_or_more_right_answers_are_learning(given: Outcome) -> None:
    assert given.learned
    assert len(given.lines(1e-3, 200)) == 1


def test_without_held_out_rows_the_learned_ones_tell_and_the_stage_that_fell_most() -> None:
    curve = [{"stage": 0, "loss": 3.0}, {"stage": 0, "loss": 1.0}, {"stage": 1, "loss": 5.0}]
    given = Outcome(0, 0, False, None, None, *first_and_last_loss(curve))
    assert (given.first_loss, given.last_loss, given.learned) == (3.0, 1.0, True)
    assert given.summary() == {"learned": True, "held_out": None}
    assert "none were held out" in given.lines(1e-3, 10)[0]


# --- trainings ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def successes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve solutions of each of two tasks."""
    home = tmp_path_factory.mktemp("many")
    given = {"env": {"tasks": ["mini/page", "mini/popup"]}, "run": {"dir": home / "run"}}
    run_collect(Config.model_validate(given), CollectOptions(per_task=12, out=home / "files"))
    return home / "files"


@pytest.fixture
def keys(successes: Path, tmp_path: Path) -> Keys:
    return {
        "tune.data": [str(successes)],
        "tune.out": tmp_path / "out",
        "tune.epochs": 4.0,
        "tune.batch": 4,
    }


def test_recorded_successes_tell_loss_and_answers_before_and_after(
    tune: Tune, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tune(keys | {"tune.epochs": 12.0}, as_json=True) is not None
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    held = told["held_out"]
    assert (held["groups"], held["measure"], told["learned"]) == (3, "answers", True)
    assert held["loss_after"] < 0.9 * held["loss_before"]
    assert "chosen: tune.lr = 0.001 (0.63 million parameters)" in err
    record = json.loads((keys["tune.out"] / TUNED).read_text())
    assert record["held_out"] == held
    assert len(record["settings"]["held_out"]) == held["rows"]


def test_a_training_that_was_stopped_measures_the_same_rows_and_the_first_model_once(
    tune: Tune, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tune(keys | {"tune.out": tmp_path / "whole"})
    run_and_stop(tune, keys, 3, monkeypatch)
    before = Measurement.model_validate_json((tmp_path / "out.part" / BEFORE).read_bytes())
    result = tune(keys)
    assert result.outcome == whole.outcome
    assert result.outcome.before == before
    tensors = "model.safetensors"
    assert (keys["tune.out"] / tensors).read_bytes() == (tmp_path / "whole" / tensors).read_bytes()


def test_a_rate_that_teaches_nothing_is_told_at_the_end(
    tune: Tune, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four epochs: the first and the last quarter are each one epoch, of the same rows, so chance moves no loss by 5%.
    result = tune(keys | {"tune.lr": 1e-7})
    assert not result.outcome.learned
    out = " ".join(capsys.readouterr().out.split())
    assert "NOTHING WAS LEARNED" in out
    assert "try tune.lr = 1e-06" in out


@pytest.mark.parametrize("pointing", ["text", "pointer"])
def test_items_of_places_tell_hits(
    tune: Tune,
    pointing: str,
    pointer_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    make_set(tmp_path / "set", ["mini"], {"train": 80})
    keys = {
        "tune.data": [str(tmp_path / "set" / "train")],
        "tune.out": tmp_path / "out",
        "tune.epochs": 1.0,
        "policy.pointing": pointing,
        "model.path": str(pointer_folder("builtin:tiny"))
        if pointing == "pointer"
        else "builtin:tiny",
    }
    held = tune(keys).summary()["held_out"]
    assert held["measure"] == "hits"
    assert held["rows"] >= 3
    if pointing == "text":  # the tiny model hits many of these from the first
        assert held["right_before"] > 0


def test_adapters_and_recomputed_layers_are_measured_likewise(tune: Tune, keys: Keys) -> None:
    lora = {"model.lora.rank": 4, "model.lora.alpha": 8.0, "train.recompute": "layer"}
    told = tune(keys | lora).summary()
    assert told["used"]["lr"] == 2e-3
    assert told["held_out"]["loss_after"] < told["held_out"]["loss_before"]


def test_looks_at_the_held_out_rows_change_nothing_of_the_training(
    tune: Tune,
    pointer_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_set(tmp_path / "set", ["mini"], {"train": 80})
    keys = {
        "tune.data": [str(tmp_path / "set" / "train")],
        "tune.epochs": 0.5,
        "tune.batch": 8,
        "tune.lr": 1e-3,
        "policy.pointing": "pointer",  # whose head drops out while it is trained
        "model.path": str(pointer_folder("builtin:tiny")),
    }
    tensors = {}
    for name, share in (("without", 0.05), ("with", 1e9)):
        monkeypatch.setattr(pace, "MEASURE_SHARE", share)
        monkeypatch.setattr(pace, "FIRST_MEASURE_S", 0.0)
        looks: list[Measurement] = []
        plain = pace.HeldOutWatch.measure

        def measure(self: pace.HeldOutWatch, plain: Any = plain, looks: Any = looks) -> Measurement:
            looks.append(plain(self))
            return looks[-1]

        with monkeypatch.context() as patch:
            patch.setattr(pace.HeldOutWatch, "measure", measure)
            result = tune(keys | {"tune.out": tmp_path / name})
        tensors[name] = (tmp_path / name / "model.safetensors").read_bytes()
        assert len(looks) == {"without": 2, "with": 2 + result.updates}[name]
        assert looks[-1] == result.outcome.after
    assert tensors["with"] == tensors["without"]

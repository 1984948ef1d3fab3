"""Training runs: what changes, what stays, and that a second start goes on."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bus.errors import UserError
from dart_cli.config.model_folder import TUNED, base_name
from dart_cli.policy.loader import load_policy
from dart_cli.runtime.role import stop_signals
from dart_cli.tune.stages import interruptible
from dart_cli.tune.training_state import PROGRESS
from tests.tune.stopping import run_and_stop

Keys = dict[str, Any]
Tune = Callable[..., Any]
TENSORS = "model.safetensors"


@pytest.fixture
def keys(grounding_set: Path, pointer_folder: Callable[[str], Path], tmp_path: Path) -> Keys:
    """Six updates: three of the head, three of everything."""
    return {
        "tune.data": [str(grounding_set / "train")],
        "model.path": str(pointer_folder("builtin:tiny")),
        "policy.pointing": "pointer",
        "tune.out": tmp_path / "out",
        "tune.epochs": 2.0,
        "tune.head_share": 0.5,
        "tune.batch": 3,
        "tune.lr": 1e-3,
    }


def test_the_first_stage_changes_the_head_and_the_new_rows_alone(tune: Tune, keys: Keys) -> None:
    tune(keys | {"tune.head_share": 1.0, "tune.epochs": 1.0})
    before, after = (
        load_file(Path(keys["model.path"]) / TENSORS),
        load_file(keys["tune.out"] / TENSORS),
    )
    assert before.keys() == after.keys()
    pointer = load_policy(keys["tune.out"], weights=False).pointer
    assert pointer is not None
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    [embedding] = [name for name in changed if "pointer_head" not in name]
    assert changed - {embedding} == {name for name in before if "pointer_head" in name}
    rows = (before[embedding] != after[embedding]).any(dim=1).nonzero().flatten().tolist()
    assert set(rows) == {pointer.start, pointer.pad}  # no state of `end` points at anything


def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    tune: Tune, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tune(keys | {"tune.out": tmp_path / "whole"})
    assert whole is not None
    for updates in (2, 3):  # within the first stage, then within the second
        run_and_stop(tune, keys, updates, monkeypatch)
        assert not keys["tune.out"].exists()
    stopped = json.loads((tmp_path / "out.part" / PROGRESS).read_text())
    assert (stopped["stage"], stopped["updates"]) == (1, 2)
    result = tune(keys)
    assert result is not None
    assert result.updates == whole.updates == 6
    assert (keys["tune.out"] / TENSORS).read_bytes() == (tmp_path / "whole" / TENSORS).read_bytes()
    plain = [
        [{k: v for k, v in point.items() if k != "seconds"} for point in each.curve]
        for each in (whole, result)
    ]
    assert plain[0] == plain[1]
    assert not (tmp_path / "out.part").exists()


def test_the_folder_tells_how_it_was_made_and_loads(tune: Tune, keys: Keys) -> None:
    result = tune(keys)
    assert result is not None
    record = json.loads((keys["tune.out"] / TUNED).read_text())
    assert record["base"] == base_name(str(keys["model.path"]))
    assert base_name(str(keys["tune.out"])) == record["base"], "also of what is trained from it"
    assert record["settings"]["learned"] == "pointer"
    assert [point["name"] for point in record["curve"]] == ["head"] * 3 + ["all"] * 3
    policy = load_policy(keys["tune.out"], pointing="pointer")
    assert policy.pointer_head is not None
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"] + record["curve"][3]["lm"]


def test_text_is_trained_by_the_same_code_and_few_updates_are_told(
    tune: Tune, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"model.path": "builtin:tiny", "policy.pointing": "text"}
    result = tune(keys | text | {"tune.epochs": 1.0})
    assert "stage all has 3 updates, which teach little" in capsys.readouterr().err
    assert result is not None
    assert {point["name"] for point in result.curve} == {"all"}
    assert "pointer" not in result.curve[0]


def test_a_start_with_other_settings_is_refused(
    tune: Tune, keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_and_stop(tune, keys, 1, monkeypatch)
    with pytest.raises(UserError, match=r"out.part .*batch was 3 and is 2.*--fresh"):
        tune(keys | {"tune.batch": 2})
    with pytest.raises(UserError, match=r"out.part .*batch was 3 and is 2"):
        tune(keys | {"tune.batch": 2}, dry_run=True)
    capsys.readouterr()
    assert tune(keys, dry_run=True) is None
    assert "2 epochs, about 6 updates" in capsys.readouterr().out


def test_a_training_says_how_long_it_takes_and_what_it_has_when_it_is_stopped(
    tune: Tune, keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run_and_stop(tune, keys, 4, monkeypatch, signal.SIGTERM)  # in the second of two stages
    out, err = capsys.readouterr()
    assert re.search(
        r"stage head: the first update took .+ s, 6 updates take about \d+:\d\d\n", err
    )
    assert re.search(r"stage all: the first update took .+ s, 3 updates take about \d+:\d\d\n", err)
    [line] = [each for each in err.splitlines() if each.startswith("stopped after")]
    assert re.fullmatch(r"stopped after 4 updates; loss of the learned rows [\d.]+ -> [\d.]+", line)
    assert err.endswith(f"{keys['tune.out']}.part holds its state; the same command continues it\n")
    assert len(re.findall(r"^(head|all) +\d", out, re.M)) == 4  # the curve so far


@pytest.mark.parametrize("number", stop_signals())
def test_each_signal_that_ends_a_process_interrupts_a_training(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_training_ends_at_its_minutes_where_its_epochs_take_longer(
    tune: Tune, keys: Keys
) -> None:
    text = {"model.path": "builtin:tiny", "policy.pointing": "text"}
    result = tune(keys | text | {"tune.epochs": 1e5, "tune.max_minutes": 0.002})
    assert result is not None
    assert 1 <= result.updates < 3e5
    settings = json.loads((keys["tune.out"] / TUNED).read_text())["settings"]
    assert (settings["epochs"], settings["max_minutes"]) == (1e5, 0.002)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.path": "builtin:tiny"}, "dart model add-pointer"),
        ({"tune.data": []}, "tune.data is empty"),
        ({"tune.epochs": 0.0}, "tune.epochs"),
        ({"policy.pointing": "text", "tune.target": "v2p"}, "tune.target is of pointers"),
        (
            {"tune.action_parser": "qwenn"},
            "tune.action_parser must be compact|tune.action_parser qwenn",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    tune: Tune, keys: Keys, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tune(keys | change)
    assert not keys["tune.out"].parent.joinpath("out.part").exists()


def test_an_existing_folder_is_left_alone(tune: Tune, keys: Keys) -> None:
    keys["tune.out"].mkdir()
    with pytest.raises(UserError, match=r"tune\.out exists"):
        tune(keys)

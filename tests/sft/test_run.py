"""Training runs: what changes, what stays, and that a second start goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bus.errors import UserError
from dart_cli.policy.model import load_policy
from dart_cli.sft.kept import PROGRESS
from dart_cli.sft.run import RECORD, SftOptions, run_sft
from dart_cli.sft.trainer import Trainer

TENSORS = "model.safetensors"


@pytest.fixture
def options(made: Path, pointer_folder: Callable[[str], Path], tmp_path: Path) -> SftOptions:
    """Six updates: three of the head, three of everything."""
    return SftOptions(
        data=made / "train",
        model=str(pointer_folder("builtin:tiny")),
        out=tmp_path / "out",
        epochs=2.0,
        head_share=0.5,
        batch=3,
        lr=1e-3,
        lr_head=1e-2,
    )


def stop_after(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SIGINT come during an update."""
    plain, done = Trainer.update, []

    def update(self: Trainer, *arguments: Any) -> dict[str, float]:
        done.append(1)
        if len(done) == updates:
            signal.raise_signal(signal.SIGINT)
        return plain(self, *arguments)

    monkeypatch.setattr(Trainer, "update", update)


def run_and_stop(options: SftOptions, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends after so many updates."""
    with monkeypatch.context() as patch:
        stop_after(updates, patch)
        with pytest.raises(KeyboardInterrupt):
            run_sft(options)


def test_the_first_stage_changes_the_head_and_the_new_rows_alone(options: SftOptions) -> None:
    run_sft(replace(options, head_share=1.0, epochs=1.0))
    before, after = load_file(Path(options.model) / TENSORS), load_file(options.out / TENSORS)
    assert before.keys() == after.keys()
    pointer = load_policy(options.out, weights=False).pointer
    assert pointer is not None
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    [embedding] = [name for name in changed if "pointer_head" not in name]
    assert changed - {embedding} == {name for name in before if "pointer_head" in name}
    rows = (before[embedding] != after[embedding]).any(dim=1).nonzero().flatten().tolist()
    assert set(rows) == {pointer.start, pointer.pad}  # no state of `end` points at anything


def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    options: SftOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_sft(replace(options, out=tmp_path / "whole"))
    assert whole is not None
    for updates in (2, 3):  # within the first stage, then within the second
        run_and_stop(options, updates, monkeypatch)
        assert not options.out.exists()
    stopped = json.loads((tmp_path / "out.part" / PROGRESS).read_text())
    assert (stopped["stage"], stopped["updates"]) == (1, 2)
    result = run_sft(options)
    assert result is not None
    assert result.updates == whole.updates == 6
    assert (options.out / TENSORS).read_bytes() == (tmp_path / "whole" / TENSORS).read_bytes()
    plain = [
        [{k: v for k, v in point.items() if k != "seconds"} for point in each.curve]
        for each in (whole, result)
    ]
    assert plain[0] == plain[1]
    assert not (tmp_path / "out.part").exists()


def test_the_folder_tells_how_it_was_made_and_loads(options: SftOptions) -> None:
    result = run_sft(options)
    assert result is not None
    record = json.loads((options.out / RECORD).read_text())
    assert record["settings"]["task"] == "pointer"
    assert [point["name"] for point in record["curve"]] == ["head"] * 3 + ["all"] * 3
    policy = load_policy(options.out, pointing="pointer")
    assert policy.pointer_head is not None
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"] + record["curve"][3]["lm"]


def test_text_is_trained_by_the_same_code(options: SftOptions) -> None:
    text = replace(options, model="builtin:tiny", task="text", place="inside", epochs=1.0)
    result = run_sft(text)
    assert result is not None
    assert {point["name"] for point in result.curve} == {"all"}
    assert "pointer" not in result.curve[0]


def test_a_start_with_other_settings_is_refused(
    options: SftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_and_stop(options, 1, monkeypatch)
    with pytest.raises(UserError, match=r"out.part .*batch was 3 and is 2.*--fresh"):
        run_sft(replace(options, batch=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "builtin:tiny"}, "dart model add-pointer"),
        ({"overrides": ["model.lora.rank=4"]}, "model.lora"),
        ({"place": "inside"}, "--points"),
        ({"task": "verifier"}, "dart model verifier-rows"),
        ({"epochs": 0.0}, "--epochs"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    options: SftOptions, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_sft(replace(options, **change))
    assert not options.out.parent.joinpath("out.part").exists()


def test_an_existing_folder_is_left_alone(options: SftOptions) -> None:
    options.out.mkdir()
    with pytest.raises(UserError, match="out exists"):
        run_sft(options)

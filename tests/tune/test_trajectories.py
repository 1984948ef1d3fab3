"""Successes of runs and files: which are learned, and that they are the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bus.errors import UserError
from bus.messages import SampledTokens, StepRecord, TrajectoryEnd, VersionSpan
from dart_cli.config.schema import Config
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.transfer import import_folder
from dart_cli.data.store.open import open_store
from dart_cli.policy.forward import logits
from dart_cli.policy.loader import load_policy
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.training_set import StepSet
from dart_cli.tune.trajectories import read_trajectories
from tests.data.parts import ask_lease, make_ledger, trajectory_end
from tests.devices import AUTOCASTING
from tests.tune.stopping import run_and_stop

Keys = dict[str, Any]
Tune = Callable[..., Any]
TASKS = ["mini/page", "mini/popup"]


@dataclass(frozen=True)
class Places:
    """The same successes in three places."""

    files: Path
    pool: Path
    own: Path  # beside as many failures
    trajectories: list[Trajectory]


@pytest.fixture(scope="module")
def places(solutions: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Two solutions of each of two tasks."""
    home = tmp_path_factory.mktemp("runs")
    config = Config.model_validate({"env": {"tasks": TASKS}, "run": {"dir": home / "pool"}})
    import_folder(config, solutions)
    found = list(read_folder(solutions))
    own = Config.model_validate({"env": {"tasks": TASKS}, "run": {"dir": home / "own"}})
    with open_store(home / "own") as store:
        ledger = make_ledger(own, store)
        for slot, trajectory in enumerate([*found, *found]):
            lease = ask_lease(ledger, slot)
            for record in _records(lease.trajectory_id, trajectory):
                assert ledger.step(record).accepted
            outcome = "pass" if slot < len(found) else "fail"
            end: TrajectoryEnd = trajectory_end(lease.trajectory_id, len(trajectory.steps), outcome)
            assert ledger.end(end).accepted
        store.commit()
    return Places(solutions, home / "pool", home / "own", found)


def _records(name: str, trajectory: Trajectory) -> list[StepRecord]:
    """The steps as an environment hands them in."""
    return [
        StepRecord(
            trajectory_id=name,
            step=step.step,
            screenshot=trajectory.images[step.screenshot],
            media_type="image/png",
            image_hashes=step.image_hashes,
            prompt_token_ids=step.prompt_token_ids,
            sampled=_as_drawn(step.sampled),
            worker="rollout-0",
            text=step.text,
            action=step.action,
            error="",
            model_s=0.0,
            env_s=0.0,
            instruction=step.instruction,
        )
        for step in trajectory.steps
    ]


def _as_drawn(sampled: SampledTokens) -> SampledTokens:
    """With numbers, which a live policy has and a solution has not."""
    spans = [VersionSpan(version=0, start=0, end=len(sampled))]
    drawn = {"behaviour_logprobs": [-0.5] * len(sampled), "entropies": [0.5] * len(sampled)}
    return sampled.model_copy(update={**drawn, "version_spans": spans})


def config_of(*paths: Path, **tune: object) -> Config:
    return Config.model_validate({"tune": {"data": [str(path) for path in paths], **tune}})


def read(places: Places, which: str, **tune: object) -> Any:
    path = getattr(places, which)
    source = "pool" if which == "pool" else "own"
    return read_trajectories([path], config_of(path, trajectories=source, **tune))


@pytest.mark.parametrize("which", ["files", "pool", "own"])
def test_steps_are_the_tokens_that_were_sampled_wherever_they_are(
    places: Places, which: str
) -> None:
    expected = sorted(
        (list(step.prompt_token_ids), step.sampled.token_ids, step.image_hashes)
        for trajectory in places.trajectories
        for step in trajectory.steps
    )
    read_ = read(places, which)
    batch = read_.batch(range(len(read_)))
    found = sorted(
        (batch.prompt(s).tolist(), batch.completion(s).tolist(), batch.image_hashes(s))
        for s in batch.samples
    )
    read_.close()
    assert found == expected
    assert {(s.advantage, s.weight) for s in batch.samples} == {(1.0, 1.0)}
    images = {name: each for t in places.trajectories for name, each in t.images.items()}
    assert batch.images == images


def test_the_newest_of_each_task_are_kept(places: Places) -> None:
    read_ = read(places, "files", per_task=1)
    newest = {each.task_id: each for each in places.trajectories}
    assert set(read_.names) == {f"0/{each.id}" for each in newest.values()}
    assert len(read_) == sum(len(each.steps) for each in newest.values())


def test_a_batch_costs_the_mean_over_its_completions_in_plain_formulas(places: Places) -> None:
    policy = load_policy("builtin:tiny", "float64")
    read_ = read(places, "files")
    steps = StepSet(policy, read_, config_of(places.files).train)
    chosen = [4, 0, 1, 0]  # of several trajectories, and one twice
    with torch.no_grad():
        found = [each.sums["lm"] for each in steps.passes(chosen, LossSettings())]
    batch = read_.batch(chosen)
    nll, count = 0.0, 0
    for sample in batch.samples:
        ids = [*batch.prompt(sample), *batch.completion(sample)]
        images = [batch.images[name] for name in batch.image_hashes(sample)]
        with torch.no_grad():
            values = logits(policy.model, policy.inputs([ids], [images]), last=len(ids))[0]
        table = values.numpy().copy()
        table[:, list(policy.forbidden_token_ids)] = -np.inf
        table -= np.log(np.exp(table).sum(axis=1, keepdims=True))
        for at in range(sample.start, sample.end):
            nll -= table[at - 1, ids[at]]
            count += 1
    assert sum(found) == pytest.approx(nll / count, abs=1e-9)


def test_successes_are_learned_and_a_stop_changes_nothing(
    tune: Tune, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"tune.data": [str(places.own)], "tune.epochs": 2.0, "tune.batch": 4, "tune.lr": 1e-3}
    whole = tune(keys | {"tune.out": tmp_path / "whole"})
    assert {point["name"] for point in whole.curve} == {"all"}
    assert whole.curve[-1]["lm"] < whole.curve[0]["lm"]
    stopped = keys | {"tune.out": tmp_path / "stopped"}
    run_and_stop(tune, stopped, 2, monkeypatch)
    tune(stopped)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", AUTOCASTING, indirect=True)
def test_products_in_bfloat16_follow_those_in_float32(
    tune: Tune, places: Places, tmp_path: Path, device: str
) -> None:
    keys = {"tune.data": [str(places.files)], "tune.epochs": 1.0, "tune.batch": 4}
    keys |= {"tune.lr": 1e-3, "train.recompute": "layer"}
    plain = tune(keys | {"tune.out": tmp_path / "plain", "train.device": "cpu"})
    rounded = {"model.dtype": "bfloat16", "train.device": device}
    found = tune(keys | rounded | {"tune.out": tmp_path / "rounded"})
    for one, other in zip(plain.curve, found.curve, strict=True):
        assert other["lm"] == pytest.approx(one["lm"], abs=0.03)
        assert other["lm"] != one["lm"]
    tensors = load_file(tmp_path / "rounded" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tune.trajectories": "pool"}, "own has no members in its pool"),
        ({"tune.data": ["OWN", "SET"]}, "has trajectories and .* has items"),
        ({"tune.data": ["runs/nowhere"]}, "names runs/nowhere, which does not exist"),
        ({"model.path": "OTHER"}, "made for another model"),
    ],
)
def test_what_cannot_be_learned_is_told_first(
    tune: Tune,
    places: Places,
    grounding_set: Path,
    family: Callable[[str], Path],
    tmp_path: Path,
    change: Keys,
    message: str,
) -> None:
    named = {"OWN": str(places.own), "SET": str(grounding_set / "train")}
    if "tune.data" in change:
        change = {"tune.data": [named.get(each, each) for each in change["tune.data"]]}
    if "model.path" in change:
        change = {"model.path": str(family("qwen2_vl")), "policy.action_parser": "uitars"}
    with pytest.raises(UserError, match=message):
        tune({"tune.data": [str(places.own)], "tune.out": tmp_path / "out"} | change)
    assert not (tmp_path / "out.part").exists()

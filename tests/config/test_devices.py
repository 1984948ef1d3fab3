"""Each process gets the GPUs that [up] names for it, and what cannot be is refused with the cure."""

from __future__ import annotations

from typing import Any

import pytest

from bus.errors import ConfigError
from dart_cli.config import devices
from dart_cli.config.devices import gpus_of
from dart_cli.config.rules import Finding, found_in
from dart_cli.config.rules.machine import GPUS, NCCL, TRAINER, WORKERS
from dart_cli.config.schema import Config
from dart_cli.runtime.commands import placement

BY_NCCL: dict[str, dict[str, Any]] = {"weights": {"channel": "nccl"}}


def config_of(**sections: dict[str, Any]) -> Config:
    """Eight GPUs, four for the ranks, four for two engines of two."""
    given: dict[str, dict[str, Any]] = {
        "train": {"ranks": 4, "device": "cuda"},
        "rollout": {"engine": "vllm", "device": "cuda"},
        "vllm": {"tensor_parallel": 2},
        "up": {"rollouts": 2, "train_gpus": [0, 1, 2, 3], "rollout_gpus": [4, 5, 6, 7]},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return Config.model_validate(given)


def gpu_mistakes(config: Config) -> list[Finding]:
    """Wherever it is read."""
    return list(found_in(GPUS, config))


def device_mistakes(config: Config, role: str) -> list[Finding]:
    """On this machine."""
    tables = [table for table in (WORKERS, TRAINER, NCCL) if role in table.roles]
    return [found for table in tables for found in found_in(table, config)]


def test_each_process_gets_its_gpus_in_order() -> None:
    config = config_of()
    assert not gpu_mistakes(config)
    assert gpus_of(config, "train", "train") == "0,1,2,3"
    assert gpus_of(config, "rollout", "rollout-0") == "4,5"
    assert gpus_of(config, "rollout", "rollout-1") == "6,7"
    assert gpus_of(config, "rollout", "rollout-host-1") == "6,7"  # of several hosts, each its own
    assert gpus_of(config, "env", "env-0") == ""
    assert gpus_of(Config(), "rollout", "rollout-3") == gpus_of(Config(), "train", "train") == ""
    gpus = ["train 0,1,2,3", "rollout 4,5", "rollout 6,7"]
    assert placement(config) == ["envs 1", "rollouts 2", *gpus]


def test_a_worker_too_many_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match="rollout-2 is one more; add its GPUs"):
        gpus_of(config_of(), "rollout", "rollout-2")


@pytest.mark.parametrize(
    ("sections", "key", "cure"),
    [
        ({"train": {"ranks": 2}}, "up.train_gpus", "set train.ranks = 4"),
        ({"train": {"ranks": 8}}, "up.train_gpus", "list one for each rank"),
        ({"up": {"rollout_gpus": [4, 5]}}, "up.rollout_gpus", "list 4, or set up.rollouts = 1"),
        ({"up": {"rollout_gpus": [4, 5, 6]}}, "up.rollout_gpus", "list 4"),
        (
            {"up": {"rollout_gpus": [3, 4, 5, 6]}},
            "up.rollout_gpus",
            "GPU 3, which up.train_gpus lists too",
        ),
        ({"up": {"rollout_gpus": [4, 4, 5, 6]}}, "up.rollout_gpus", "lists 4 twice"),
        ({"train": {"device": "cuda:1"}}, "train.device", 'set "cuda"'),
        ({"rollout": {"device": "cpu"}}, "rollout.device", 'set "cuda"'),
        ({**BY_NCCL, "rollout": {"engine": "scripted"}}, "weights.channel", 'set "gloo" or "file"'),
        ({**BY_NCCL, "train": {"device": "cpu"}}, "weights.channel", 'train.device = "cpu"'),
        (
            {"up": {"train_gpus": []}, "train": {"device": "cpu", "offload": "optimizer"}},
            "train.offload",
            'set "none"',
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(
    sections: dict[str, Any], key: str, cure: str
) -> None:
    found = gpu_mistakes(config_of(**sections))
    [text] = [str(each) for each in found if each.subject == key]
    assert cure in text


def test_nccl_is_for_processes_with_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    assert not gpu_mistakes(config_of(**BY_NCCL))
    apart = {"train": {"ranks": 1}, "rollout": {"device": "cuda:1"}}
    none = {"train_gpus": [], "rollout_gpus": []}

    def told(count: int, **sections: dict[str, Any]) -> str:
        monkeypatch.setattr(devices, "visible_gpus", lambda: count)
        found = device_mistakes(config_of(**BY_NCCL, **sections), "train")
        return " ".join(str(each) for each in found if each.subject == "weights.channel")

    one = {**none, "rollouts": 1}
    assert not told(8)
    assert not told(8, **apart, up=one)
    assert "would share one" in told(8, up=none)
    assert "would share one" in told(8, **apart | {"rollout": {"device": "cuda"}}, up=one)
    assert not told(8, up=none, bus={"host": "127.0.0.1"})  # each may be on a host of its own
    assert 'set "gloo"' in told(0, **apart, up=one)


def test_more_ranks_than_gpus_are_refused_but_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 2)
    [found] = device_mistakes(config_of(), "train")
    assert found.subject == "train.ranks"
    assert "set train.ranks = 2" in str(found)
    auto = config_of(train={"device": "auto"})
    assert [each.subject for each in device_mistakes(auto, "train")] == ["train.ranks"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not device_mistakes(config_of(), "train")
    assert not device_mistakes(auto, "train")


def test_gpus_of_the_trainer_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks above 0 would not see them."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: 8)
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    [found] = device_mistakes(config_of(), "train")
    assert found.subject == "up.train_gpus"
    assert str(found).endswith("choose GPUs by CUDA_VISIBLE_DEVICES on each host")
    assert not device_mistakes(config_of(up={"train_gpus": []}), "train")
    assert not device_mistakes(config_of(), "rollout")
    monkeypatch.setenv(devices.VISIBLE, "0,1,2,3")  # the user's own choice, for all ranks
    assert not device_mistakes(config_of(), "train")


@pytest.mark.parametrize(
    ("changes", "found", "cure"),
    [
        ({"ranks": 1000}, "train.ranks", "lower train.ranks"),
        ({"ranks": 1000, "device": "cpu"}, "train.ranks", "lower train.ranks"),
        ({"offload": "optimizer"}, "train.offload", 'set "none"'),
        ({"ranks": 4}, "", ""),
    ],
)
def test_without_a_gpu_many_ranks_and_offload_are_refused(
    changes: dict[str, Any], found: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    train = {"ranks": 1, "device": "auto", **changes}
    config = config_of(train=train, up={"train_gpus": []}, rollout={"device": "auto"})
    mistakes = [
        each for each in device_mistakes(config, "train") if each.subject.startswith("train.")
    ]
    assert [each.subject for each in mistakes] == ([found] if found else [])
    assert all(str(each).endswith(cure) for each in mistakes)
    assert not device_mistakes(config, "rollout")

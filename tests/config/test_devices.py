"""Each process gets the GPUs that [up] names for it, and what cannot be is refused with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.errors import ConfigError
from dart_cli.config import devices
from dart_cli.config.devices import divide_gpus, gpu_names, gpus_of, listed_gpus, visible_gpus
from dart_cli.config.dry_run import describe
from dart_cli.config.rules import Finding, broken_rules
from dart_cli.config.rules.machine import GPUS, NCCL, OF_UP, TRAINER, WORKERS
from dart_cli.config.schema import Config
from dart_cli.runtime.commands import placement
from scripts.small_models import FAMILIES
from tests.config.model_parts import change_json, write_model


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without GPUs, as far as the tests say nothing else."""
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.setattr(devices, "_host_gpus", lambda: 0)


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
    return list(broken_rules(GPUS, config))


def device_mistakes(config: Config, role: str) -> list[Finding]:
    """On this machine."""
    tables = [table for table in (WORKERS, TRAINER, NCCL) if role in table.roles]
    return [found for table in tables for found in broken_rules(table, config)]


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


def test_a_worker_too_many_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rollout-2 is one more; add its GPUs"):
        gpus_of(config_of(), "rollout", "rollout-2")
    monkeypatch.setattr(devices, "_host_gpus", lambda: 8)
    unnamed = config_of(up={"train_gpus": [], "rollout_gpus": []})
    with pytest.raises(ConfigError, match="there are GPUs for 2 workers of 2, and rollout-2"):
        gpus_of(unnamed, "rollout", "rollout-2")


# --- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------

LISTS: list[tuple[str | None, list[str] | None]] = [
    (None, None),
    ("", []),
    ("-1", []),
    ("0", ["0"]),
    ("4,5,6,7", ["4", "5", "6", "7"]),
    (" 4 , 5", ["4", "5"]),
    ("07,1", ["7", "1"]),
    ("0,2,-1,1", ["0", "2"]),
    ("0,1,", ["0", "1"]),
    ("0,,1", ["0"]),
    ("1gpu2,2ampere", ["1", "2"]),
    ("0,x,1", ["0"]),
    ("0,1,0", []),
    ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-12", None),
    ("GPU-a,GPU-b,0,GPU-c", ["GPU-a", "GPU-b"]),
    ("GPU-a,GPU-a", []),
    ("0,GPU-a", ["0"]),
    ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
    ("MIG-GPU-a/1/0,GPU-a", ["MIG-GPU-a/1/0"]),
    ("gpu-a", []),
]


@pytest.mark.parametrize(("value", "names"), LISTS)
def test_a_list_is_read_as_cuda_and_torch_read_it(
    value: str | None, names: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.cuda import _parse_visible_devices

    if value is None:
        assert listed_gpus({}) is None
        return
    monkeypatch.setenv(devices.VISIBLE, value)
    found = listed_gpus()
    assert found == (value.split(",") if names is None else names)
    assert found == list(map(str, _parse_visible_devices()))
    slices = value.startswith("MIG-")
    assert visible_gpus() == (1 if slices else len(found))


def test_a_number_beyond_the_hosts_gpus_ends_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_host_gpus", lambda: 4)
    assert listed_gpus({devices.VISIBLE: "0,3,4,1"}) == ["0", "3"]
    assert listed_gpus({devices.VISIBLE: "GPU-a"}) == ["GPU-a"]


@pytest.mark.parametrize(
    ("visible", "worker", "seen"),
    [
        (None, "train", "0,1,2,3"),
        ("7,6,5,4,3,2,1,0", "train", "7,6,5,4"),
        ("7,6,5,4,3,2,1,0", "rollout-1", "1,0"),
        ("MIG-a,MIG-b,c", "env-0", ""),
        # what lists just as many as the process takes is the user's own choice for it
        ("4,5,6,7", "train", ""),
        ("GPU-a,GPU-b", "rollout-1", ""),
        ("GPU-a,GPU-b", "rollout-9", ""),
    ],
)
def test_places_are_looked_up_once(visible: str | None, worker: str, seen: str) -> None:
    environment = {} if visible is None else {devices.VISIBLE: visible}
    role = worker.partition("-")[0]
    assert gpus_of(config_of(), role, worker, environment) == seen
    if visible is not None and seen:  # what the processes that it starts inherit
        assert gpus_of(config_of(), role, worker, {devices.VISIBLE: seen}) == ""


@pytest.mark.parametrize(
    ("visible", "worker", "words"),
    [
        ("0,1,2", "train", "up.train_gpus = [0, 1, 2, 3] for train names place 3 of CUDA_VISIBLE_"),
        ("0,1,2", "train", "for train alone it may list just 4"),
        ("6", "rollout-1", "up.rollout_gpus = [6, 7] for rollout-1 names places 6, 7 of"),
        ("", "rollout-0", "and no GPU is visible; list GPUs there"),
        (None, "eval-1", "exist; or start it with CUDA_VISIBLE_DEVICES set to its own"),
    ],
)
def test_a_process_without_its_gpus_is_refused_with_the_cure(
    visible: str | None, worker: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.setattr(devices, "_host_gpus", lambda: 6)
    environment = {} if visible is None else {devices.VISIBLE: visible}
    with pytest.raises(ConfigError) as refused:
        gpus_of(config_of(), "train" if worker == "train" else "rollout", worker, environment)
    assert words in str(refused.value)


def test_ranks_of_torchrun_choose_by_themselves() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "4", devices.VISIBLE: "0,1,2,3,4,5,6,7"}
    assert gpus_of(config_of(), "train", "train", started) == ""
    assert gpus_of(config_of(), "rollout", "rollout-0", started) == "4,5"


def test_a_side_without_a_list_gets_gpus_that_the_other_has_not() -> None:
    none: dict[str, Any] = {"train_gpus": [], "rollout_gpus": []}
    unnamed = config_of(up=none)
    assert divide_gpus(config_of(), 8) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert divide_gpus(unnamed, 8) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert divide_gpus(unnamed, 11) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])  # later workers have some
    assert divide_gpus(unnamed, 7) == ([], [])
    assert divide_gpus(unnamed, None) == ([], [])
    assert divide_gpus(config_of(up={"rollout_gpus": []}), 7) == ([0, 1, 2, 3], [])
    assert divide_gpus(config_of(up=none | {"train_gpus": [4, 5, 6, 7]}), 8)[1] == [0, 1, 2, 3]
    assert divide_gpus(config_of(up=none | {"rollout_gpus": [0, 1, 2, 3]}), 8)[0] == [4, 5, 6, 7]
    on_cpu = config_of(up=none, train={"device": "cpu"})
    assert divide_gpus(on_cpu, 4) == ([], [0, 1, 2, 3])
    assert divide_gpus(config_of(up=none, rollout={"engine": "scripted"}), 8) == ([0, 1, 2, 3], [])
    for section in ({"bus": {"host": "127.0.0.1"}}, {"rollout": {"device": "cuda:1"}}):
        assert divide_gpus(config_of(up=none, **section), 16) == ([], [])


def test_a_device_by_number_is_one_of_the_list() -> None:
    assert gpu_names([1], {}) == ["1"]
    assert gpu_names([1], {devices.VISIBLE: "4,6"}) == ["6"]
    assert gpu_names([0], {devices.VISIBLE: "GPU-abc"}) == ["GPU-abc"]
    with pytest.raises(ConfigError, match=r"\[1\] names place 1 of CUDA_VISIBLE_DEVICES=4"):
        gpu_names([1], {devices.VISIBLE: "4"})


def test_the_dry_run_shows_what_each_process_will_see(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpus" not in dict(describe(config_of(up={"train_gpus": [], "rollout_gpus": []})))
    monkeypatch.setenv(devices.VISIBLE, "7,6,5,4,3,2,1,0")
    assert dict(describe(config_of()))["gpus"] == (
        "train sees 7,6,5,4; rollout-0 sees 3,2; rollout-1 sees 1,0"
    )


def test_numbers_beyond_the_hosts_gpus_are_refused_without_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not list(broken_rules(OF_UP, config_of()))  # a laptop: the plan is of another machine
    monkeypatch.setattr(devices, "_host_gpus", lambda: 6)
    [found] = broken_rules(OF_UP, config_of())
    assert str(found) == (
        "up.rollout_gpus = [4, 5, 6, 7] names GPU 6, 7, and this host has GPU 0 to 5; name GPUs that exist"
    )
    monkeypatch.setattr(devices, "_host_gpus", lambda: None)
    assert not list(broken_rules(OF_UP, config_of()))


def test_a_run_that_is_typed_by_hand_names_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VISIBLE, "7,6,5,4,3,2,1,0")
    assert placement(config_of())[2:] == ["train 7,6,5,4", "rollout 3,2", "rollout 1,0"]


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
        monkeypatch.setattr(devices, "_host_gpus", lambda: count)
        found = device_mistakes(config_of(**BY_NCCL, **sections), "train")
        return " ".join(str(each) for each in found if each.subject == "weights.channel")

    one = {**none, "rollouts": 1}
    assert not told(8)
    assert not told(8, **apart, up=one)
    assert not told(8, up=none)  # shared out
    assert "would share one" in told(7, up=none)
    assert "would share one" in told(1, **apart | {"rollout": {"device": "cuda"}}, up=one)
    assert not told(7, up=none, bus={"host": "127.0.0.1"})  # each may be on a host of its own
    assert 'set "gloo"' in told(0, **apart, up=one)
    monkeypatch.setenv(devices.VISIBLE, "GPU-a,GPU-b")
    assert not told(8, up=none)  # of this process alone, perhaps
    [whole] = broken_rules(OF_UP, config_of(**BY_NCCL, up=none))
    assert "would share one" in str(whole)


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


@pytest.mark.parametrize(
    ("kind", "layers", "gpus", "device", "engine", "roles"),
    [
        ("qwen3_5", None, 8, "cuda", "transformers", ("train", "rollout")),
        ("qwen3_5", None, 1, "auto", "transformers", ("train", "rollout")),
        ("qwen3_5", None, 8, "cuda", "vllm", ("train",)),  # vLLM has a kernel of its own
        ("qwen3_5", None, 0, "auto", "transformers", ()),
        ("qwen3_5", None, 8, "cpu", "transformers", ()),
        ("qwen3_5", ["full_attention"] * 4, 8, "cuda", "transformers", ()),
        ("qwen3_vl", None, 8, "cuda", "transformers", ()),
    ],
)
def test_recurrent_layers_on_a_gpu_need_a_kernel(
    kind: str,
    layers: list[str] | None,
    gpus: int,
    device: str,
    engine: str,
    roles: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_model(tmp_path / "model", kind)
    if layers:
        text = FAMILIES[kind].config["text_config"] | {"layer_types": layers}
        change_json(folder, "config.json", text_config=text)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "rollout": {"engine": engine, "device": device},
            "train": {"device": device},
        }
    )
    is_there = False
    monkeypatch.setattr(
        devices.importlib.util, "find_spec", lambda name: object() if is_there else None
    )
    for role in ("train", "rollout"):
        found = [each for each in device_mistakes(config, role) if "fla" in str(each)]
        assert len(found) == (role in roles)
        for each in found:
            assert each.subject == f"{role}.device"
            assert "pip install flash-linear-attention" in each.cure
            assert "\n" not in str(each)
    is_there = True
    assert not [each for role in roles for each in device_mistakes(config, role)]

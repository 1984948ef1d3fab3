"""Each need is held against what there is, and each cure that is named makes it fit."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from dart_cli.doctor.fit import Misfit, cautions, misfits
from dart_cli.doctor.plan import make_plan
from dart_cli.doctor.plan_text import plan_lines
from dart_cli.doctor.room import Room
from dart_cli.doctor.speeds import H100, H200, GpuKind
from tests.doctor.seven_b import CONFIG, CUT, config_of, plan_of

EIGHT = Room(H100, gpus=8, found=True)
L40S = GpuKind("L40S", 48_300_000_000, 362e12, 0.864e12)
Sections = dict[str, dict[str, Any]]


def refused(room: Room, sections: Sections, role: Any = None) -> list[Misfit]:
    """What cannot fit on a room's GPUs."""
    config = config_of(**sections)
    return list(misfits(make_plan(config, CONFIG, CUT, room.gpu), config, room, role))


def cured(sections: Sections, cure: str) -> Sections:
    """The sections with what a cure sets, as a user would write it."""
    found = {name: dict(section) for name, section in sections.items()}
    assert cure.startswith("set ")
    parts = re.split(r", (?=[a-z]+\.)", re.split(r", or |, and |, free ", cure)[0][4:])
    for part in parts:
        key, _, value = part.partition(" = ")
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = tomllib.loads(f"value = {value}")["value"]
    return found


# --- GPUs ----------------------------------------------------------------------------------


def test_more_ranks_are_named_with_their_gpus() -> None:
    sections: Sections = {
        "train": {"ranks": 1},
        "up": {"train_gpus": [7], "rollout_gpus": [0, 1, 2, 3]},
    }
    [found] = refused(EIGHT, sections)
    assert found.cure == "set train.ranks = 3, up.train_gpus = [7, 4, 5]"
    assert not refused(EIGHT, cured(sections, found.cure))
    without = {**sections, "up": {"rollout_gpus": [0, 1, 2, 3]}}
    assert refused(EIGHT, without)[0].cure == "set train.ranks = 3"


def test_ranks_leave_the_engines_their_gpus() -> None:
    """Three ranks fit, but of four GPUs two are the engines'."""
    sections: Sections = {
        "train": {"ranks": 1},
        "up": {"rollouts": 2, "train_gpus": [0], "rollout_gpus": [1, 2]},
    }
    [found] = refused(Room(H100, gpus=4, found=True), sections)
    assert "ranks" not in found.cure
    assert not refused(Room(H100, gpus=4, found=True), cured(sections, found.cure))


def test_processes_on_one_gpu_without_room_for_both_are_refused() -> None:
    sections: Sections = {"up": {"rollout_gpus": []}, "train": {"ranks": 3}}
    [found] = [each for each in refused(EIGHT, sections) if each.subject == "gpus"]
    assert "the trainer, rollout-0, rollout-1, rollout-2 and rollout-3 take GPU 0" in found.text
    assert found.cure == "set up.train_gpus = [0, 1, 2], up.rollout_gpus = [3, 4, 5, 6]"
    assert not refused(EIGHT, cured(sections, found.cure))
    apart = {**sections, "rollout": {"device": "cuda:5"}, "up": {"rollouts": 1, "rollout_gpus": []}}
    assert not refused(EIGHT, apart)
    assert not refused(EIGHT, sections, "train")


def test_too_few_gpus_are_named() -> None:
    sections: Sections = {"train": {"ranks": 3}, "up": {"rollouts": 2, "rollout_gpus": []}}
    [found] = refused(Room(H100, gpus=4, found=True), sections)
    assert found.cure.startswith(
        "5 GPUs (3 for the trainer, 2 for engines), or lower train.ranks or up.rollouts"
    )


def test_a_gpu_is_shared_by_a_lower_share_of_the_engine() -> None:
    one = Room(H200, gpus=1, found=True)
    sections: Sections = {
        "model": {"lora": {"rank": 32}},
        "train": {"ranks": 1},
        "up": {"rollouts": 1, "rollout_gpus": []},
    }
    [found] = refused(one, sections)
    assert found.subject == "gpus"
    assert found.cure.startswith("set vllm.gpu_memory_utilization = 0.")
    assert not refused(one, cured(sections, found.cure))


# --- engines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "changes", "key"),
    [
        (H100, {"vllm": {"gpu_memory_utilization": 0.2}}, "vllm.gpu_memory_utilization"),
        (H100, {"vllm": {"kv_cache_mb": 100}}, "vllm.kv_cache_mb"),
        (H100, {"vllm": {"kv_cache_mb": 200_000}}, "vllm.kv_cache_mb"),
        (
            H100,
            {"rollout": {"engine": "transformers", "kv_cache_mb": 100}},
            "rollout.kv_cache_mb",
        ),
        (
            H100,
            {"rollout": {"engine": "transformers", "kv_cache_mb": 200_000}},
            "rollout.kv_cache_mb",
        ),
        (
            GpuKind("small", 21_000_000_000, 1e12, 1e12),
            {"up": {"rollout_gpus": []}},
            "vllm.tensor_parallel",
        ),
    ],
)
def test_the_cure_of_an_engine_is_the_setting_that_was_too_small_or_large(
    gpu: GpuKind, changes: Sections, key: str
) -> None:
    room = Room(gpu, gpus=8, found=True)
    [found] = refused(room, changes, "rollout")
    assert found.subject == "engine"
    assert found.cure.startswith(f"set {key} = ")
    assert not refused(room, cured(changes, found.cure), "rollout")


def test_a_sequence_longer_than_the_engine_takes_is_refused() -> None:
    sections: Sections = {"vllm": {"max_model_len": 8192}}
    [found] = refused(EIGHT, sections)
    assert "17467 tokens (turns of 100), vllm.max_model_len = 8192" in found.text
    assert not refused(EIGHT, cured(sections, found.cure))
    config = config_of()
    short = make_plan(config, {**CONFIG, "max_position_embeddings": 16_384}, CUT, H100)
    [found] = misfits(short, config, EIGHT)
    assert "the model has 16384 positions" in found.text
    assert "vllm" not in found.cure
    assert not list(misfits(short, config, EIGHT, "train"))


def test_the_engine_line_says_which_turns_its_length_holds() -> None:
    sections: Sections = {"vllm": {"max_model_len": 24_576}}
    plan, config = plan_of(**sections), config_of(**sections)
    line = dict(plan_lines(plan, config, EIGHT))["engine"]
    assert "29 past turns of up to 345 tokens" in line
    assert 600 + 5 * 2691 + 29 * 345 + 512 <= 24_576 < 600 + 5 * 2691 + 29 * 346 + 512


def test_more_requests_than_have_room_are_a_warning() -> None:
    sections: Sections = {"rollout": {"max_batch": 64}, "up": {"rollouts": 1, "envs": 4}}
    [found] = cautions(plan_of(**sections), config_of(**sections), EIGHT)
    assert found.text.startswith("64 requests of 17467 tokens do not fit together, 56 do")
    fewer = cured(sections, found.cure.replace(", or show", ", or"))
    assert not list(cautions(plan_of(**fewer), config_of(**fewer), EIGHT))
    slots: Sections = {"rollout": {"max_batch": 64}, "up": {"rollouts": 4, "envs": 4}}
    assert not list(cautions(plan_of(**slots), config_of(**slots), EIGHT))  # 32 slots each


# --- host ----------------------------------------------------------------------------------


def test_main_memory_of_rank_0_has_the_parity_gates_copy_and_the_publication() -> None:
    parts = {part.name: part.size for part in plan_of().host.parts if part.holder == "train"}
    trained = plan_of().shape.text
    assert parts["parity's copy"] == 4 * trained  # 30.5 GB
    assert parts["publication"] == 2**34  # 15.2 GB, as torch pins them
    on_cpu = plan_of(train={"device": "cpu", "offload": "none"}).host
    assert {each.size for each in on_cpu.parts if each.name == "publication"} == {2 * trained}
    assert parts["staged checkpoint"] == 12 * trained
    without = plan_of(train={"parity_every": 0}).host
    assert plan_of().host.memory - without.memory == 4 * trained
    broadcasts = {
        part.name: part.size
        for part in plan_of(weights={"channel": "gloo"}).host.parts
        if part.holder == "train"
    }
    assert 2 * plan_of().shape.parameters < 2**34  # in 16.6 GB
    assert broadcasts["publication"] == 2 * 2**34  # the newest, and the next
    plain = plan_of(model={"dtype": "float32", "lora": None}, train={"ranks": 1})
    assert {part.size for part in plain.host.parts if part.name == "publication"} == {2**35}


def test_offload_is_counted_beside_what_every_trainer_holds() -> None:
    there, here = (plan_of(train={"offload": each}).host for each in ("optimizer", "none"))
    assert there.memory - here.memory == 16 * plan_of().shape.text


def test_a_role_is_counted_alone() -> None:
    host = plan_of().host
    engine = sum(part.size for part in host.parts if part.holder == "rollout")
    assert host.memory_of("rollout") == engine // 4  # of four workers one
    assert host.memory > host.memory_of("train") > host.memory_of("rollout")


@pytest.mark.parametrize(
    ("sections", "memory", "part"),
    [
        ({}, 240, "set weights.directory = a folder on a local disk with 47.0 GB free"),
        ({"env": {"suite": "osworld", "slots": 32}}, 900, "set env.slots = "),
        ({"train": {"offload": "optimizer"}}, 320, 'set train.offload = "none"'),
        ({}, 150, "more main memory, or set model.lora"),
        ({}, 40, "more main memory, or a smaller model"),
    ],
)
def test_main_memory_has_a_cure_that_is_enough(sections: Sections, memory: int, part: str) -> None:
    room = Room(H100, gpus=8, found=True, memory=memory * 10**9)
    [found] = refused(room, sections)
    assert found.subject == "host"
    assert found.cure.startswith(part)
    if "env.slots" in found.cure:
        assert not refused(room, cured(sections, found.cure))


def test_a_disk_that_is_too_small_is_refused_and_one_that_is_short_is_a_caution() -> None:
    sections: Sections = {"weights": {"keep": 20}}
    room = Room(H100, gpus=8, found=True, disk=400 * 10**9)
    [found] = refused(room, sections)
    assert found.cure.startswith("free ")
    assert not refused(room, sections, "rollout")
    [left] = cautions(plan_of(), config_of(data={"max_gb": 100}), room)
    assert left.cure == "set data.max_gb = 78, or free some"
    assert not list(cautions(plan_of(), config_of(data={"max_gb": 78}), room))


def test_weight_sets_beyond_shared_memory_are_a_warning() -> None:
    host = plan_of().host
    wanted = host.shared + host.set_bytes
    enough = Room(H100, gpus=8, found=True, shared=wanted)
    assert not list(cautions(plan_of(), config_of(), enough))
    [found] = cautions(plan_of(), config_of(), Room(H100, gpus=8, found=True, shared=wanted - 1))
    assert "they are written to run.dir" in found.text
    given = {"weights": {"directory": "/fast"}}
    plan = plan_of(**given)
    assert plan.host.shared == plan.host.sets == 0

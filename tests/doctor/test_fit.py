"""Each need of a plan is compared with the host's resources."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from dart_cli.config.rules import Finding
from dart_cli.doctor.fit import HostCapacity
from dart_cli.doctor.plan import H100, make_plan
from dart_cli.doctor.plan_findings import plan_lines
from tests.doctor.parts import cautions, misfits
from tests.doctor.seven_b import CONFIG, CUT, config_of, plan_of

EIGHT = HostCapacity(H100, gpus=8, is_gpu_here=True)
Sections = dict[str, dict[str, Any]]


def refused(
    room: HostCapacity, sections: Sections | None = None, role: Any = None
) -> list[Finding]:
    """Return the errors about what does not fit on a host's GPUs."""
    config = config_of(**(sections or {}))
    return misfits(make_plan(config, CONFIG, CUT, room.gpu), config, room, role)


def cured(sections: Sections, cure: str) -> Sections:
    """Return the sections with the keys that a fix sets, as a user would write them."""
    result = {name: dict(section) for name, section in sections.items()}
    assert cure.startswith("set ")
    parts = re.split(r", (?=[a-z]+\.)", re.split(r", or |, and |, free ", cure)[0][4:])
    for part in parts:
        key, _, value = part.partition(" = ")
        section, _, name = key.partition(".")
        result.setdefault(section, {})[name] = tomllib.loads(f"value = {value}")["value"]
    return result


# --- GPUs ----------------------------------------------------------------------------------


def test_processes_on_one_gpu_without_room_for_both_are_refused() -> None:
    none: Sections = {"up": {"rollout_gpus": []}, "train": {"ranks": 3}}
    assert not refused(EIGHT, none)  # each gets its own
    sections = {**none, "bus": {"host": "127.0.0.1"}}  # others may be on other hosts
    [finding] = [each for each in refused(EIGHT, sections) if each.subject == "gpus"]
    assert "the trainer, rollout-0, rollout-1, rollout-2 and rollout-3 share GPU 0" in finding.text
    assert finding.cure == "set up.train_gpus = [0, 1, 2], up.rollout_gpus = [3, 4, 5, 6]"
    assert not refused(EIGHT, cured(sections, finding.cure))
    [finding] = refused(EIGHT, {**none, "rollout": {"device": "cuda:0"}})
    assert finding.cure.startswith('set rollout.device = "cuda", up.train_gpus = [0, 1, 2], up.')
    apart = {**sections, "rollout": {"device": "cuda:5"}, "up": {"rollouts": 1, "rollout_gpus": []}}
    assert not refused(EIGHT, apart)
    assert not refused(EIGHT, sections, "train")


def test_a_gpu_is_named_by_its_place_where_a_list_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    sections: Sections = {"train": {"ranks": 3}, "up": {"rollouts": 2, "rollout_gpus": []}}
    [finding] = refused(HostCapacity(H100, gpus=4, is_gpu_here=True), sections)
    assert "share place 0 of CUDA_VISIBLE_DEVICES and need" in finding.text


def test_too_few_gpus_are_named() -> None:
    sections: Sections = {"train": {"ranks": 3}, "up": {"rollouts": 2, "rollout_gpus": []}}
    [finding] = refused(HostCapacity(H100, gpus=4, is_gpu_here=True), sections)
    assert finding.cure.startswith(
        "5 GPUs (3 for the trainer, 2 for engines), or lower train.ranks, up.rollouts"
    )


# --- engines -------------------------------------------------------------------------------


def test_a_cache_on_the_cpu_that_holds_no_prompt_is_refused_with_the_bytes_that_do() -> None:
    """Neither a GPU with more memory nor vllm.gpu_memory_utilization would fix it."""
    room = HostCapacity(H100, on_cpu=True, memory=10**13)
    sections: Sections = {"rollout": {"device": "cpu"}, "up": {"rollout_gpus": []}}

    def errors(sections: Sections) -> list[Finding]:
        config = config_of(**sections)
        return misfits(make_plan(config, CONFIG, CUT, H100, on_cpu=True), config, room)

    [finding] = errors(sections)
    assert finding.text.startswith("an engine has room for 0.")
    value = re.search(r"vllm.options = (\{.*?\})", finding.cure)
    assert value is not None
    options = tomllib.loads(f"value = {value[1]}")["value"]
    assert not errors({**sections, "vllm": {"options": options}})


def test_a_cache_of_one_size_is_not_cured_by_another_gpu() -> None:
    sections: Sections = {"rollout": {"engine": "transformers"}, "policy": {"history_images": 32}}
    [finding] = refused(EIGHT, sections, "rollout")
    assert finding.cure == 'set policy.history_images lower, or rollout.engine = "vllm"'


def test_shared_memory_is_remounted_by_its_whole_size() -> None:
    """`size=` is the whole size of /dev/shm, of which other programs use a part."""
    config = config_of()
    plan = plan_of()
    sizes = []
    for used in (0, 50 * 10**9):
        room = HostCapacity(
            H100, gpus=8, is_gpu_here=True, memory=10**13, shared=10**9, shared_taken=used
        )
        [finding] = [each for each in cautions(plan, config, room) if "/dev/shm" in each.text]
        size = re.search(r"size=(\d+)G", finding.cure)
        assert size is not None
        sizes.append(int(size[1]))
    assert sizes[1] - sizes[0] == 50


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vllm": {"gpu_memory_utilization": 0.2}}, "vllm.gpu_memory_utilization"),
        ({"vllm": {"options": {"kv_cache_memory_bytes": 2 * 10**11}}}, "kv_cache_memory_bytes"),
    ],
)
def test_an_engine_without_room_names_its_settings(changes: Sections, key: str) -> None:
    [finding] = refused(EIGHT, changes, "rollout")
    assert finding.subject == "engine"
    assert key in finding.cure


def test_a_sequence_longer_than_the_engine_takes_is_refused() -> None:
    sections: Sections = {"vllm": {"max_model_len": 8192}}
    [finding] = refused(EIGHT, sections)
    assert "17467 tokens (turns of 100), vllm.max_model_len = 8192" in finding.text
    assert not refused(EIGHT, cured(sections, finding.cure))
    config = config_of()
    short = make_plan(config, {**CONFIG, "max_position_embeddings": 16_384}, CUT, H100)
    [finding] = misfits(short, config, EIGHT)
    assert "the model has 16384 positions" in finding.text
    assert "vllm" not in finding.cure
    assert not list(misfits(short, config, EIGHT, "train"))


def test_the_engine_line_says_which_turns_its_length_holds() -> None:
    sections: Sections = {"vllm": {"max_model_len": 24_576}}
    plan, config = plan_of(**sections), config_of(**sections)
    line = dict(plan_lines(plan, config, EIGHT))["engine"]
    assert "29 past turns of up to 345 tokens" in line
    assert 600 + 5 * 2691 + 29 * 345 + 512 <= 24_576 < 600 + 5 * 2691 + 29 * 346 + 512


def test_more_requests_than_have_room_are_a_warning() -> None:
    sections: Sections = {"rollout": {"max_batch": 64}, "up": {"rollouts": 1, "envs": 4}}
    [finding] = cautions(plan_of(**sections), config_of(**sections), EIGHT)
    assert finding.text.startswith("64 requests of 17467 tokens do not fit at once, only 47 do")
    fewer = cured(sections, finding.cure.replace(", or show", ", or"))
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
    whole = 2 * plan_of().shape.parameters
    assert {each.size for each in on_cpu.parts if each.name == "publication"} == {whole}
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


def test_too_little_main_memory_and_disk_are_refused() -> None:
    [finding] = refused(HostCapacity(H100, gpus=8, is_gpu_here=True, memory=150 * 10**9))
    assert finding.subject == "host"
    assert "model.lora" in finding.cure
    room = HostCapacity(H100, gpus=8, is_gpu_here=True, disk=200 * 10**9)
    [finding] = refused(room)
    assert finding.cure == "free 123.9 GB, or choose another run.dir"
    assert not refused(room, role="rollout")
    room = HostCapacity(H100, gpus=8, is_gpu_here=True, disk=400 * 10**9)
    [left] = cautions(plan_of(), config_of(data={"max_gb": 100}), room)
    assert left.cure == "set data.max_gb = 76, or free some"
    assert not list(cautions(plan_of(), config_of(data={"max_gb": 76}), room))


def test_weight_sets_beyond_shared_memory_are_a_warning() -> None:
    host = plan_of().host
    expected = host.shared + host.set_bytes
    enough = HostCapacity(H100, gpus=8, is_gpu_here=True, shared=expected)
    assert not list(cautions(plan_of(), config_of(), enough))
    [finding] = cautions(
        plan_of(), config_of(), HostCapacity(H100, gpus=8, is_gpu_here=True, shared=expected - 1)
    )
    assert "they are written to run.dir" in finding.text
    given = {"weights": {"directory": "/fast"}}
    plan = plan_of(**given)
    assert plan.host.shared == plan.host.sets == 0

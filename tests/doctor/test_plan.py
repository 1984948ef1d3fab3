"""The plan of a run: its figures follow from the model's sizes, and what cannot fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.architecture import shape_of
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import Screens
from dart_cli.config.published import PUBLISHED
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.machine import GPUS
from dart_cli.config.schema import VllmConfig
from dart_cli.config.schema.rollout import PREFIX_CACHE_MB
from dart_cli.doctor.fit import HostCapacity
from dart_cli.doctor.host_memory import EpisodeForm
from dart_cli.doctor.plan import H100, episode_tokens, make_plan
from dart_cli.doctor.plan_findings import plan_lines
from dart_cli.engines.vllm.room import FEATURE_SHARE, divide
from tests.doctor.parts import misfits
from tests.doctor.seven_b import CONFIG, CUT, config_of, plan_of

ROOT = Path(__file__).parents[2]
FULL_HD = EpisodeForm(steps=30, screen=2691, completion=100, header=600, images=5, most=0, turns=35)


# --- episodes ------------------------------------------------------------------------------


def test_a_full_hd_screen_is_2691_tokens_and_five_of_them_a_prompt_of_17555() -> None:
    plan = plan_of()
    assert plan.form.screen == 2691
    long = EpisodeForm(**{**vars(FULL_HD), "steps": 100})
    assert long.longest == 600 + 5 * 2691 + 35 * 100


def test_each_step_alone_is_what_its_prompts_add_up_to() -> None:
    result = episode_tokens(FULL_HD)
    prompts = [600 + min(step, 5) * 2691 + (step - 1) * 100 for step in range(1, 31)]
    assert result.alone == sum(prompts) + 30 * 100
    assert len(result.chains) == 26  # the first five steps extend one another
    assert result.chains[0] == (prompts[4] + 100, 5)


def test_eviction_makes_chains_and_keeps_as_many_screens_on_average() -> None:
    slide = episode_tokens(FULL_HD)
    evict = episode_tokens(EpisodeForm(**{**vars(FULL_HD), "images": 3, "most": 7}))
    assert [steps for _, steps in evict.chains] == [7, 5, 5, 5, 5, 3]
    assert evict.alone == slide.alone  # as many tokens, each step alone
    assert slide.tokens / evict.tokens > 3.3
    assert slide.read / evict.read > 3.2
    assert evict.screens_read < slide.screens_read / 3


def test_an_engine_reads_each_token_of_a_chain_once() -> None:
    whole = episode_tokens(EpisodeForm(**{**vars(FULL_HD), "images": 1, "most": 30}))
    [(tokens, steps)] = whole.chains
    assert steps == 30
    assert whole.read == tokens - 30 * 100
    assert whole.pairs < tokens**2 / 2


# --- memory --------------------------------------------------------------------------------


def test_a_seven_b_does_not_fit_two_ranks_of_80_gb() -> None:
    needs = {ranks: plan_of(train={"ranks": ranks, "pack_tokens": 256}).trainer for ranks in (2, 4)}
    assert needs[2] is not None
    assert needs[4] is not None
    assert needs[2].total > H100.memory > needs[4].total


def test_keys_and_values_of_a_token_are_57_kilobytes() -> None:
    shape = shape_of(CONFIG)
    assert 2 * shape.cached == 57_344
    engine = plan_of().engine
    assert engine is not None
    assert engine.prompts == pytest.approx(engine.cache / (57_344 * plan_of().longest))
    plain = plan_of(rollout={"engine": "transformers"}).engine
    assert plain is not None
    assert plain.cache == (4096 + 1024) * 2**20
    assert plain.prompts == pytest.approx(4096 * 2**20 / (57_344 * plan_of().longest))
    shared = plan_of(vllm={"tensor_parallel": 2}).engine
    assert shared is not None
    assert shared.weights == engine.weights // 2


def test_a_prompt_of_a_hybrid_keeps_one_state_and_the_keys_of_a_quarter_of_its_layers() -> None:
    """Figures of Qwen3.5-9B: 24 layers with 32 states of 128 x 128 in float32, and 3 columns of 8,192 numbers."""
    tree = {**PUBLISHED["qwen3_5"].tree, "model_type": "qwen3_5"}
    shape = shape_of(tree)
    assert 2 * shape.cached == 8 * 2 * 4 * 256 * 2 == 32_768
    assert shape.state_bytes(2) == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == 51_511_296
    cut = Screens(32, 65536, 16777216)
    for engine in ("vllm", "transformers"):
        plan = make_plan(config_of(rollout={"engine": engine}), tree, cut, H100)
        assert plan.engine is not None
        cache = plan.engine.cache - (PREFIX_CACHE_MB << 20 if engine == "transformers" else 0)
        prompt = plan.longest * 32_768 + 51_511_296
        assert plan.engine.prompts == pytest.approx(cache / prompt)


def test_the_state_of_the_longest_sequence_has_room_before_features() -> None:
    shape = shape_of({**PUBLISHED["qwen3_5"].tree, "model_type": "qwen3_5"})
    plain = replace(
        shape, delta=None, layers=shape.attending
    )  # as many keys and values, and no state
    sizes = {"wide": 2, "memory": H100.memory, "length": 20_000, "screen_tokens": 10**8}
    with_states, without = (
        divide(VllmConfig(), replace(each, text=shape.text), **sizes) for each in (shape, plain)
    )
    less = (without.feature_tokens - with_states.feature_tokens) * 2 * shape.width
    assert less == pytest.approx(51_511_296 / FEATURE_SHARE, abs=2 * shape.width)


def test_features_of_the_screens_in_play_are_beside_the_keys_and_values() -> None:
    """384 screens (64 slots, six each) of 2,691 vectors of 3,584 numbers, where a sixth of the room holds them."""
    plan = plan_of()
    engine = plan.engine
    assert engine is not None
    assert engine.screens == 384
    assert engine.features == 384 * 2691 * 3584 * 2
    assert engine.total == int(0.9 * H100.memory)
    batch = 8192 * 2 * (4 * 3584 + 2 * 18944)  # activations of a pass: 0.9 GB
    assert engine.passing == 4_000_000_000 + batch
    smaller = plan_of(vllm={"options": {"max_num_batched_tokens": 4096}}).engine
    assert smaller is not None
    assert smaller.passing == 4_000_000_000 + batch // 2


def test_vllm_on_a_cpu_takes_what_dart_gives_it_and_no_share_of_a_gpu() -> None:
    """dart_cli/engines/vllm/start.py asks it for 512 MiB of keys and values, whatever the memory."""
    sections: dict[str, dict[str, Any]] = {"rollout": {"device": "cpu"}, "up": {"rollout_gpus": []}}
    config = config_of(**sections)
    engine = make_plan(config, CONFIG, CUT, H100, on_cpu=True).engine
    assert engine is not None
    assert engine.cache == 512 << 20
    batch = 2 * (4 * 3584 + 2 * 18944)  # bytes of a token
    assert engine.passing == batch * 128_000, "positions of the model: prompts are not cut there"
    given = config_of(**sections, vllm={"options": {"kv_cache_memory_bytes": 10**9}})
    more = make_plan(given, CONFIG, CUT, H100, on_cpu=True).engine
    assert more is not None
    assert more.cache == 10**9
    assert more.prompts == pytest.approx(10**9 / (57_344 * plan_of().longest))


def test_features_never_take_the_room_of_the_longest_sequence() -> None:
    """On a card on which one sequence fits, vLLM would refuse to start without it."""
    shape, length = shape_of(CONFIG), 24_576
    config = VllmConfig(max_model_len=length)
    for spare in (-1, 0, 6_000_000, 10**10):
        whole = 2 * shape.parameters + 4 * 10**9 + 8192 * 2 * (4 * 3584 + 2 * 18944)
        memory = int((whole + length * 57_344 + spare) / 0.9) + 2
        room = divide(config, shape, wide=2, memory=memory, length=length, screen_tokens=10**9)
        assert room.features == pytest.approx(max(0, spare) // 6, abs=7168)
        assert room.features + room.cache == pytest.approx(length * 57_344 + spare, abs=4)
    given = VllmConfig(options={"kv_cache_memory_bytes": 10**10})
    room = divide(given, shape, wide=2, memory=H100.memory, length=length, screen_tokens=10**9)
    assert room.cache == 10**10
    assert room.total < H100.memory


def test_features_of_deeper_layers_are_counted_and_each_gpu_of_a_shared_model_has_all() -> None:
    """Qwen3-VL gives three layers features of their own beside the first."""
    deep = replace(shape_of(CONFIG), deepstack=3)
    for share in (1, 2):
        config = VllmConfig(tensor_parallel=share)
        room = divide(
            config, deep, wide=2, memory=H100.memory, length=24_576, screen_tokens=100_000
        )
        assert room.feature_tokens == 100_000
        assert room.features == 100_000 * 4 * 3584 * 2


# --- what fits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "gpus", "hint"),
    [
        ({"recompute": "none"}, 8, 'set train.recompute = "layer"'),
        ({"pack_tokens": 200_000}, 8, "set train.pack_tokens = 17467"),
        ({"ranks": 1}, 8, "set train.ranks = 3"),
        ({"ranks": 1}, 1, 'set train.offload = "optimizer"'),
        ({"ranks": 1, "recompute": "none"}, 8, "several of: train.recompute"),
    ],
)
def test_the_hint_is_the_first_change_that_is_enough_by_itself(
    changes: dict[str, Any], gpus: int, hint: str
) -> None:
    given = {"pack_tokens": 16_384, **changes}
    room = HostCapacity(H100, gpus=gpus, is_gpu_here=True)
    result = misfits(plan_of(train=given), config_of(train=given), room)[0]
    assert result.subject == "trainer"
    assert result.cure.startswith(hint)


def test_a_plan_says_its_assumptions() -> None:
    lines = dict(plan_lines(plan_of(), config_of(), HostCapacity(H100)))
    assert "assumed, because no GPU is here" in lines["plan for"]
    assert "30 steps" in lines["plan for"]
    assert "2691 tokens each" in lines["pack"]
    assert set(lines) == {"plan for", "trainer", "pack", "engine", "host", "disk"}


def test_a_longer_sequence_than_a_pack_is_said() -> None:
    given = {"pack_tokens": 4096}
    plan = plan_of(train=given)
    assert plan.setup.tokens == plan.longest
    lines = dict(plan_lines(plan, config_of(train=given), HostCapacity(H100)))
    assert "longer than train.pack_tokens = 4096, so it is computed alone" in lines["pack"]


# --- the host ------------------------------------------------------------------------------


def test_adapters_make_weight_sets_and_checkpoints_small() -> None:
    whole, adapters = plan_of(), plan_of(model={"lora": {"rank": 32}})
    assert whole.host.shared > 40 * adapters.host.shared
    assert whole.host.checkpoints > 40 * adapters.host.checkpoints
    assert adapters.setup.adapters == adapters.shape.adapters(32)
    assert adapters.trainer is not None
    assert adapters.trainer.permanent["reference"] == 0


# --- shipped configurations ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["ui-tars-7b", "osworld"])
@pytest.mark.parametrize("history", ["slide", "evict"])
def test_a_shipped_configuration_fits_eight_gpus(name: str, history: str) -> None:
    """In both forms of history; test_planned.py has the figures of its comments."""
    path = ROOT / "configs" / f"{name}.toml"
    evict = ["policy.history_images=3", "policy.history_images_most=7"]
    config = load_config(path, evict if history == "evict" else [])
    assert sorted([*config.up.train_gpus, *config.up.rollout_gpus]) == list(range(8))
    assert not list(broken_rules(GPUS, config))
    plan = make_plan(config, CONFIG, CUT, H100)
    room = HostCapacity(H100, gpus=8, is_gpu_here=True, memory=10**12)
    assert not list(misfits(plan, config, room))
    assert plan.form.screen == 2691
    assert plan.longest <= config.vllm.max_model_len
    assert plan.longest <= config.train.pack_tokens
    assert plan.engine is not None
    assert plan.engine.prompts >= config.rollout.max_batch
    for ranks in (2, 3):
        fewer = config.model_copy(
            update={"train": config.train.model_copy(update={"ranks": ranks})}
        )
        fits = not list(misfits(make_plan(fewer, CONFIG, CUT, H100), fewer, room))
        assert fits == (ranks == 3)  # as its comment says

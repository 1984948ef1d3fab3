"""docs/hardware.md holds the tables that the formulas give, and says what no GPU has run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.hardware_tables import BEGIN, CUT, MODELS, split, tables, with_tables
from benchmarks.gpu.speeds import H100 as SPEED
from benchmarks.gpu.speeds import H200, Seconds, gpu_speed, seconds_of, vision_flops
from dart_cli.config.architecture import shape_of
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import Screens
from dart_cli.doctor.plan import H100, make_plan
from tests.doctor.seven_b import CONFIG, PREPROCESSOR, config_of, plan_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hardware.md"
NEWER_CUT = Screens(32, 65536, 16_777_216)
"""As in Qwen3.5's preprocessor."""


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python benchmarks/gpu/hardware_tables.py"
    assert with_tables(with_tables(page)) == with_tables(page)
    for name in ("tables", "covered"):
        with pytest.raises(ValueError, match="the page needs"):
            with_tables(page.replace(BEGIN.format(name=name), ""))


def test_its_models_are_those_of_their_names() -> None:
    billions = [round(shape_of(model.tree).parameters / 1e9, 2) for model in MODELS]
    # As their pages on the hub say, for Qwen3.5 without the layer that only drafts.
    assert billions == [3.75, 8.29, 33.45, 4.54, 9.41, 27.36]
    assert shape_of(MODELS[1].tree) == shape_of(CONFIG)
    assert (28, PREPROCESSOR["min_pixels"], PREPROCESSOR["max_pixels"]) == CUT
    assert len([line for line in tables() if line.startswith("| all, recompute |")]) == 18


def test_the_page_names_main_memory_as_its_table_and_doctor_have_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    prose = " ".join(page.split(BEGIN.format(name="tables"))[0].split())
    rows = {line.split(" | ")[0]: line for line in tables() if "weights |" in line}
    found = re.findall(
        r"(\d+) (?:\w+ )?of 80 GB with `?[^0-9]*?(\d+) GB of main\s+memory", prose.replace(",", "")
    )
    assert [ranks for ranks, _ in found] == ["1", "2"]
    for model, (ranks, figure) in zip((MODELS[1], MODELS[2]), found, strict=True):
        name = model.name.split()[0]
        more = round(1.5 * (int(ranks) - 1))
        cell = rows[f"| {name}, all weights"].removesuffix(" |").split(" | ")[4]
        assert int(cell.removesuffix(" GB")) + more == pytest.approx(int(figure), abs=1)
        config = config_of(
            train={"ranks": int(ranks), "offload": "optimizer"}, data={"high_entropy": 0.8}
        )
        plan = make_plan(config, model.tree, CUT, H100)
        assert f"{plan.host.memory_of('train') / 1e9:.0f}" == figure


def test_only_this_page_says_that_nothing_ran_on_a_gpu() -> None:
    """One place to change once it has."""
    told = [
        path.name
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        if path.name != "log.md"
        and any(
            words in " ".join(path.read_text(encoding="utf-8").split())
            for words in (
                "on a GPU nothing",
                "on GPUs nothing",
                "on GPUs none",
                "nothing has been run",
            )
        )
    ]
    assert told == []
    assert "## Not yet measured on a GPU" in " ".join(PAGE.read_text().split())


def seconds(**sections: dict[str, Any]) -> Seconds:
    return seconds_of(config_of(**sections), plan_of(**sections), SPEED)


def test_the_tower_takes_16_teraflops_for_a_full_hd_screen() -> None:
    shape = shape_of(CONFIG)
    assert vision_flops(shape, 2691) == pytest.approx(16.3e12, rel=0.1)
    assert vision_flops(shape, 1196) == pytest.approx(6.6e12, rel=0.1)


def test_more_of_everything_takes_longer() -> None:
    plain = seconds()
    fewer = seconds(train={"ranks": 8}, up={"rollouts": 2})
    assert fewer.update == pytest.approx(plain.update / 2)
    assert fewer.engines == pytest.approx(plain.engines * 2, rel=0.05)
    assert "rollout GPUs will wait" in plain.waits
    again = seconds(train={"reuse": 1})
    assert again.training == 2 * again.update == pytest.approx(2 * plain.update)
    evict = {"history_images": 3, "history_images_most": 7}
    chained = seconds(policy=evict)
    assert plain.update / chained.update > 3


def test_a_gpu_is_known_by_its_name() -> None:
    assert gpu_speed("NVIDIA H200", 5) == type(H200)("NVIDIA H200", 5, H200.flops, H200.bandwidth)
    assert gpu_speed("a toaster", 5) is None


@pytest.mark.parametrize(
    ("name", "history"),
    [
        *product(("ui-tars-7b", "osworld"), ("slide", "evict")),
        *product(("qwen3.5-9b", "qwen3.5-4b-27b"), ("slide",)),
    ],
)
def test_no_other_split_of_eight_gpus_is_faster_than_the_shipped_one(
    name: str, history: str
) -> None:
    newer = {"qwen3.5-4b-27b": MODELS[3], "qwen3.5-9b": MODELS[4]}.get(name)
    tree, screens = (newer.tree, NEWER_CUT) if newer else (CONFIG, CUT)
    evict = ["policy.history_images=3", "policy.history_images_most=7"]
    config = load_config(ROOT / "configs" / f"{name}.toml", evict if history == "evict" else [])

    def slower_side(ranks: int) -> float:
        changed = config.model_copy(
            update={
                "train": config.train.model_copy(update={"ranks": ranks}),
                "up": config.up.model_copy(update={"rollouts": 8 - ranks}),
            }
        )
        found = seconds_of(changed, make_plan(changed, tree, screens, H100), SPEED)
        return max(found.training, found.rollouts)

    assert min(range(3, 8), key=slower_side) == config.train.ranks
    found = seconds_of(config, make_plan(config, tree, screens, H100), SPEED)
    is_bound = (name, history) == ("osworld", "evict")
    assert ("for boots" in found.waits) is is_bound


def test_an_engine_that_keeps_the_features_of_screens_encodes_each_once() -> None:
    """Of five screens in a prompt, four were encoded for the step before: five times the tower's work without."""
    kept, plan = plan_of(), plan_of()
    assert plan.engine is not None
    forgets = replace(plan, engine=replace(plan.engine, screens=plan.engine.screens // 2 - 1))
    few = seconds_of(config_of(), forgets, SPEED)
    episodes, steps, engines = 8 * 6, 30, 4
    saved = episodes * (plan.episode.screens_read - steps) * vision_flops(shape_of(CONFIG), 2691)
    assert few.engines - seconds_of(config_of(), kept, SPEED).engines == pytest.approx(
        saved / (engines * SPEED.flops * 0.4)
    )


def test_so_many_machines_boot_at_once_bound_the_episodes_of_an_hour() -> None:
    """12 at once, 60 s each: 48 in 4 rounds, 720 an hour; with 8 it is 6 rounds, 480 an hour."""
    machine = {"vm": "Ubuntu.qcow2", "pause_s": 2.0}
    half_of_the_cores, eight = (
        seconds(env={"slots": 32, "options": options})
        for options in (machine, machine | {"boots": 8})
    )
    assert (half_of_the_cores.boots_at_once, half_of_the_cores.boots) == (12, 48 / 12 * 60)
    assert (eight.boots_at_once, eight.boots) == (8, 48 / 8 * 60)
    assert seconds(env={"slots": 32, "options": {"pause_s": 2.0}}).boots == 0
    config = config_of(env={"slots": 32, "options": machine | {"boots": 8}})
    told = split(config, plan_of(env={"slots": 32, "options": machine | {"boots": 8}}))
    assert "8 boots at once (env.options.boots) of 60 s are 480 episodes an hour" in told

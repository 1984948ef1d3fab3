"""docs/hardware.md holds the tables that the formulas give, and says what no GPU has run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dart_cli.doctor.hardware import BEGIN, CUT, MODELS, tables, with_tables
from dart_cli.doctor.plan import make_plan
from dart_cli.doctor.shape import shape_of
from dart_cli.doctor.speeds import H100
from tests.doctor.seven_b import CONFIG, PREPROCESSOR, config_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hardware.md"


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m dart_cli.doctor.hardware"
    assert with_tables(with_tables(page)) == with_tables(page)
    with pytest.raises(ValueError, match="the page needs"):
        with_tables(page.replace(BEGIN, ""))


def test_its_models_are_those_of_their_names() -> None:
    billions = [round(shape_of(model.tree).parameters / 1e9, 2) for model in MODELS]
    assert billions == [3.75, 8.29, 33.45]  # as their pages on the hub say
    assert shape_of(MODELS[1].tree) == shape_of(CONFIG)
    assert (28, PREPROCESSOR["min_pixels"], PREPROCESSOR["max_pixels"]) == CUT
    assert len([line for line in tables() if line.startswith("| all, recompute |")]) == 9


def test_the_page_names_main_memory_as_its_table_and_doctor_have_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    prose = " ".join(page.split(BEGIN)[0].split())
    rows = {line.split(" | ")[0]: line for line in tables() if "weights |" in line}
    found = re.findall(r"(\d+) (?:\w+ )?of 80 GB with `?[^0-9]*?(\d+) GB of main memory", prose)
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
    assert "On a GPU nothing of the following has run yet" in " ".join(PAGE.read_text().split())

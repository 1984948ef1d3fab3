"""Our loss and gradient against other libraries' formulas: fewer cases of benchmarks/exactness/lossparity.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.exactness.lossparity import LIMIT, VARIANTS, compare, main
from benchmarks.exactness.lossparity_formulas import FORMULAS

RESULTS = Path("benchmarks/results/lossparity.json")


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_other_libraries(name: str) -> None:
    for comparator, worst in compare(name, cases=20, seed=1).items():
        assert worst.value <= LIMIT, comparator
        assert worst.gradient <= LIMIT, comparator


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("grpo_token_mean", {"clip_high": 0.01}),
        ("truncated_is", {"importance_cap": 1e9}),
        ("kl_k3_clamped", {"kl_beta": 0.0}),
    ],
)
def test_another_formula_is_noticed(name: str, changed: dict[str, float]) -> None:
    worst = compare(name, cases=20, seed=1, **changed)["derived"]
    assert max(worst.value, worst.gradient) > 1e-4


def test_the_last_line_has_the_largest_difference_of_every_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert main(["--cases", "2", "--out", str(out)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == json.loads(out.read_text())
    committed = json.loads(RESULTS.read_text())
    # Measured when there were more formulas to choose from.
    assert line["max_abs_difference"].keys() <= committed["max_abs_difference"].keys()
    assert list(VARIANTS) == list(FORMULAS) == list(line["max_abs_difference"])
    assert committed["cases"] == 500
    assert max(committed["max_abs_difference"].values()) <= LIMIT

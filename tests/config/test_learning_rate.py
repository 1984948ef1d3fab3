"""The learning rate of a file that sets none is its model's; one that is set stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.dry_run import describe
from dart_cli.config.learning_rate import LARGE, RUN, SMALL, rate_for, rate_origin
from dart_cli.config.load import config_of_model, load_config
from dart_cli.doctor.examine import examine
from dart_cli.runtime.run_dir import read_run, save_config
from tests.config.model_parts import write_model
from tests.doctor.seven_b import write_seven_b


def file_of(folder: Path, model: str, train: str = "") -> Path:
    """A configuration of a run in `folder`."""
    path = folder / "run.toml"
    path.write_text(
        f'[run]\ndir = "{folder / "run"}"\n[model]\npath = "{model}"\n[train]\n{train}\n'
    )
    return path


def test_a_file_without_a_rate_has_that_of_its_model(tmp_path: Path) -> None:
    seven_b = write_seven_b(tmp_path / "7b")
    small = write_model(tmp_path / "small")
    for model, rate in (("builtin:tiny", 4e-4), ("builtin:small", 1e-4), (seven_b, 1e-6)):
        assert load_config(file_of(tmp_path, str(model))).train.lr == rate
    assert load_config(file_of(tmp_path, str(small))).train.lr == 4e-4
    assert config_of_model(seven_b).train.lr == 1e-6
    assert load_config(file_of(tmp_path, str(tmp_path / "absent"))).train.lr == 1e-6


@pytest.mark.parametrize("rate", [0.0, 1e-6, 3e-4])
def test_a_rate_that_is_set_stays(tmp_path: Path, rate: float) -> None:
    config = load_config(file_of(tmp_path, "builtin:tiny", f"lr = {rate}"))
    assert config.train.lr == rate
    assert rate_origin(config) == ""
    assert "from the model" not in dict(describe(config, "train"))["train"]
    over = load_config(file_of(tmp_path, "builtin:tiny"), [f"train.lr={rate}"])
    assert over.train.lr == rate


def test_a_larger_model_has_no_larger_rate_between_the_two_ends() -> None:
    sizes = [SMALL / 9, SMALL, 1e7, 1e8, 1e9, 3e9, LARGE, 9 * LARGE]
    rates = [rate_for(size, RUN) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (4e-4, 1e-6)
    assert 1e-6 < rate_for(1e8, RUN) < 1e-4


def test_the_dry_run_and_doctor_tell_that_the_rate_is_the_models(tmp_path: Path) -> None:
    path = file_of(tmp_path, str(write_seven_b(tmp_path / "7b")))
    told = dict(describe(load_config(path), "train"))["train"]
    assert "lr 1e-06 (from the model: 8.3 billion parameters)" in told
    [finding] = [each for each in examine(path, []) if each.subject == "train.lr"]
    assert "from the model: 8.3 billion" in finding.text


def test_a_run_keeps_the_rate_that_it_was_started_with(tmp_path: Path) -> None:
    path = file_of(tmp_path, "builtin:tiny")
    config = load_config(path)
    config.run.dir.mkdir()
    save_config(config)
    kept = read_run(config.run.dir)
    assert kept.train.lr == 4e-4
    assert load_config(path).train.rate == kept.train.rate

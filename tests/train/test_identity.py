"""Promises of a checkpoint's identity: a run goes on with the model, folder and adapters it began with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.errors import ConfigError, ModelError
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.runtime.run_dir import save_config
from dart_cli.train.checkpoints import identity
from dart_cli.train.checkpoints.identity import (
    STATE,
    TrainedPart,
    TrainerProgress,
    refuse_other,
)
from dart_cli.weights.folder import model_identity
from tests.train.parts import save

LORA = LoraConfig(rank=4, alpha=8.0)
TENSORS = {"w": torch.zeros(1)}


def trains(config: Config, lora: LoraConfig | None, **model: object) -> Config:
    """The configuration with these adapters."""
    changed = config.model.model_copy(update={"lora": lora, **model})
    return config.model_copy(update={"model": changed})


def began(config: Config, updates: int = 1, model: str = "") -> Path:
    """A checkpoint of a run that was started with `config`."""
    directory, progress = config.run.dir / "checkpoints", TrainerProgress(updates=updates)
    return save(directory, progress, TENSORS, model=model, trained=TrainedPart.of(config))


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (LORA, LORA.model_copy(update={"alpha": 16.0}), r"lora\.alpha = 16\.0, but it was 8\.0"),
        (LORA, LORA.model_copy(update={"rank": 2}), r"lora\.rank = 2, but it was 4"),
        (LORA, None, r"lora is not set, but rank 4 was trained"),
        (None, LORA, r"lora is set, but there were no adapters"),
    ],
    ids=["alpha", "rank", "removed", "added"],
)
def test_other_adapters_than_the_checkpoint_s_are_refused_in_one_line(
    config: Config, before: LoraConfig | None, now: LoraConfig | None, line: str
) -> None:
    refuse_other(trains(config, now))  # there is no checkpoint yet
    path = began(trains(config, before))
    refuse_other(trains(config, before))
    with pytest.raises(ConfigError, match=rf"^model\.{line}") as refused:
        refuse_other(trains(config, now))
    assert refused.value.exit_code == 2
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_was_trained_cannot_be_frozen(config: Config) -> None:
    began(trains(config, None, freeze_vision=True))
    refuse_other(trains(config, None))
    began(trains(config, None), updates=2)
    with pytest.raises(ConfigError, match=r"model\.freeze_vision = true, but .* was trained"):
        refuse_other(trains(config, None, freeze_vision=True))


def test_a_state_that_cannot_be_read_is_passed_over(config: Config) -> None:
    began(trains(config, LORA))
    (began(trains(config, None), updates=2) / STATE).write_text("{")
    refuse_other(trains(config, LORA))
    with pytest.raises(ConfigError, match="c000001"):
        refuse_other(trains(config, None))


def test_another_folder_is_read_only_where_the_run_names_another_one(
    config: Config, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began(config, model=model_identity(tiny_folder))
    read: list[Path] = []
    digest: Callable[[Path], str] = identity.model_identity

    def counted(folder: Path) -> str:
        read.append(folder)
        return digest(folder)

    monkeypatch.setattr(identity, "model_identity", counted)
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder in (copy, other):
        folder.mkdir()
        for file in tiny_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    [weights] = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    save_config(config)
    refuse_other(config)
    refuse_other(trains(config, None, path=f"{tiny_folder}/../{tiny_folder.name}"))
    assert read == []
    refuse_other(trains(config, None, path=str(copy)))
    with pytest.raises(ModelError, match="put the folder back") as refused:
        refuse_other(trains(config, None, path=str(other)))
    assert refused.value.exit_code == 2
    assert read == [copy, other]


def test_no_torch_is_needed_to_read_it() -> None:
    script = f"import sys, {identity.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

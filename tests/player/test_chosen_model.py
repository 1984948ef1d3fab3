"""Which weights play."""

from __future__ import annotations

from pathlib import Path

import torch

from bus.weights import WeightsPublished
from dart_cli.config.schema import Config, RunConfig
from dart_cli.data.store.open import DATABASE, open_store
from dart_cli.player.chosen_model import chosen_weights
from tests.weights.sets import publish


def test_the_newest_announced_version_plays_and_without_a_database_the_newest(
    tmp_path: Path,
) -> None:
    config = Config(run=RunConfig(dir=tmp_path / "run"))
    folder = config.run.dir / "weights"
    versions = [publish({"w": torch.tensor([float(each)])}, folder, each) for each in range(4)]
    config.run.dir.chmod(0o700)
    with open_store(config.run.dir) as store:
        for version, digest in ((1, versions[1].digest), (2, "of other weights")):
            row = WeightsPublished(policy_version=version, path="", digest=digest, updates=version)
            store.add_version(row, float(version))
    assert chosen_weights(config, None) == (versions[1].path, 1)
    assert chosen_weights(config, folder) == (versions[3].path, 3)
    (config.run.dir / DATABASE).unlink()
    assert chosen_weights(config, None) == (versions[3].path, 3)

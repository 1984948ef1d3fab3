"""The rank of a process, from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import ConfigError
from dart_cli.config.schema import Config, RunConfig, TrainConfig
from dart_cli.train.ranks.watch import RankBoard, is_ranked, membership, rank_of

HALVES: list[dict[str, str]] = [{}, {"RANK": "1"}, {"WORLD_SIZE": "8"}]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("environment", HALVES, ids=str)
def test_one_of_torchruns_variables_alone_means_nothing(
    run_dir: Path, environment: dict[str, str], ranks: int
) -> None:
    config = Config(run=RunConfig(dir=run_dir), train=TrainConfig(ranks=ranks))
    assert rank_of(environment) == 0
    assert is_ranked(config, environment) == (ranks > 1)
    mine = membership(config, environment)
    assert (mine.rank, mine.size, mine.is_ours) == (0, ranks, True)


@pytest.mark.parametrize("environment", HALVES, ids=str)
def test_only_boards_of_earlier_starts_are_removed(
    run_dir: Path, environment: dict[str, str]
) -> None:
    config = Config(run=RunConfig(dir=run_dir), train=TrainConfig(ranks=2))
    others = [run_dir / "checkpoints", run_dir / "weights", run_dir / "ranks" / "other"]
    earlier = membership(config, environment).folder
    for folder in others:
        folder.mkdir()
    mine = membership(config, environment).folder
    RankBoard(mine).remove_others()
    assert mine.is_dir()
    assert not earlier.exists()
    assert all(folder.is_dir() for folder in others)


def test_torchrun_gives_rank_and_size(run_dir: Path) -> None:
    config = Config(run=RunConfig(dir=run_dir))
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    mine = membership(config, environment)
    assert (mine.rank, mine.size, mine.local_rank, mine.is_ours) == (3, 4, 1, False)
    assert is_ranked(config, environment)


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("1", "two")], ids=str
)
def test_what_is_no_rank_of_torchruns_is_refused(run_dir: Path, rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        membership(Config(run=RunConfig(dir=run_dir)), {"RANK": rank, "WORLD_SIZE": size})


def test_another_number_of_ranks_than_torchruns_is_refused(run_dir: Path) -> None:
    config = Config(run=RunConfig(dir=run_dir), train=TrainConfig(ranks=4))
    with pytest.raises(ConfigError, match="2 processes"):
        membership(config, {"RANK": "0", "WORLD_SIZE": "2"})

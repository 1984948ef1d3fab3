"""The group of one rank."""

from dart_cli.train.rank_group import RankGroup, SingleRank


def test_one_process_gathers_its_own() -> None:
    rank_group: RankGroup = SingleRank()
    assert (rank_group.rank, rank_group.size) == (0, 1)
    assert rank_group.gather(b"mine") == [b"mine"]

"""The group of one rank."""

import torch

from dart_cli.train.ranks.group import RankGroup, SingleRank


def test_one_process_sums_and_gathers_its_own() -> None:
    rank_group: RankGroup = SingleRank()
    values = torch.tensor([0.1, 2.0], dtype=torch.float32, requires_grad=True)
    total = rank_group.total(values)
    assert (rank_group.rank, rank_group.size) == (0, 1)
    assert total.dtype == torch.float64
    assert not total.requires_grad
    assert total.tolist() == values.detach().double().tolist()
    assert rank_group.gathered(b"mine") == [b"mine"]

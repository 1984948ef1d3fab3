"""The crew of one process."""

import torch

from dart_cli.train.crew import Alone, Crew


def test_one_process_sums_and_gathers_its_own() -> None:
    crew: Crew = Alone()
    values = torch.tensor([0.1, 2.0], dtype=torch.float32, requires_grad=True)
    total = crew.total(values)
    assert (crew.rank, crew.size) == (0, 1)
    assert total.dtype == torch.float64
    assert not total.requires_grad
    assert total.tolist() == values.detach().double().tolist()
    assert crew.gathered(b"mine") == [b"mine"]

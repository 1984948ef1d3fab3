"""Promises of sharded tensors: saved on some ranks, read on any other number, by our code or torch's."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bus.errors import CheckpointError
from dart_cli.train.checkpoints import shards
from dart_cli.train.checkpoints.checkpoint import load
from dart_cli.train.checkpoints.shards import SavedTensors, Staging, blocks, stage, write
from tests.train.sharded_training import trained
from tests.train.world import run_world

SAVED_AT, LAST = 3, 6


def train(folder: Path, ranks: int, first: int, save_at: int, directory: Path) -> Path:
    """Train on so many processes; return the file with the whole state at the end."""
    out = folder / f"{first}-{save_at}-on-{ranks}.safetensors"
    run_world(ranks, trained, directory, first, LAST, save_at, out)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, torch.Tensor]:
    """Train on two ranks without a break; a checkpoint is written beside steps 4 to 6."""
    return load_file(train(folder, 2, 0, SAVED_AT, folder / "checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saved_on_two_ranks_goes_on_on_any_number(
    folder: Path, straight: dict[str, torch.Tensor], ranks: int
) -> None:
    resumed = load_file(train(folder, ranks, SAVED_AT, 0, folder / "checkpoints"))
    assert resumed.keys() == straight.keys()
    assert any(name.endswith("/exp_avg_sq") for name in straight)
    for name, value in straight.items():
        if ranks == 2:
            assert torch.equal(resumed[name], value), name
        else:
            torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_each_rank_writes_its_part_once_and_torch_reads_them_too(
    folder: Path, straight: dict[str, torch.Tensor]
) -> None:
    path = folder / "checkpoints" / f"c{SAVED_AT:06d}"
    files = sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == ["r000-000.safetensors", "r001-000.safetensors"]
    tensors = load(path).tensors
    assert tensors.names == straight.keys()
    numbers = sum(value.numel() for file in files for value in load_file(file).values())
    generator = torch.get_rng_state().numel()
    assert numbers == sum(value.numel() for value in straight.values()) + generator

    from torch.distributed.checkpoint import load as torch_load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    names = [name for name in straight if tensors.shape(name)]  # it reads no scalars
    by_torch = {name: torch.zeros_like(straight[name]) for name in names}
    with pytest.warns(UserWarning, match="in a single process"):
        torch_load(by_torch, storage_reader=HuggingFaceStorageReader(str(path)))
    for name in names:
        assert torch.equal(by_torch[name], tensors.whole(name)), name


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refused)
    state = {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(3.0)}
    write(tmp_path, stage(state, Staging()))
    saved = SavedTensors.of_files(list(tmp_path.iterdir()))
    assert all(torch.equal(saved.whole(name), value) for name, value in state.items())


def test_pinned_memory_is_hardly_more_than_what_is_staged() -> None:
    """A 7B's layers, of which most would take twice as much one by one: they are just above 2^28 bytes."""
    layer = {
        "gate": 18_944,
        "up": 18_944,
        "down": 18_944,
        "q": 3_584,
        "o": 3_584,
        "k": 512,
        "v": 512,
    }
    sizes = {f"{name}.{n}": rows * 3_584 * 4 for name, rows in layer.items() for n in range(28)}
    sizes |= {f"norm.{n}": 3_584 * 4 for n in range(28)} | {"none": 0}
    result = blocks(sizes)
    assert {name: end - begin for _, each in result for name, (begin, end) in each.items()} == sizes
    for size, places in result:
        assert size.bit_count() == 1
        ends = [0, *(end for _, end in places.values())]
        for before, (begin, end) in zip(ends, places.values(), strict=False):
            assert before <= begin
            assert begin % 64 == 0
            assert end <= size
    assert sum(size for size, _ in result) < 1.1 * sum(sizes.values())


@pytest.mark.parametrize("block_bytes", [1, 1 << 10, 1 << 30])
def test_staged_parts_are_what_was_there_and_use_their_memory_again(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_bytes)
    staging = Staging()
    state = {
        "a": torch.randn(30, 7),
        "t": torch.randn(5, 9).mT,
        "b": torch.randn(3).bfloat16(),
        "s": torch.tensor(3),
        "none": torch.empty(0, 4),
    }
    before: list[int] = []
    for value in (1, 2):
        state["a"].fill_(value)
        parts = stage(state, staging)
        assert all(torch.equal(part.tensor, state[part.name]) for part in parts)
        places = [part.tensor.data_ptr() for part in parts]
        assert before in ([], places)
        before = places
    state["a"] = torch.randn(40, 7)  # of another model
    del state["b"]
    parts = stage(state, staging)
    assert {part.name for part in parts} == state.keys()
    assert all(torch.equal(part.tensor, state[part.name]) for part in parts)


def test_a_part_that_is_missing_or_of_another_tensor_is_noticed(tmp_path: Path) -> None:
    def part(file: str, values: torch.Tensor, offset: list[int]) -> Path:
        places = json.dumps({"w": {"saved_offsets": offset}})
        save_file({"w": values}, tmp_path / file, metadata={"DCP_SHARDING_INFO": places})
        return tmp_path / file

    first = part("a.safetensors", torch.zeros(2, 3), [0, 0])
    second = part("b.safetensors", torch.ones(1, 3), [2, 0])
    saved = SavedTensors.of_files([first, second])
    assert saved.whole("w").tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    with pytest.raises(CheckpointError, match="only parts of w"):
        SavedTensors.of_files([second])
    for values, offset in (
        (torch.ones(1, 3, dtype=torch.float64), [2, 0]),
        (torch.ones(3), [0]),
        (torch.ones(1, 3), [2]),
        (torch.ones(1, 3), [-1, 0]),
        (torch.ones(1, 3), [1, 0]),
    ):
        with pytest.raises(CheckpointError):
            SavedTensors.of_files([first, part("c.safetensors", values, offset)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
@pytest.mark.parametrize("file_bytes", [1, 1 << 20])
def test_tensors_of_any_kind_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], file_bytes: int
) -> None:
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    state = {"a": values, "b/x": values + 1, "c": values.T if values.ndim == 2 else values}
    write(tmp_path, stage(state, Staging()), file_bytes=file_bytes)
    saved = SavedTensors.of_files(sorted(tmp_path.iterdir()))
    for name, value in state.items():
        assert saved.dtype(name) == dtype
        assert torch.equal(saved.whole(name), value)


def test_a_shape_or_a_name_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, stage({"a": torch.ones(2), "b": torch.ones(2)}, Staging()))
    saved = SavedTensors.of_files(list(tmp_path.iterdir()))
    mine = torch.zeros(2)
    for other in ({"b": torch.zeros(3)}, {"c": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"it holds no c|its b is \[2\], the model's \[3\]"):
            saved.fill({"a": mine, **other})
    assert mine.tolist() == [0.0, 0.0]


def test_the_order_of_the_tensors_does_not_change_the_bytes(tmp_path: Path) -> None:
    """A run that was resumed has its optimizer's state in another order."""
    state = {"a": torch.ones(2), "a/x": torch.zeros(2), "b": torch.ones(3)}
    written = []
    for number, names in enumerate((list(state), list(reversed(state)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        digests = write(folder, stage({name: state[name] for name in names}, Staging()))
        written.append(digests)
    assert written[0] == written[1]

"""A folder of Parquet files appears whole or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from bus.errors import ExchangeError
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import COLUMNS
from dart_cli.data.exchange.parquet_write import write_folder
from tests.data.exchange.parts import png, trajectory, written


def test_hugging_face_datasets_reads_screenshots_as_images(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", trajectory())
    table = pq.read_table(folder / "trajectories-00000.parquet")
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == table.column_names == list(COLUMNS)
    assert features["screenshot"] == features["final_screenshot"] == {"_type": "Image"}
    assert features["token_ids"]["feature"] == {"dtype": "int32", "_type": "Value"}
    first, last = table.to_pylist()
    assert Image.open(io.BytesIO(first["screenshot"]["bytes"])).size == (28, 28)
    assert first["screenshot"]["path"].endswith(".png")
    assert first["final_screenshot"] is None
    assert last["final_screenshot"]["bytes"] == png(99)


def test_shards_end_between_trajectories_and_read_back_in_order(tmp_path: Path) -> None:
    sent = [trajectory(f"t{i}", steps=1 + i % 3, task_seed=i) for i in range(12)]
    folder = written(tmp_path / "out", *sent, shard_bytes=3000)
    files = sorted(folder.glob("*.parquet"))
    assert len(files) > 2
    for file in files:
        rows = pq.read_table(file, columns=["step", "steps"]).to_pylist()
        assert rows[0]["step"] == 0
        assert rows[-1]["step"] == rows[-1]["steps"] - 1
    assert [each.id for each in read_folder(folder)] == [each.id for each in sent]


def _write_in_vain(folder: Path) -> None:
    with write_folder(folder, {}) as shards:
        shards.add(trajectory())
        shards.close()
        raise ValueError("halfway")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="halfway"):
        _write_in_vain(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    written(tmp_path / "out", trajectory())
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ExchangeError, match="exists already"):
        written(tmp_path / "out", trajectory("t1"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before

"""A mistake in a foreign file is named with file, row and column, and nothing of it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bus.errors import ExchangeError
from dart_cli.config.schema import Config
from dart_cli.data.exchange.parquet_read import read_folder
from dart_cli.data.exchange.parquet_schema import COLUMNS
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.exchange.transfer import (
    import_folder,
)
from dart_cli.data.store.open import open_reader, open_store
from envs.contract.blobs import content_hash
from tests.data.exchange.parts import png, trajectory, written

Change = Callable[[list[dict[str, Any]]], None]


def put(row: int, column: str, value: Any) -> Change:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[row][column] = value

    return change


def everywhere(column: str, value: Any) -> Change:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row[column] = value

    return change


def swap(rows: list[dict[str, Any]]) -> None:
    rows[0], rows[1] = rows[1], rows[0]


def scatter(rows: list[dict[str, Any]]) -> None:
    """A one-step trajectory comes again behind another."""
    for row in rows:
        row |= {"step": 0, "steps": 1, "image_hashes": row["image_hashes"][-1:]}
    rows[1]["trajectory_id"] = "another"


CUT = {"bytes": png(0, 2)[:-30], "path": None}

MISTAKES: dict[str, tuple[Change, int, str, str]] = {
    "a gap": (put(1, "step", 3), 1, "step", "must be 1, got 3"),
    "unsorted": (swap, 0, "step", "sort the data"),
    "scattered": (scatter, 2, "trajectory_id", "not adjacent"),
    "too few": (everywhere("steps", 4), 2, "steps", "3 rows of 4"),
    "too many": (everywhere("steps", 2), 2, "step", "more rows"),
    "no steps": (everywhere("steps", 0), 0, "steps", "greater than or equal to 1"),
    "a negative token": (put(1, "token_ids", [3, -1]), 1, "token_ids[1]", "-1"),
    "no token": (put(1, "token_ids", []), 1, "token_ids", "at least 1"),
    "no number": (
        put(2, "behaviour_logprobs", [-1.0, float("nan")]),
        2,
        "behaviour_logprobs[1]",
        "finite",
    ),
    "a probability": (put(0, "behaviour_logprobs", [0.5, -1.0]), 0, "behaviour_logprobs[0]", "0.5"),
    "one too few": (
        put(1, "behaviour_logprobs", [-1.0]),
        1,
        "behaviour_logprobs",
        "1 values for 2",
    ),
    "half known": (put(1, "behaviour_logprobs", []), 1, "behaviour_logprobs", "some steps only"),
    "entropies": (put(1, "entropies", [0.1]), 1, "entropies", "1 values for 2"),
    "a patch of no pointer": (put(1, "patches", [-1, 2]), 1, "patches", "not that of a pointer"),
    "one patch": (put(1, "patches", [2]), 1, "patches", "1 patches for 2"),
    "a patch below": (put(1, "patches", [-1, -2]), 1, "patches[1]", "-2"),
    "an unknown image": (put(1, "image_hashes", ["0" * 32]), 1, "image_hashes", "must be"),
    "an image of nowhere": (
        lambda rows: rows[1]["image_hashes"].insert(0, "0" * 32),
        1,
        "image_hashes",
        "no earlier screenshot",
    ),
    "a cut image": (
        lambda rows: rows[0].update(
            screenshot=CUT,
            image_hashes=[content_hash(CUT["bytes"])],  # type: ignore[arg-type]
        ),
        0,
        "screenshot",
        "no whole PNG, JPEG or WebP",
    ),
    "no image": (
        put(1, "screenshot", {"bytes": None, "path": "a.png"}),
        1,
        "screenshot[bytes]",
        "bytes",
    ),
    "no JSON": (put(1, "action", "__import__('os')"), 1, "action", "is not JSON"),
    "no action": (put(1, "action", '{"kind": "explode"}'), 1, "action", "no action of"),
    "a list": (put(1, "action", "[1]"), 1, "action", "JSON object"),
    "half a character": (
        put(1, "action", json.dumps({"kind": "type", "text": "\ud800"})),
        1,
        "action",
        "lone surrogate",
    ),
    "more that is no list": (put(1, "more_actions", "{}"), 1, "more_actions", "JSON list"),
    "more that is no action": (
        put(1, "more_actions", '[{"kind": "wait"}, {"kind": "explode"}]'),
        1,
        "more_actions",
        "no action of",
    ),
    "more than one completion has": (
        put(1, "more_actions", json.dumps([{"kind": "wait"}] * 32)),
        1,
        "more_actions",
        "at most 31",
    ),
    "more after none": (
        lambda rows: rows[1].update(action=None, more_actions='[{"kind": "wait"}]'),
        1,
        "more_actions",
        "action is null",
    ),
    "another outcome": (everywhere("outcome", "won"), 0, "outcome", "pass"),
    "a reward of another range": (everywhere("reward", 1.5), 0, "reward", "1.5"),
    "a changed reward": (put(1, "reward", 0.5), 1, "reward", "differs from that of step 0"),
    "another source": (everywhere("source", "magic"), 0, "source", "oracle"),
    "a changed task": (
        put(1, "task_id", "mini/popup"),
        1,
        "task_id",
        "differs from that of step 0",
    ),
    "another suite": (everywhere("suite", "desk"), 0, "suite", "env.suite"),
    "a misspelt task": (everywhere("task_id", "mini/clik"), 0, "task_id", "did you mean"),
    "a held-out task": (everywhere("task_id", "mini/popup+menu"), 0, "task_id", "held out"),
    "a held-out seed": (everywhere("task_seed", 1_000_000), 0, "task_seed", "held out"),
    "a control character": (everywhere("trajectory_id", "a\nb"), 0, "trajectory_id", "pattern"),
}


def foreign(folder: Path, change: Change) -> Path:
    """A good trajectory, then one of three steps that `change` spoils."""
    rows = pq.read_table(written(folder / "good", trajectory("t8", steps=3))).to_pylist()
    change(rows)
    good = pq.read_table(folder / "good").schema
    (folder / "bad").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=good), folder / "bad" / "b.parquet")
    written(folder / "first", trajectory("first"))
    (folder / "first" / "trajectories-00000.parquet").rename(folder / "bad" / "a.parquet")
    return folder / "bad"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_row_and_column_and_nothing_is_imported(
    name: str, tmp_path: Path, config: Config
) -> None:
    change, row, column, cure = MISTAKES[name]
    folder = foreign(tmp_path, change)
    open_store(config.run.dir).close()
    with pytest.raises(ExchangeError) as error:
        import_folder(config, folder)
    told = str(error.value)
    assert told.startswith(f"{folder / 'b.parquet'} row {row}, column {column}: ")
    assert cure in told
    assert "\n" not in told
    with open_reader(config.run.dir) as reader:
        assert reader.pool() == []
        assert reader.total("steps") == reader.total("screenshots") == 0


def test_a_mistake_makes_no_run(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ExchangeError):
        import_folder(config, foreign(tmp_path, everywhere("steps", 4)))
    assert not config.run.dir.exists()


def test_a_file_without_a_column_or_of_another_type_is_refused(
    tmp_path: Path, config: Config
) -> None:
    table = pq.read_table(written(tmp_path / "good", trajectory()))
    file = tmp_path / "f.parquet"
    pq.write_table(table.drop_columns(["token_ids"]), file)
    with pytest.raises(ExchangeError, match=r"f\.parquet: column token_ids is missing"):
        import_folder(config, file)
    words = table.set_column(
        table.column_names.index("step"), "step", pa.array(["one", "two"], pa.string())
    )
    pq.write_table(words, file)
    with pytest.raises(ExchangeError, match="column step: "):
        import_folder(config, file)
    links = pa.array(["a.png", "b.png"], pa.string())
    pq.write_table(
        table.set_column(table.column_names.index("screenshot"), "screenshot", links), file
    )
    with pytest.raises(ExchangeError, match="with its bytes in it"):
        import_folder(config, file)
    bytes_of = pa.array([b"\xff", b"\xff"], pa.binary()).buffers()
    no_text = pa.StringArray.from_buffers(2, bytes_of[1], bytes_of[2])
    pq.write_table(table.set_column(table.column_names.index("text"), "text", no_text), file)
    with pytest.raises(ExchangeError, match=r"column text: .*utf-8"):
        import_folder(config, file)
    pq.write_table(table.replace_schema_metadata({b"dart": b"[" * 100_000}), file)
    with pytest.raises(ExchangeError, match="metadata `dart` is damaged"):
        import_folder(config, file)
    file.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ExchangeError, match="no Parquet file"):
        import_folder(config, file)
    with pytest.raises(ExchangeError, match="no such folder"):
        import_folder(config, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExchangeError, match=r"no \*\.parquet"):
        import_folder(config, tmp_path / "empty")


def test_other_types_of_the_same_meaning_and_absent_optional_columns_are_taken(
    tmp_path: Path, config: Config
) -> None:
    table = pq.read_table(written(tmp_path / "good", trajectory(source="imported")))
    table = table.drop_columns([name for name, column in COLUMNS.items() if column.optional])
    for name, kind in (
        ("text", pa.large_string()),
        ("step", pa.int64()),
        ("token_ids", pa.large_list(pa.int64())),
    ):
        column = table.column(name).cast(kind)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, tmp_path / "f.parquet")
    [old] = read_folder(tmp_path / "f.parquet")
    assert old.reward == 1.0, "by the outcome"
    assert import_folder(config, tmp_path / "f.parquet").joined == 1


def test_a_newer_format_is_refused(tmp_path: Path, config: Config) -> None:
    with write_folder(tmp_path / "out", {"format": 99}) as shards:
        shards.add(trajectory())
    with pytest.raises(ExchangeError, match="newer dart"):
        import_folder(config, tmp_path / "out")

"""Write trajectories to a folder of Parquet files, which appears whole or not at all.

write_folder      opens a temporary folder, which gets its name when it is complete
refuse_existing   raises the error for a folder that exists already
Shards            the folder's files, to which trajectories are added one at a time
rows_of           returns the rows of a trajectory, one for each step
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus.errors import ExchangeError
from dart_cli.data.exchange.parquet_schema import (
    COLUMNS,
    OF_STEP,
    OF_TOKENS,
    OF_TRAJECTORY,
    Trajectory,
    pyarrow_modules,
    schema,
    values_of,
)
from envs.contract.blobs import content_hash, image_suffix

SHARD_BYTES = 500_000_000
ROW_GROUP_BYTES = 32_000_000


def rows_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return a row for each step of a trajectory."""
    shared = {"trajectory_id": trajectory.id, "steps": len(trajectory.steps)}
    shared |= values_of(trajectory, OF_TRAJECTORY)
    rows = [
        {
            **shared,
            **values_of(step, OF_STEP),
            **values_of(step.sampled, OF_TOKENS),
            "screenshot": _image(trajectory.images[step.screenshot]),
            "action": None if step.action is None else json.dumps(step.action),
            "more_actions": json.dumps(step.more_actions) if step.more_actions else None,
            "versions": [
                span.version
                for span in step.sampled.version_spans
                for _ in range(span.end - span.start)
            ],
            "step_reward": step.reward,
            "final_screenshot": None,
        }
        for step in trajectory.steps
    ]
    rows[-1]["final_screenshot"] = _image(trajectory.final_screenshot)
    return rows


def _image(encoded: bytes | None) -> dict[str, Any] | None:
    if encoded is None:
        return None
    return {"bytes": encoded, "path": f"{content_hash(encoded)}.{image_suffix(encoded)}"}


@dataclass
class Shards:
    """The files of a folder that is being written; `add` writes one trajectory."""

    folder: Path
    about: Mapping[str, Any]
    shard_bytes: int = SHARD_BYTES
    trajectories: int = 0  # number of those that were added
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _pending_bytes: int = 0
    _shard_bytes: int = 0
    _shard: int = 0
    _writer: Any = None

    def add(self, trajectory: Trajectory) -> None:
        """Write one trajectory; all of its rows are in one file."""
        if self._shard_bytes >= self.shard_bytes:
            self.close()
        for row in rows_of(trajectory):
            self._pending.append(row)
            size = sum(len(row[name]["bytes"]) for name in _IMAGES if row[name])
            self._pending_bytes += size + 4 * len(row["prompt_token_ids"]) + 500
        self.trajectories += 1
        if self._pending_bytes >= min(ROW_GROUP_BYTES, self.shard_bytes):
            self._flush()

    def close(self) -> None:
        """Close the present file; the next trajectory begins a new one."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._shard, self._shard_bytes = self._shard + 1, 0

    def _flush(self) -> None:
        """Write the pending rows to the present file as one row group."""
        if not self._pending:
            return
        pa, pq = pyarrow_modules()
        table = pa.Table.from_pylist(self._pending, schema=schema(self.about))
        if self._writer is None:
            path = self.folder / f"trajectories-{self._shard:05d}.parquet"
            self._writer = pq.ParquetWriter(path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._shard_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0


_IMAGES = [name for name, column in COLUMNS.items() if column.kind == "image"]


def refuse_existing(folder: Path) -> None:
    """Raise ExchangeError if the folder exists and is not empty, MissingPartError without pyarrow."""
    pyarrow_modules()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExchangeError(f"{folder} exists already; remove it, or choose another folder")


@contextmanager
def write_folder(
    folder: Path, about: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
) -> Iterator[Shards]:
    """Yield Shards for a temporary folder, which is renamed to `folder` at the end of the block.

    If the block fails, the temporary folder is removed and `folder` stays as it was.

    Raises ExchangeError if the folder exists and is not empty, MissingPartError without pyarrow.
    """
    refuse_existing(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ExchangeError(f"{folder}: cannot be written: {error.strerror}") from None
    shards = Shards(temporary, about, shard_bytes)
    try:
        yield shards
        shards.close()
        if not shards.trajectories:  # a folder without files could not be read
            raise ExchangeError(f"nothing to write into {folder}")
        temporary.chmod(0o755)
        temporary.replace(folder)
    except OSError as error:
        raise ExchangeError(f"{folder}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

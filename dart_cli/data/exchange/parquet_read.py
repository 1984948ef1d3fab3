"""Read trajectories from a folder of Parquet files, and check every field of every row.

    read_folder     yields the trajectories, one at a time
    about_folder    returns the writer's metadata about the files
    count_rows      returns the number of rows
    parquet_files   returns the files of a folder

The files may come from other programs: an error names file, row, column and fix, and nothing of a folder with
an error is used.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import ActionError, ExchangeError, first_line
from bus.messages import Outcome, SampledTokens
from dart_cli.config.schema import MOST_ACTIONS
from dart_cli.data.exchange.parquet_schema import (
    COLUMNS,
    FORMAT,
    OF_STEP,
    OF_TOKENS,
    OF_TRAJECTORY,
    Trajectory,
    column_type,
    pyarrow_modules,
    values_of,
)
from dart_cli.data.store.rows import PoolSource
from dart_cli.data.store.steps import StepRow
from dart_cli.language.pointer_tokens import patch_mistake
from envs.contract.actions import action_from_dict
from envs.contract.base import reward_of
from envs.contract.blobs import content_hash

_READ_ROWS = 32  # at once; images are large
MAX_STEPS = 10_000
MAX_TOKENS = 1_000_000  # of one prompt or completion
MAX_IMAGE_BYTES = 64_000_000
MAX_SIDE = 8_192  # pixels

_Name = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Text = Annotated[str, Field(max_length=1_000_000)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_NotNegative = Annotated[float, Field(ge=0)]
_LogProb = Annotated[float, Field(le=0)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Image(BaseModel):
    """A `datasets.Image` that includes its bytes."""

    bytes: Annotated[bytes, Field(min_length=1, max_length=MAX_IMAGE_BYTES)]


class _ParquetRow(BaseModel):
    """One row of a file, with the limits of each field."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    trajectory_id: _Name
    step: Annotated[int, Field(ge=0, lt=MAX_STEPS)]
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    suite: _Name
    task_id: _Name
    task_seed: Annotated[int, Field(ge=0, lt=2**63)]
    instruction: _Text = ""
    source: PoolSource = "imported"
    origin: Annotated[str, Field(max_length=300)] = ""
    outcome: Outcome
    reward: Annotated[float, Field(ge=0, le=1)] | None = None
    verdict_reason: _Text = ""
    stop_reason: Annotated[str, Field(max_length=300)] = ""
    app_log: _Text = ""
    screenshot: _Image
    text: _Text
    action: _Text | None = None
    more_actions: _Text | None = None
    error: _Text = ""
    observed_text: _Text = ""
    image_hashes: Annotated[list[_Hash], Field(min_length=1, max_length=1000)]
    prompt_token_ids: Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
    token_ids: Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
    behaviour_logprobs: list[_LogProb]
    entropies: list[_NotNegative] = []
    patches: list[Annotated[int, Field(ge=-1, lt=2**31)]] = []
    model_s: _NotNegative = 0.0
    env_s: _NotNegative = 0.0
    step_reward: float | None = None


@dataclass(frozen=True)
class _RowLocation:
    """A row of a file, for errors."""

    file: Path
    row: int  # from 0

    def error(self, column: str, text: str) -> ExchangeError:
        return ExchangeError(f"{self.file} row {self.row}, column {column}: {text}")


_SHARED_COLUMNS = (
    "steps",
    "suite",
    "task_id",
    "task_seed",
    "source",
    "origin",
    "outcome",
    "reward",
)
"""Columns that must be equal in all rows of a trajectory."""

StepCheck = Callable[[Trajectory], tuple[int, str, str] | None]
"""A further check of a trajectory. It returns (step, column, what is wrong), or None if nothing is wrong."""


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, or `folder` itself if it is a file.

    Raises ExchangeError if there are none.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ExchangeError(f"no such folder: {folder}; `dart data export` writes one")
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ExchangeError(f"no *.parquet in {folder}; name the folder that holds the files")
    return files


def about_folder(folder: Path) -> dict[str, Any]:
    """Return the writer's metadata in the first file; empty if dart did not write it."""
    _, pq = pyarrow_modules()
    path = parquet_files(folder)[0]
    with _open_file(pq, path) as file:
        metadata = (file.schema_arrow.metadata or {}).get(b"dart", b"{}")
    try:
        about = json.loads(metadata)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or not isinstance(about.get("format", FORMAT), int):
        raise ExchangeError(f"{path}: its metadata `dart` is damaged; export it again")
    if about.get("format", FORMAT) > FORMAT:
        raise ExchangeError(f"{path}: format {about['format']} of a newer dart; use that version")
    return about


def count_rows(folder: Path) -> int:
    """Return the number of rows of all files, from their footers."""
    _, pq = pyarrow_modules()
    total = 0
    for path in parquet_files(folder):
        with _open_file(pq, path) as file:
            total += file.metadata.num_rows
    return total


def read_folder(
    folder: Path,
    check: StepCheck | None = None,
    progress: Callable[[int], None] = lambda _: None,
    checked_images: set[str] | None = None,
) -> Iterator[Trajectory]:
    """Yield the trajectories of a folder, one at a time, and call `progress` with the number of rows of each.

    `checked_images` has the hashes of images that were decoded before; the hashes of the folder's images are
    added, so that a second reading need not decode them. Raises ExchangeError for the first mistake.
    """
    earlier_ids: set[str] = set()
    checked_images = set() if checked_images is None else checked_images
    for trajectory_id, group in groupby(_rows(folder), key=lambda entry: entry[1].trajectory_id):
        # 1. Collect the rows of one trajectory. Their number is bounded, so that no file can fill the memory.
        rows = []
        for place, row in group:
            rows.append((place, row))
            if len(rows) > row.steps:
                raise place.error(
                    "step", f"{trajectory_id} has more rows than its steps, {row.steps}"
                )
        place, first = rows[0]
        if trajectory_id in earlier_ids:
            raise place.error(
                "trajectory_id",
                f"the rows of {trajectory_id} are not adjacent; sort the data by trajectory_id and step",
            )
        earlier_ids.add(trajectory_id)
        # 2. Check them together.
        trajectory = _trajectory(rows, checked_images)
        if check is not None and (mistake := check(trajectory)) is not None:
            step, column, text = mistake
            raise rows[step][0].error(column, text)
        yield trajectory
        progress(first.steps)


def _trajectory(
    rows: Sequence[tuple[_RowLocation, _ParquetRow]], checked_images: set[str]
) -> Trajectory:
    """Return the trajectory of its rows. Raises ExchangeError if they do not fit together."""
    first = rows[0][1]
    images: dict[str, bytes] = {}
    steps = []
    for number, (place, row) in enumerate(rows):
        if row.step != number:
            raise place.error(
                "step",
                f"must be {number}, got {row.step}; sort the data by trajectory_id and step",
            )
        for name in _SHARED_COLUMNS:
            if getattr(row, name) != getattr(first, name):
                raise place.error(name, f"differs from that of step 0 of {first.trajectory_id}")
        if bool(row.behaviour_logprobs) != bool(first.behaviour_logprobs):
            raise place.error("behaviour_logprobs", "known for some steps only; empty them all")
        steps.append(_step(place, row, images, checked_images))
    if len(rows) != first.steps:
        raise rows[-1][0].error(
            "steps", f"{first.trajectory_id} has {len(rows)} rows of {first.steps} steps"
        )
    shared = values_of(first, OF_TRAJECTORY)
    shared["reward"] = reward_of(first.outcome, first.reward)
    return Trajectory(id=first.trajectory_id, steps=steps, images=images, **shared)


def _step(
    place: _RowLocation, row: _ParquetRow, images: dict[str, bytes], checked_images: set[str]
) -> StepRow:
    """Return the step of one row, and add its screenshot to `images`."""
    key = content_hash(row.screenshot.bytes)
    if row.image_hashes[-1] != key:
        raise place.error("image_hashes", f"the last must be the screenshot's own, {key}")
    if key not in checked_images:
        _check_image(place, row.screenshot.bytes)
        checked_images.add(key)
    images[key] = row.screenshot.bytes
    for image_hash in row.image_hashes:
        if image_hash not in images:
            raise place.error(
                "image_hashes", f"{image_hash} is no earlier screenshot of its trajectory"
            )
    for name in ("behaviour_logprobs", "entropies"):
        values: list[float] = getattr(row, name)
        if values and len(values) != len(row.token_ids):
            raise place.error(name, f"{len(values)} values for {len(row.token_ids)} token_ids")
    # The versions of another run mean nothing in this one.
    sampled = SampledTokens(version_spans=[], **values_of(row, OF_TOKENS))
    if mistake := patch_mistake(row.token_ids, row.patches, row.behaviour_logprobs, row.entropies):
        raise place.error("patches", mistake)
    return StepRow(
        trajectory_id=row.trajectory_id,
        at=0.0,
        screenshot=key,
        sampled=sampled,
        action=_action(place, row),
        more_actions=_more_actions(place, row),
        worker="",
        reward=row.step_reward,
        **values_of(row, OF_STEP),
    )


def _action(place: _RowLocation, row: _ParquetRow) -> dict[str, Any] | None:
    """Return the action of a row; None if it has none. Raises ExchangeError if it is invalid."""
    if row.action is None:
        return None
    value = _json(place, "action", row.action)
    if not isinstance(value, dict):
        raise place.error("action", "must be a JSON object, or null where the text is none")
    _check_action(place, "action", value)
    return value


def _more_actions(place: _RowLocation, row: _ParquetRow) -> list[dict[str, Any]]:
    """Return the actions of a row after its first. Raises ExchangeError if they are invalid."""
    if row.more_actions is None:
        return []
    values = _json(place, "more_actions", row.more_actions)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise place.error("more_actions", "must be a JSON list of objects, or null for none")
    if row.action is None:
        raise place.error("more_actions", "has actions, but action is null")
    if len(values) >= MOST_ACTIONS:
        raise place.error("more_actions", f"{len(values)} actions; at most {MOST_ACTIONS - 1}")
    for value in values:
        _check_action(place, "more_actions", value)
    return values


def _json(place: _RowLocation, name: str, text: str) -> Any:
    """Return a column's value of JSON. Raises ExchangeError if it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise place.error(name, "holds half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise place.error(name, f"is not JSON: {text[:60]!r}") from None
    return value


def _check_action(place: _RowLocation, name: str, value: dict[str, Any]) -> None:
    """Raise ExchangeError unless the value is an action."""
    try:
        action_from_dict(value)
    except ActionError as error:
        raise place.error(name, f"is no action of envs/contract/actions.py: {error}") from None


def _check_image(place: _RowLocation, encoded: bytes) -> None:
    """Raise ExchangeError unless the image is a PNG, JPEG or WebP that decodes completely."""
    try:
        with Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG", "WEBP")) as image:
            if max(image.size) > MAX_SIDE:
                size = f"{image.width}x{image.height}"
                raise place.error("screenshot", f"{size} pixels; at most {MAX_SIDE} a side")
            image.load()
    except (OSError, ValueError, SyntaxError, EOFError, struct.error) as error:
        raise place.error("screenshot", f"is no whole PNG, JPEG or WebP image ({error})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise place.error("screenshot", "has far too many pixels for a screen") from None


def _rows(folder: Path) -> Iterator[tuple[_RowLocation, _ParquetRow]]:
    """Yield the location and the content of every row of every file; each field of a row is checked."""
    pa, pq = pyarrow_modules()
    for path in parquet_files(folder):
        number = 0
        with _open_file(pq, path) as file:
            names = _columns_of(pa, path, file.schema_arrow)
            for batch in _batches(pa, path, file, names):
                for values in batch:
                    place = _RowLocation(path, number)
                    yield place, _row(place, values)
                    number += 1


def _row(place: _RowLocation, values: dict[str, Any]) -> _ParquetRow:
    """Return the row with these values. Raises ExchangeError for the first that is out of its limits."""
    present = {
        name: value
        for name, value in values.items()
        if value is not None or not COLUMNS[name].optional
    }
    try:
        return _ParquetRow.model_validate(present)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column, *inside = first["loc"]
        where = "".join(f"[{part}]" for part in inside)
        text = repr(first["input"])
        excerpt = text if len(text) <= 60 else f"{text[:57]}..."
        raise place.error(f"{column}{where}", f"{first['msg']}, got {excerpt}") from None


def _batches(pa: Any, path: Path, file: Any, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file in lists of up to _READ_ROWS, with values of the types in COLUMNS."""
    try:
        for batch in file.iter_batches(batch_size=_READ_ROWS, columns=names):
            columns = {}
            for name in names:
                column = batch.column(batch.schema.get_field_index(name))
                columns[name] = _values(pa, path, name, column)
            yield [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
    except (pa.ArrowException, OSError) as error:
        raise ExchangeError(f"{path}: is damaged: {first_line(error)}; copy it again") from None


def _values(pa: Any, path: Path, name: str, column: Any) -> list[Any]:
    """Return a column's values, converted to its type in COLUMNS."""
    try:
        if COLUMNS[name].kind != "image":
            column = column.cast(column_type(pa, COLUMNS[name]))
        values: list[Any] = column.to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise ExchangeError(f"{path} column {name}: {error}") from None
    return values


def _columns_of(pa: Any, path: Path, file_schema: Any) -> list[str]:
    """Return which of COLUMNS a file has.

    Raises ExchangeError if a required one is missing or an image column has another type.
    """
    names = []
    for name, column in COLUMNS.items():
        index = file_schema.get_field_index(name)
        if index < 0:
            if column.optional:
                continue
            raise ExchangeError(
                f"{path}: column {name} is missing; its columns must be those that "
                "`dart data export` writes (docs/data-tools.md)"
            )
        kind = file_schema.field(index).type
        if column.kind == "image" and not (
            pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        ):
            raise ExchangeError(
                f"{path} column {name}: must be a datasets.Image with its bytes in it, is {kind}; "
                "save the data set with its images embedded"
            )
        names.append(name)
    return names


@contextmanager
def _open_file(pq: Any, path: Path) -> Iterator[Any]:
    """Open a Parquet file for the block. Raises ExchangeError if it is none."""
    pa, _ = pyarrow_modules()
    with ExitStack() as stack:
        try:
            file = stack.enter_context(pq.ParquetFile(path))
        except (pa.ArrowException, OSError) as error:
            raise ExchangeError(
                f"{path}: is no Parquet file ({first_line(error)}); copy it again"
            ) from None
        yield file

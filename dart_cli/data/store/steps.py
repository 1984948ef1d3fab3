"""A step as it is stored: its row, and its numbers <-> the compact blobs there.

StepRow     a step that was submitted, with all that it holds
BatchStep   a step of a batch, with what is trained on
columns_of  a step -> the columns of its row
step_of     the columns -> a StepRow; batch_step_of -> a BatchStep

Blobs are little-endian on every machine:

ids      int32                      token ids, version spans
prompt   three bytes an id, in planes, of which the one that most often comes in a row, the image
         placeholder, is written once for every 8 or 128 of them: 50 KB of a five-screenshot
         prompt become 3 KB. What this cannot hold is int32, deflated, as older versions wrote it
floats   float64                    log-probabilities and entropies, bit for bit as they came
maps     length, JSON, deflate      where pointers looked: their shapes and candidates, then their heat
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

from pydantic_core import from_json, to_json

from bus.messages import PointerCandidate, PointerMap, SampledTokens, StepRecord, VersionSpan
from bus.packed import FloatArray, IntArray, float64s, int32s, little_endian
from dart_cli.data.store.rows import PlannedSample

_SHORT = b"R"
"""First byte of a prompt that is written short; never that of zlib."""

_EIGHT = b"\xff\xff\xff\0"
"""Stands for eight of the same id in a row, and _MANY for sixteen of it."""
_MANY = b"\xfe\xff\xff\0"

_HIGHEST = 3 if sys.byteorder == "little" else 0
"""Of the four bytes of a machine's integer."""


@dataclass(frozen=True)
class StepRow:
    """One step as it was submitted; lists as in StepRecord."""

    trajectory_id: str
    step: int
    at: float
    screenshot: str  # key of screenshots
    image_hashes: list[str]
    prompt_token_ids: list[int]
    sampled: SampledTokens
    text: str
    action: dict[str, Any] | None
    error: str
    model_s: float
    env_s: float
    worker: str  # the rollout worker that finished the completion; empty of a pool's member
    instruction: str = ""  # as the policy read it, in step 0
    reward: float | None = None  # what the environment gave for it; None where it gave nothing
    observed_text: str = ""  # what the policy read beside the screenshot
    pointed: list[PointerMap] = field(default_factory=list)  # as in StepRecord


@dataclass(frozen=True)
class BatchStep:
    """A step of a batch that is trained on, before steps that extend one another are chained."""

    group_id: str  # in which it is compared
    trajectory_id: str
    step: int
    prompt_token_ids: IntArray  # [P], image placeholders expanded
    token_ids: IntArray  # [A], the completion
    image_hashes: list[str]  # [I], the prompt's
    behaviour_logprobs: FloatArray  # [A], nats; empty if unknown
    version_spans: list[VersionSpan]
    advantage: float
    weight: float  # multiplies the sample's loss
    patches: list[int] = field(default_factory=list)  # [A], as in SampledTokens
    worker: str = ""
    reward: float | None = None  # as in PlannedSample, as is the next
    baseline: float | None = None


BATCH_COLUMNS = (
    *("image_hashes", "prompt_token_ids", "token_ids"),
    *("behaviour_logprobs", "version_spans", "patches", "worker"),
)
"""Those that `batch_step_of` reads, in its order."""


def columns_of(
    step: StepRecord | StepRow, at: float, screenshot: str, spans: Sequence[VersionSpan]
) -> dict[str, object]:
    """Return the columns of a step's row. Raises struct.error for an id that does not fit."""
    sampled = step.sampled
    return {
        "trajectory_id": step.trajectory_id,
        "step": step.step,
        "at": at,
        "screenshot": screenshot,
        "image_hashes": _json(step.image_hashes),
        "prompt_token_ids": pack_prompt(step.prompt_token_ids),
        "token_ids": pack_ids(sampled.token_ids),
        "behaviour_logprobs": pack_floats(sampled.behaviour_logprobs),
        "entropies": pack_floats(sampled.entropies),
        "version_spans": pack_spans(spans),
        "patches": pack_ids(sampled.patches),
        "pointed": pack_maps(step.pointed),
        "text": step.text,
        "action": None if step.action is None else _json(step.action),
        "error": step.error,
        "model_s": step.model_s,
        "env_s": step.env_s,
        "worker": step.worker,
        "instruction": step.instruction,
        "observed_text": step.observed_text,
        "reward": step.reward,
    }


def step_of(row: dict[str, Any]) -> StepRow:
    """Inverse of `columns_of`."""
    sampled = SampledTokens.model_construct(
        token_ids=unpack_ids(row.pop("token_ids")),
        behaviour_logprobs=unpack_floats(row.pop("behaviour_logprobs")),
        entropies=unpack_floats(row.pop("entropies")),
        version_spans=unpack_spans(row.pop("version_spans")),
        patches=unpack_ids(row.pop("patches")),
    )
    row |= {
        "sampled": sampled,
        "image_hashes": from_json(row["image_hashes"]),
        "prompt_token_ids": unpack_ids(prompt_ids(row["prompt_token_ids"])),
        "action": from_json(row["action"]) if row["action"] else None,
        "pointed": unpack_maps(row["pointed"]),
    }
    return StepRow(**row)


def batch_step_of(planned: PlannedSample, columns: Sequence[Any]) -> BatchStep:
    """Return a step's BATCH_COLUMNS, of which no list of numbers is made."""
    hashes, prompt, token_ids, logprobs, spans, patches, worker = columns
    return BatchStep(
        group_id=planned.group_id,
        trajectory_id=planned.trajectory_id,
        step=planned.step,
        prompt_token_ids=int32s(prompt_ids(prompt)),
        token_ids=int32s(token_ids),
        image_hashes=from_json(hashes),
        behaviour_logprobs=float64s(logprobs),
        # A member of the pool is as old as it is: no version of now to be behind.
        version_spans=[] if planned.reason == "pool" else unpack_spans(spans),
        advantage=planned.advantage,
        weight=planned.weight,
        patches=unpack_ids(patches),
        worker=worker,
        reward=planned.reward,
        baseline=planned.baseline,
    )


def _json(value: object) -> str:
    """As json.dumps, at a quarter of its time."""
    return to_json(value).decode()


def pack_ids(values: Sequence[int]) -> bytes:
    """Integers [N] in int32. Raises struct.error for one that does not fit."""
    if isinstance(values, array) and values.typecode == "i":
        return little_endian(values)
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ids(blob: bytes) -> list[int]:
    """Inverse of pack_ids."""
    return list(struct.unpack(f"<{len(blob) // 4}i", blob))


def pack_prompt(values: Sequence[int]) -> bytes:
    """Return the ids [P] of a prompt, in a quarter of the time that deflating them takes."""
    plain = pack_ids(values)
    unit = pack_ids([_in_a_row(values)])
    short = plain.replace(unit * 8, _EIGHT).replace(_EIGHT * 16, _MANY)
    # Where the top bytes are all zero, every id fits and every mark stands where an id would (a
    # mark elsewhere puts its 0xff there); and no bytes but a mark's own look like one.
    if short[3::4].strip(b"\0") or _EIGHT in plain or _MANY in plain:
        return zlib.compress(plain, 1)
    return b"".join((_SHORT, unit, short[0::4], short[1::4], short[2::4]))


def prompt_ids(blob: bytes) -> bytes:
    """Return the ids of pack_prompt as those of pack_ids: no integer is made."""
    if blob[:1] != _SHORT:
        return zlib.decompress(blob)
    unit, planes = blob[1:5], blob[5:]
    size = len(planes) // 3
    short = bytearray(4 * size)
    for index in range(3):
        short[index::4] = planes[index * size : (index + 1) * size]
    return bytes(short).replace(_MANY, _EIGHT * 16).replace(_EIGHT, unit * 8)


def _in_a_row(values: Sequence[int]) -> int:
    """Return an id that comes often in a row, found by looking at one in 16; 0 where there is none."""
    some = values[::16]
    at = bytes(map(eq, some, some[1:])).find(b"\1\1")  # three of the same
    return some[at] if at >= 0 else 0


def in_range(values: Sequence[int]) -> bool:
    """Whether every integer is in [0, 2 ** 31), as pack_ids stores it and no id is below zero."""
    try:
        is_packed = isinstance(values, array) and values.typecode == "i"
        plain = bytes(values) if is_packed else bytes(array("I", values))
    except OverflowError:
        return False
    return plain[_HIGHEST::4].isascii()  # its top bit is clear


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats [N] in float64."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes) -> list[float]:
    """Inverse of pack_floats."""
    return list(struct.unpack(f"<{len(blob) // 8}d", blob))


def pack_spans(spans: Sequence[VersionSpan]) -> bytes:
    """Version spans as triples (version, start, end)."""
    return pack_ids([part for span in spans for part in (span.version, span.start, span.end)])


def unpack_spans(blob: bytes) -> list[VersionSpan]:
    """Inverse of pack_spans."""
    parts = iter(unpack_ids(blob))
    return [  # they were checked when they came in
        VersionSpan.model_construct(version=version, start=start, end=end)
        for version, start, end in zip(parts, parts, parts, strict=True)
    ]


def span_versions(blob: bytes) -> list[int]:
    """Return the versions alone of packed spans, in order."""
    return unpack_ids(blob)[::3]


def pack_maps(maps: Sequence[PointerMap]) -> bytes:
    """Where the pointers of a step looked; empty for one without."""
    if not maps:
        return b""
    shapes = [
        [each.position, each.rows, each.columns, [[c.x, c.y, c.score] for c in each.candidates]]
        for each in maps
    ]
    head = json.dumps(shapes, separators=(",", ":")).encode()
    heat = zlib.compress(b"".join(each.heat for each in maps))
    return struct.pack("<I", len(head)) + head + heat


def unpack_maps(blob: bytes) -> list[PointerMap]:
    """Inverse of pack_maps."""
    if not blob:
        return []
    end = 4 + struct.unpack_from("<I", blob)[0]
    heat, at, maps = zlib.decompress(blob[end:]), 0, []
    for position, rows, columns, candidates in json.loads(blob[4:end]):
        maps.append(
            PointerMap.model_construct(
                position=position,
                rows=rows,
                columns=columns,
                heat=heat[at : at + rows * columns],
                candidates=[
                    PointerCandidate.model_construct(x=x, y=y, score=score)
                    for x, y, score in candidates
                ],
            )
        )
        at += rows * columns
    return maps

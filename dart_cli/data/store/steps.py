"""A step as it is stored: its row, and the compact blobs of its numbers.

    StepRow         a step that was submitted, complete
    BatchStep       the parts of a step that a batch needs
    columns_of      a step -> the columns of its row
    step_of         the columns -> a StepRow
    batch_step_of   the columns -> a BatchStep

Blobs are little-endian on every machine:

    ids      int32: token ids, version spans, hints
    prompt   three bytes for each id: the lowest bytes of all ids, then the middle ones, then the highest. The
             id that is repeated most, the image placeholder, is written once for 8 or 128 in a row, so that
             50 KB of a prompt with five screenshots become 3 KB. A prompt that this format cannot represent
             is int32, deflated
    floats   float64: log-probabilities and entropies, bit for bit as they came
    maps     a length, JSON, deflate: the shapes and candidates of pointer maps, then their heat

The routing of a step, which has hundreds of bytes for each token, is stored in parts of ROUTING_PART tokens, each
once by the hash of its content. So the tokens that prompts have in common, such as the first screen of a group, take
space once.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

from pydantic_core import from_json, to_json

from bus.messages import Hint, PointerCandidate, PointerMap, SampledTokens, StepRecord, VersionSpan
from bus.packed import FloatArray, IntArray, float64s, int32s, little_endian
from dart_cli.data.store.rows import PlannedSample
from envs.contract.blobs import content_hash

_SHORT = b"R"
"""First byte of a prompt in the short form; zlib never begins with it."""

_EIGHT = b"\xff\xff\xff\0"
"""A mark that stands for eight of the repeated id in a row."""
_MANY = b"\xfe\xff\xff\0"
"""A mark that stands for sixteen of _EIGHT in a row."""

_HIGHEST = 3 if sys.byteorder == "little" else 0
"""Index of the highest of the four bytes of a machine's integer."""


ROUTING = "routing"
"""The media type of a part of a step's routing, in the table of screenshots."""
ROUTING_PART = 64
"""Tokens of one part of a step's routing."""


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
    action: dict[str, Any] | None  # the first
    error: str
    model_s: float
    env_s: float
    worker: str  # the rollout worker that finished the completion; empty for a pool's member
    instruction: str = ""  # as the policy read it; in step 0 alone
    reward: float | None = None  # the environment's reward for this step; None if it gave none
    observed_text: str = ""  # text that the policy read beside the screenshot
    pointed: list[PointerMap] = field(default_factory=list)  # as in StepRecord
    hint: Hint | None = None  # likewise
    more_actions: list[dict[str, Any]] = field(default_factory=list)  # likewise

    @property
    def actions(self) -> list[dict[str, Any]]:
        """All actions of the completion that were performed, in order."""
        return [] if self.action is None else [self.action, *self.more_actions]


@dataclass(frozen=True)
class BatchStep:
    """A step of a batch that is trained on, before steps that extend one another are chained."""

    group_id: str  # the group it is compared in
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
    reward: float | None = None  # as in PlannedSample
    baseline: float | None = None  # likewise
    routing: bytes = b""  # [P + A - 1, layers, chosen], as in SampledTokens
    hint: Hint | None = None  # as in StepRecord


BATCH_COLUMNS = (
    "image_hashes",
    "prompt_token_ids",
    "token_ids",
    "behaviour_logprobs",
    "version_spans",
    "patches",
    "worker",
    "routing",
    "hint",
)
"""The columns that `batch_step_of` reads, in its order."""


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
        "routing": _json([content_hash(part) for part in routing_parts(step)]),
        "text": step.text,
        "action": None if step.action is None else _json(step.action),
        "more_actions": _json(step.more_actions) if step.more_actions else None,
        "error": step.error,
        "model_s": step.model_s,
        "env_s": step.env_s,
        "worker": step.worker,
        "instruction": step.instruction,
        "observed_text": step.observed_text,
        "reward": step.reward,
        "hint": pack_hint(step.hint),
    }


def step_of(row: dict[str, Any]) -> StepRow:
    """Return the step of a row: the inverse of `columns_of`."""
    sampled = SampledTokens.model_construct(
        token_ids=unpack_ids(row.pop("token_ids")),
        behaviour_logprobs=unpack_floats(row.pop("behaviour_logprobs")),
        entropies=unpack_floats(row.pop("entropies")),
        version_spans=unpack_spans(row.pop("version_spans")),
        patches=unpack_ids(row.pop("patches")),
    )
    del row["routing"]  # only batches have it
    row |= {
        "sampled": sampled,
        "image_hashes": from_json(row["image_hashes"]),
        "prompt_token_ids": unpack_ids(prompt_ids(row["prompt_token_ids"])),
        "action": from_json(row["action"]) if row["action"] else None,
        "more_actions": from_json(row["more_actions"]) if row["more_actions"] else [],
        "pointed": unpack_maps(row["pointed"]),
        "hint": unpack_hint(row["hint"]),
    }
    return StepRow(**row)


def routing_parts(step: StepRecord | StepRow) -> list[bytes]:
    """Return the routing of a step in parts of ROUTING_PART tokens; the last one may be shorter."""
    routing = step.sampled.routing
    tokens = len(step.prompt_token_ids) + len(step.sampled.token_ids) - 1
    size = ROUTING_PART * (len(routing) // tokens) or 1
    return [routing[start : start + size] for start in range(0, len(routing), size)]


def batch_step_of(
    planned: PlannedSample,
    columns: Sequence[Any],
    read_parts: Callable[[Sequence[str]], Mapping[str, bytes]],
) -> BatchStep:
    """Return a step of a batch from its BATCH_COLUMNS; its numbers stay packed arrays.

    `read_parts` returns the parts of a routing by their keys. A step of which one is missing has none.
    """
    hashes, prompt, token_ids, logprobs, spans, patches, worker, routing, hint = columns
    # Other weights chose the experts of a member of the pool.
    keys = [] if planned.reason == "pool" else from_json(routing)
    parts = read_parts(keys) if keys else {}
    return BatchStep(
        group_id=planned.group_id,
        trajectory_id=planned.trajectory_id,
        step=planned.step,
        prompt_token_ids=int32s(prompt_ids(prompt)),
        token_ids=int32s(token_ids),
        image_hashes=from_json(hashes),
        behaviour_logprobs=float64s(logprobs),
        # Staleness does not apply to a member of the pool.
        version_spans=[] if planned.reason == "pool" else unpack_spans(spans),
        advantage=planned.advantage,
        weight=planned.weight,
        patches=unpack_ids(patches),
        worker=worker,
        routing=b"".join(parts[key] for key in keys) if parts.keys() >= {*keys} else b"",
        reward=planned.reward,
        baseline=planned.baseline,
        hint=unpack_hint(hint),
    )


def _json(value: object) -> str:
    """Return what json.dumps returns, in a quarter of its time."""
    return to_json(value).decode()


def pack_ids(values: Sequence[int]) -> bytes:
    """Return integers [N] as int32 bytes. Raises struct.error for an integer that does not fit."""
    if isinstance(values, array) and values.typecode == "i":
        return little_endian(values)
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ids(blob: bytes) -> list[int]:
    """Return the integers that `pack_ids` packed."""
    return list(struct.unpack(f"<{len(blob) // 4}i", blob))


def pack_prompt(values: Sequence[int]) -> bytes:
    """Return the ids [P] of a prompt in the format `prompt`, in a quarter of the time of deflating them."""
    # 1. Replace runs of the repeated id by marks.
    plain = pack_ids(values)
    unit = pack_ids([_repeated_id(values)])
    short = plain.replace(unit * 8, _EIGHT).replace(_EIGHT * 16, _MANY)
    # 2. Deflate the prompt if the short form is ambiguous. It is not if all top bytes are zero (then every id
    # fits in three bytes, and every mark is aligned with the ids) and no id looks like a mark.
    if short[3::4].strip(b"\0") or _EIGHT in plain or _MANY in plain:
        return zlib.compress(plain, 1)
    # 3. Write the three lower bytes as planes.
    return b"".join((_SHORT, unit, short[0::4], short[1::4], short[2::4]))


def prompt_ids(blob: bytes) -> bytes:
    """Return the ids that `pack_prompt` packed, as bytes in the format of `pack_ids`."""
    if blob[:1] != _SHORT:
        return zlib.decompress(blob)
    unit, planes = blob[1:5], blob[5:]
    size = len(planes) // 3
    short = bytearray(4 * size)
    for index in range(3):
        short[index::4] = planes[index * size : (index + 1) * size]
    return bytes(short).replace(_MANY, _EIGHT * 16).replace(_EIGHT, unit * 8)


def _repeated_id(values: Sequence[int]) -> int:
    """Return an id that is repeated many times in a row, by a look at every 16th; 0 if there is none."""
    sample = values[::16]
    index = bytes(map(eq, sample, sample[1:])).find(b"\1\1")  # three of the same id
    return sample[index] if index >= 0 else 0


def in_range(values: Sequence[int]) -> bool:
    """Return True if every integer is in [0, 2 ** 31), as a stored id must be."""
    try:
        is_packed = isinstance(values, array) and values.typecode == "i"
        plain = bytes(values) if is_packed else bytes(array("I", values))
    except OverflowError:
        return False
    return plain[_HIGHEST::4].isascii()  # true if all top bits are clear


def pack_floats(values: Sequence[float]) -> bytes:
    """Return floats [N] as float64 bytes."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes) -> list[float]:
    """Return the floats that `pack_floats` packed."""
    return list(struct.unpack(f"<{len(blob) // 8}d", blob))


def pack_spans(spans: Sequence[VersionSpan]) -> bytes:
    """Return version spans as triples (version, start, end) in int32."""
    return pack_ids([part for span in spans for part in (span.version, span.start, span.end)])


def unpack_spans(blob: bytes) -> list[VersionSpan]:
    """Return the version spans that `pack_spans` packed; they were checked before that."""
    parts = iter(unpack_ids(blob))
    return [
        VersionSpan.model_construct(version=version, start=start, end=end)
        for version, start, end in zip(parts, parts, parts, strict=True)
    ]


def span_versions(blob: bytes) -> list[int]:
    """Return only the versions of packed spans, in order."""
    return unpack_ids(blob)[::3]


def pack_hint(hint: Hint | None) -> bytes:
    """Return a hint as int32: start, end and its tokens; empty if there is none."""
    return b"" if hint is None else pack_ids([hint.start, hint.end, *hint.token_ids])


def unpack_hint(blob: bytes) -> Hint | None:
    """Return the hint that `pack_hint` packed."""
    if not blob:
        return None
    start, end, *_ = unpack_ids(blob[:8])
    return Hint.model_construct(start=start, end=end, token_ids=int32s(blob[8:]))


def pack_maps(maps: Sequence[PointerMap]) -> bytes:
    """Return a step's pointer maps in the format `maps`; empty if there are none."""
    if not maps:
        return b""
    shapes = [
        [m.position, m.rows, m.columns, [[c.x, c.y, c.score] for c in m.candidates]] for m in maps
    ]
    head = json.dumps(shapes, separators=(",", ":")).encode()
    heat = zlib.compress(b"".join(pointer_map.heat for pointer_map in maps))
    return struct.pack("<I", len(head)) + head + heat


def unpack_maps(blob: bytes) -> list[PointerMap]:
    """Return the pointer maps that `pack_maps` packed."""
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

"""Scenes on disk: shards of msgpack, each scene packed by itself and unpacked when it is read.

write_shard   a shard, whole or not at all
write_shards  many; shards that are there already are skipped
load          all scenes of a folder, as a sequence that unpacks them one by one
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgpack

from scripts.shipped_models.reading.scene import Glyph, Query, Scene, Thing

SUFFIX = ".scenes"


class Packed(Sequence[Scene]):
    """A sequence of packed scenes in memory; each is unpacked when it is read."""

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, at: int) -> Scene: ...
    @overload
    def __getitem__(self, at: slice) -> Packed: ...
    def __getitem__(self, at: int | slice) -> Scene | Packed:
        if isinstance(at, slice):
            return Packed(self._packed[at])
        return _unpack(msgpack.unpackb(self._packed[at]))


def load(folder: Path, names: str = "*") -> Packed:
    """Return all scenes of the shards of a folder whose names match the pattern, in the order of names."""
    packed: list[bytes] = []
    for path in sorted(folder.glob(f"{names}{SUFFIX}")):
        packed += msgpack.unpackb(path.read_bytes())
    return Packed(packed)


def write_shard(path: Path, scenes: Iterable[Scene]) -> int:
    """Write a shard, renamed to `path` when it is complete; return how many scenes it has."""
    packed = [msgpack.packb(_plain(scene)) for scene in scenes]
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}.half")
    half.write_bytes(msgpack.packb(packed))
    half.rename(path)
    return len(packed)


def write_shards(
    folder: Path, shards: Iterable[tuple[str, Callable[[], Iterable[Scene]]]]
) -> Iterator[tuple[str, int]]:
    """Write the shards that are not there yet; yield the name and number of scenes of each."""
    for name, make in shards:
        path = folder / f"{name}{SUFFIX}"
        if not path.exists():
            yield name, write_shard(path, make())


def _plain(scene: Scene) -> list[Any]:
    """Return a scene as lists; its picture is compressed."""
    image = scene.image
    buffer = io.BytesIO()
    image.save(buffer, "png", compress_level=6)
    return [
        scene.key,
        buffer.getvalue(),
        ["".join(glyph.character for glyph in scene.glyphs), [[g.x, g.y] for g in scene.glyphs]],
        [
            [t.role, t.label, t.box, t.colour, t.shape, t.size, t.checked, t.value]
            for t in scene.things
        ],
        [[a.text, a.answer, a.boxes, a.kind, a.before] for a in scene.queries],
        scene.unread,
    ]


def _unpack(plain: list[Any]) -> Scene:
    key, png, (characters, places), things, queries, unread = plain
    return Scene(
        key=key,
        png=png,
        glyphs=tuple(
            Glyph(character, *place) for character, place in zip(characters, places, strict=True)
        ),
        things=tuple(Thing(role, label, tuple(box), *rest) for role, label, box, *rest in things),
        queries=tuple(
            Query(
                text,
                answer,
                tuple(tuple(box) for box in boxes),
                kind,
                before if before is None else tuple(before),
            )
            for text, answer, boxes, kind, before in queries
        ),
        unread=tuple(tuple(box) for box in unread),
    )

"""Blobs hold exactly what was put in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import VersionSpan
from dart_cli.data.blobs import (
    deflate_ids,
    inflate_ids,
    pack_floats,
    pack_ids,
    pack_spans,
    unpack_floats,
    unpack_ids,
    unpack_spans,
)

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)


@given(ids)
def test_ids_come_back_exactly(values: list[int]) -> None:
    assert unpack_ids(pack_ids(values)) == values
    assert inflate_ids(deflate_ids(values)) == values


@given(st.lists(st.floats(allow_nan=False), max_size=200))
def test_floats_come_back_bit_for_bit(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=9))
def test_spans_come_back_exactly(triples: list[tuple[int, int, int]]) -> None:
    spans = [VersionSpan(version=v, start=s, end=e) for v, s, e in triples]
    assert unpack_spans(pack_spans(spans)) == spans


def test_a_five_screenshot_prompt_takes_under_a_kilobyte() -> None:
    prompt = [*range(60), *([151655] * 2700 + [7]) * 5, *range(60)]
    assert len(deflate_ids(prompt)) < 1000


def test_an_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(struct.error):
        pack_ids([2**31])

"""Blobs hold exactly what was put in."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Hint, VersionSpan
from bus.packed import int32s
from dart_cli.data.store.steps import (
    in_range,
    pack_floats,
    pack_hint,
    pack_ids,
    pack_prompt,
    pack_spans,
    prompt_ids,
    unpack_floats,
    unpack_hint,
    unpack_ids,
    unpack_spans,
)

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)


@given(ids)
def test_ids_come_back_exactly(values: list[int]) -> None:
    assert unpack_ids(pack_ids(values)) == values
    assert unpack_ids(prompt_ids(pack_prompt(values))) == values


@given(st.lists(st.floats(allow_nan=False), max_size=200))
def test_floats_come_back_bit_for_bit(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=9))
def test_spans_come_back_exactly(triples: list[tuple[int, int, int]]) -> None:
    spans = [VersionSpan(version=v, start=s, end=e) for v, s, e in triples]
    assert unpack_spans(pack_spans(spans)) == spans


@given(st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_hints_come_back_exactly(start: int, end: int, tokens: list[int]) -> None:
    hint = Hint(start=start, end=end, token_ids=int32s(tokens))
    assert unpack_hint(pack_hint(hint)) == hint
    assert unpack_hint(pack_hint(None)) is None


def test_a_five_screenshot_prompt_takes_under_a_kilobyte() -> None:
    prompt = [*range(60), *([151655] * 2700 + [7]) * 5, *range(60)]
    assert len(pack_prompt(prompt)) < 1000


def test_an_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(struct.error):
        pack_ids([2**31])


def test_packed_ids_of_an_older_dart_are_read() -> None:
    values = [5, 5, 5, 151655, 0, 2**31 - 1]
    assert unpack_ids(prompt_ids(zlib.compress(struct.pack("<6i", *values), 1))) == values


@given(ids)
def test_a_value_is_in_range_where_an_id_can_be(values: list[int]) -> None:
    assert in_range(values) == all(0 <= value < 2**31 for value in values)


def test_values_beyond_every_integer_are_not_in_range() -> None:
    for value in (2**31, 2**32, 2**80, -1, -(2**80)):
        assert not in_range([1, value])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 7, 151655, 2**24 - 1, 2**24 - 2, 2**24]), st.integers(1, 300)
        ),
        max_size=6,
    )
)
def test_prompts_of_long_rows_come_back_exactly(rows: list[tuple[int, int]]) -> None:
    values = [value for value, count in rows for _ in range(count)]
    assert unpack_ids(prompt_ids(pack_prompt(values))) == values

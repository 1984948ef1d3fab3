"""Screenshots in JSON become observations, quickly, or the reason why not."""

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bus.errors import EnvError
from envs.tools.remote.images import CutNumbers, cut_numbers, from_numbers, from_pixels, from_text


def png(width: int, height: int) -> bytes:
    into = io.BytesIO()
    Image.new("RGB", (width, height), (9, 8, 7)).save(into, "PNG")
    return into.getvalue()


def pixels_in(observation) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(observation.screenshot)))


def test_an_image_in_base64_stays_as_it_is():
    observation = from_text(base64.b64encode(png(5, 3)).decode(), "here")
    assert (observation.screenshot, observation.media_type, observation.width, observation.height) == (
        png(5, 3), "image/png", 5, 3,
    )  # fmt: skip


def test_a_data_url_is_its_image():
    url = "data:image/png;base64," + base64.b64encode(png(2, 2)).decode()
    assert from_text(url, "here").screenshot == png(2, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "NoneType"),
        ("data:image/png,raw", "without base64"),
        ("abc", "no base64"),
        (base64.b64encode(b"hello").decode(), "5 bytes that are no"),
    ],
)
def test_what_is_no_image_says_why(text, why):
    with pytest.raises(EnvError, match=f"here.*{why}"):
        from_text(text, "here")


@given(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 3, 4]), st.integers(0, 2**32 - 1),
    st.sampled_from([(",", ":"), (", ", ": ")]),
)  # fmt: skip
def test_numbers_cut_out_of_a_reply_are_those_that_json_reads(
    height, width, deep, seed, separators
):
    array = np.random.default_rng(seed).integers(0, 256, (height, width, deep), np.uint8)
    reply = {
        "data": {"observation": {"goal": 'say "shot":[1]', "shot": array.tolist(), "z": [[1]]}}
    }
    cut = cut_numbers(json.dumps(reply, separators=separators).encode(), "shot")
    assert cut is not None
    np.testing.assert_array_equal(cut.pixels, array)
    reply["data"]["observation"]["shot"] = None
    assert json.loads(cut.rest) == reply


@given(st.lists(st.integers(0, 255), min_size=1, max_size=30), st.integers(1, 2))
def test_flat_lists_and_lists_of_rows_are_cut_too(numbers, depth):
    listed = numbers if depth == 1 else [numbers, numbers]
    cut = cut_numbers(json.dumps({"shot": listed}).encode(), "shot")
    assert cut is not None
    np.testing.assert_array_equal(cut.pixels, np.array(listed))


@pytest.mark.parametrize(
    "reply",
    [
        '{"shot": [[1, 2], [3]]}',
        '{"shot": [[1, 2], [3], [4, 5, 6]]}',
        '{"shot": [[[1], [2]], [[3]]]}',
        '{"shot": [[[1], [2]], [[3]], [[4], [5], [6]]]}',
        '{"shot": [300]}',
        '{"shot": []}',
        '{"shot": [1.5]}',
        '{"shot": [[[[1]]]]}',
        '{"shot": "no"}',
        '{"a": {"shot": [1]}, "shot": [2]}',
        '{"shot": [1, 2',
    ],
)
def test_what_is_no_even_list_of_bytes_is_left_to_json(reply):
    assert cut_numbers(reply.encode(), "shot") is None


def test_a_key_within_a_text_is_not_taken_for_one():
    reply = json.dumps({"goal": '"shot":[[1]]', "shot": [[7]]}).encode()
    cut = cut_numbers(reply, "shot")
    assert cut is not None
    assert json.loads(cut.rest) == {"goal": '"shot":[[1]]', "shot": None}


def test_pixels_are_encoded_without_loss():
    array = np.random.default_rng(3).integers(0, 256, (4, 6, 3), np.uint8)
    np.testing.assert_array_equal(pixels_in(from_pixels(array, "here")), array)
    with_alpha = np.dstack([array, array[:, :, :1]])
    np.testing.assert_array_equal(pixels_in(from_pixels(with_alpha, "here")), array)
    np.testing.assert_array_equal(pixels_in(from_pixels(array[:, :, :1], "here")), array[:, :, 0])


def test_a_flat_list_takes_its_shape_from_the_reply():
    observation = from_numbers(list(range(24)), [4, 2, 3], "here")
    np.testing.assert_array_equal(pixels_in(observation), np.arange(24).reshape(4, 2, 3))
    cut = CutNumbers(b"", np.arange(24, dtype=np.uint8))
    np.testing.assert_array_equal(
        pixels_in(cut.observation([4, 2, 3], "here")), pixels_in(observation)
    )


@pytest.mark.parametrize(
    ("numbers", "shape", "why"),
    [
        ([[1], [2, 3]], None, "different lengths"),
        ([[0.5]], None, "whole numbers"),
        ([[256]], None, "outside 0 to 255"),
        ([1, 2], [3], "make no"),
        ([1, 2], "2", "shape must be"),
        ([1, 2], None, "want .height, width"),
        ([[[1, 2]]], None, "want .height, width"),
    ],
)
def test_lists_that_are_no_pixels_say_why(numbers, shape, why):
    with pytest.raises(EnvError, match=f"here.*{why}"):
        from_numbers(numbers, shape, "here")

"""Pictures as a viewer shows them: turned, on white, of 16 bits."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from envs.contract.screenshots import as_seen, observe, pixels_of, seen_size, size_of


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    into = io.BytesIO()
    image.save(into, kind, **options)
    return into.getvalue()


def turned(orientation: int, kind: str) -> bytes:
    """A picture of four colours, 40x20, with the orientation in its EXIF."""
    image = Image.new("RGB", (40, 20), "red")
    for box, colour in (((20, 0, 40, 10), "lime"), ((0, 10, 20, 20), "blue")):
        image.paste(colour, box)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encode(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(orientation: int, kind: str) -> None:
    encoded = turned(orientation, kind)
    right = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    assert np.array_equal(np.asarray(pixels_of(encoded)), np.asarray(right))
    assert size_of(encoded) == right.size
    observation = observe(encoded, "png")
    assert (observation.width, observation.height) == right.size


def test_exif_behind_the_picture_of_a_png_leaves_one_size() -> None:
    """Pillow knows it only once the picture is decoded."""
    encoded = turned(6, "PNG")
    begin = encoded.index(b"eXIf") - 4
    end = encoded.index(b"IDAT") - 4
    late = encoded[:begin] + encoded[end:-12] + encoded[begin:end] + encoded[-12:]
    observation = observe(late, "jpeg")
    with Image.open(io.BytesIO(observation.screenshot)) as image:
        assert (observation.width, observation.height) == image.size == size_of(late)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_that_cannot_be_read_turns_nothing() -> None:
    encoded = encode(Image.new("RGB", (40, 20)), "JPEG", exif=b"Exif\0\0MM\0*nonsense")
    assert size_of(encoded) == pixels_of(encoded).size == (40, 20)


def test_sixteen_bits_of_grey_keep_their_upper_eight() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = np.asarray(pixels_of(encode(Image.fromarray(ramp))))
    assert np.array_equal(pixels, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))


def _palette() -> Image.Image:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 0, 0])
    image.info["transparency"] = 0
    return image


CLEAR = {
    "RGBA": Image.new("RGBA", (8, 8), (255, 0, 0, 0)),
    "LA": Image.new("LA", (8, 8), (0, 0)),
    "P": _palette(),
}


@pytest.mark.parametrize("mode", CLEAR)
def test_what_is_transparent_is_white(mode: str) -> None:
    assert pixels_of(encode(CLEAR[mode])).getcolors() == [(64, (255, 255, 255))]


def test_what_is_half_transparent_is_mixed_with_white() -> None:
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert pixels_of(encode(half)).getpixel((0, 0)) == (255, 127, 127)


def test_the_size_is_read_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(io.BytesIO(encode(Image.new("RGB", (40, 20)))))

    def load(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(image, "load", load)
    assert seen_size(image) == (40, 20)


def test_an_opaque_picture_stays_as_it_is() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (20, 40, 3), dtype=np.uint8)
    opaque = Image.fromarray(pixels).convert("RGBA")
    assert np.array_equal(np.asarray(as_seen(opaque)), pixels)

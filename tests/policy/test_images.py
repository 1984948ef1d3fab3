from __future__ import annotations

import io
import zlib
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from transformers import Qwen2VLImageProcessorPil

from bus.errors import EngineError
from dart_cli.policy.images import ImagePreparer, patches_of, with_hashes
from envs.contract.blobs import content_hash
from envs.contract.screenshots import stored_as
from envs.suites.embedded.suites import MiniSuite
from scripts.tiny_model import build_image_processor
from tests.devices import no_gpu


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = torch.Generator().manual_seed(width * height)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy()).convert(mode)


PROCESSORS = {
    "tiny": build_image_processor(),
    "qwen2_5_vl": Qwen2VLImageProcessorPil(),
    "qwen3_vl": Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3),
}


@pytest.mark.parametrize("size", [(168, 168), (448, 336), (301, 97), (640, 360)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_are_those_of_the_hugging_face_processor(name: str, size: tuple[int, int]) -> None:
    processor = PROCESSORS[name]
    blob = encoded(noise(*size))
    mine = ImagePreparer(processor).prepare(blob)
    theirs = processor([Image.open(io.BytesIO(blob))], return_tensors="pt")
    assert torch.equal(mine.patches, theirs["pixel_values"])
    assert list(mine.grid) == theirs["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(
    ("mode", "kind"), [("P", "PNG"), ("L", "PNG"), ("RGBA", "PNG"), ("RGB", "JPEG")]
)
def test_every_encoding_a_screenshot_comes_in_is_exact(mode: str, kind: str) -> None:
    processor = PROCESSORS["tiny"]
    blob = encoded(noise(168, 168, mode), kind)
    mine = ImagePreparer(processor).prepare(blob)
    theirs = processor([Image.open(io.BytesIO(blob)).convert("RGB")], return_tensors="pt")
    assert torch.equal(mine.patches, theirs["pixel_values"])


@pytest.mark.parametrize("orientation", [3, 6])
def test_engine_and_trainer_are_shown_a_turned_picture_as_it_is_seen(orientation: int) -> None:
    processor = PROCESSORS["tiny"]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    noise(168, 84).save(buffer, "PNG", exif=exif)
    blob = buffer.getvalue()
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(blob)))
    preparer = ImagePreparer(processor)
    theirs = processor([seen], return_tensors="pt")
    assert preparer.token_count(blob) == preparer.prepare(blob).tokens
    assert torch.equal(preparer.prepare(blob).patches, theirs["pixel_values"])
    assert list(preparer.prepare(blob).grid) == theirs["image_grid_thw"][0].tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(PROCESSORS)))
def test_any_pixels_become_the_processors_numbers(data: st.DataObject, name: str) -> None:
    """Against the processor's own arithmetic on a whole image, for screens of any bytes and sizes."""
    processor = PROCESSORS[name]
    factor = processor.patch_size * processor.merge_size
    rows, columns = (factor * data.draw(st.integers(2, 5)) for _ in range(2))
    seed, few = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 256))
    bytes_ = np.random.default_rng(seed).integers(0, few, (rows, columns, 3), dtype=np.uint8)
    image = Image.fromarray(bytes_)
    preparer = ImagePreparer(processor)
    mine = preparer.of_image("x", image)
    theirs = processor([image], return_tensors="pt")["pixel_values"]
    assert torch.equal(mine.patches, theirs)
    other = preparer.of_image("y", image.transpose(Image.Transpose.ROTATE_180))
    both = patches_of([mine, other, mine], torch.device("cpu"))
    assert torch.equal(both, torch.cat([mine.patches, other.patches, mine.patches]))


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_byte_has_the_number_that_the_processor_gives_it(name: str) -> None:
    processor = PROCESSORS[name]
    table = ImagePreparer(processor).table
    for byte in range(256):
        flat = Image.new("RGB", (112, 112), (byte, 255 - byte, byte // 2))
        theirs = processor([flat], return_tensors="pt")["pixel_values"]
        each = theirs.unflatten(1, (3, -1))[0, :, 0]
        assert torch.equal(table.values[range(3), [byte, 255 - byte, byte // 2]], each)


def test_a_screen_is_held_as_bytes_an_eighth_of_its_patches() -> None:
    preparer = ImagePreparer(Qwen2VLImageProcessorPil(max_pixels=16384 * 28 * 28))
    held = preparer.prepare(encoded(noise(1920, 1080), "JPEG"))
    assert held.pixels.dtype == torch.uint8
    assert held.pixels.nbytes == 2691 * 4 * 588 == preparer._cached_bytes
    assert held.patches.nbytes == 8 * held.pixels.nbytes


@pytest.mark.gpu
@no_gpu
def test_patches_made_on_a_gpu_are_those_of_the_cpu() -> None:
    prepared = ImagePreparer(PROCESSORS["tiny"]).prepare(encoded(noise(448, 336)))
    assert torch.equal(patches_of([prepared], torch.device("cuda")).cpu(), prepared.patches)


def test_a_screenshot_of_the_embedded_environment_takes_36_tokens() -> None:
    suite = MiniSuite()
    env = suite.make_env()
    observation, _ = env.reset(seed=1, options={"task": suite.tasks["mini/click"]})
    preparer = ImagePreparer(PROCESSORS["tiny"])
    assert preparer.token_count(observation.screenshot) == 36
    assert preparer.prepare(observation.screenshot).tokens == 36


@pytest.mark.parametrize("size", [(168, 168), (301, 97), (1280, 720), (1920, 1080)])
def test_tokens_counted_from_the_header_are_those_of_the_patches(size: tuple[int, int]) -> None:
    preparer = ImagePreparer(PROCESSORS["qwen2_5_vl"])
    blob = encoded(noise(*size), "JPEG")
    counted = preparer.token_count(blob)
    assert counted == preparer.prepare(blob).tokens == preparer.token_count(blob)


def test_full_hd_becomes_1932_x_1092_as_ui_tars_expects() -> None:
    processor = Qwen2VLImageProcessorPil(max_pixels=16384 * 28 * 28)
    assert ImagePreparer(processor).resized(1920, 1080) == (1932, 1092)


@pytest.mark.parametrize(
    "told",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 1003520}},
        {"size": {"min_pixels": 3136, "max_pixels": 1003520}},  # as older folders write it
        {"min_pixels": 3136, "max_pixels": 1003520},
    ],
)
def test_the_bounds_of_a_screen_are_read_under_all_their_names(told: dict[str, object]) -> None:
    processor = Qwen2VLImageProcessorPil.from_dict({"patch_size": 14, "merge_size": 2, **told})
    assert ImagePreparer(processor).resized(1920, 1080) == (1316, 728)


def test_a_processor_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="size names neither"):
        ImagePreparer(Qwen2VLImageProcessorPil.from_dict({"size": {"height": 3, "width": 4}}))


def test_the_cache_returns_the_same_patches_and_stays_within_its_bound() -> None:
    preparer = ImagePreparer(PROCESSORS["tiny"], cache_bytes=3 * 144 * 588)
    blobs = [encoded(noise(168, 168 + 28 * i)) for i in range(6)]
    first = preparer.prepare(blobs[0])
    assert preparer.prepare(blobs[0]) is first
    for blob in blobs:
        preparer.prepare(blob)
    assert preparer._cached_bytes <= 3 * 144 * 588 or len(preparer._cache) == 1
    assert torch.equal(preparer.prepare(blobs[0]).patches, first.patches)


def test_what_somebody_holds_is_found_though_the_cache_has_let_it_go() -> None:
    preparer = ImagePreparer(PROCESSORS["tiny"], cache_bytes=1)
    blobs = [encoded(noise(168, 168 + 14 * i)) for i in range(3)]
    held = [preparer.prepare(blob) for blob in blobs]
    assert len(preparer._cache) == 1
    assert all(preparer.prepare(blob) is image for blob, image in zip(blobs, held, strict=True))
    del held
    assert len(preparer._alive) == 1


def test_a_screenshot_under_the_hash_of_another_is_refused_and_kept_nowhere() -> None:
    preparer = ImagePreparer(PROCESSORS["tiny"])
    blob, other = encoded(noise(168, 168)), encoded(noise(168, 182))
    with pytest.raises(EngineError, match="another content hash"):
        preparer.prepare(blob, content_hash(other))
    assert torch.equal(
        preparer.prepare(other, content_hash(other)).patches, preparer.prepare(other).patches
    )


def test_hashes_are_as_many_as_screenshots_or_none() -> None:
    assert with_hashes([b"a", b"b"], []) == [(b"a", ""), (b"b", "")]
    assert with_hashes([b"a"], ["x"]) == [(b"a", "x")]
    with pytest.raises(EngineError, match="2 screenshots come with 1 content hashes"):
        with_hashes([b"a", b"b"], ["x"])


def test_bytes_that_are_no_image_are_refused() -> None:
    preparer = ImagePreparer(PROCESSORS["tiny"])
    with pytest.raises(EngineError, match="no PNG, JPEG or WebP"):
        preparer.prepare(b"not an image")
    with pytest.raises(EngineError, match="no PNG, JPEG or WebP"):
        preparer.token_count(b"not an image")


def broken_images() -> dict[str, bytes]:
    whole = encoded(noise(400, 400))
    chunk = whole.rindex(b"IDAT")
    header = bytearray(encoded(noise(8, 8)))
    header[16:24] = (30_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    return {
        "cut off": whole[: len(whole) // 2],
        "an unknown chunk": whole[:chunk] + b"\x01\x02\x03\x04" + whole[chunk + 4 :],
        "one pixel wide": encoded(noise(1, 300)),
        "a bomb": bytes(header),
    }


@pytest.mark.parametrize("kind", broken_images())
def test_a_broken_image_is_refused(kind: str) -> None:
    with pytest.raises(EngineError, match="must send whole images"):
        ImagePreparer(PROCESSORS["tiny"]).prepare(broken_images()[kind])


@pytest.mark.parametrize("kind", ["one pixel wide", "a bomb"])
def test_a_size_that_cannot_be_is_refused_by_its_header(kind: str) -> None:
    with pytest.raises(EngineError, match="impossible size"):
        ImagePreparer(PROCESSORS["tiny"]).token_count(broken_images()[kind])


@pytest.mark.parametrize("encoding", ["webp", "jpeg"])
def test_engines_and_trainer_decode_the_stored_bytes_to_the_same_pixels(
    encoding: Literal["webp", "jpeg"],
) -> None:
    """Both prepare the bytes that are stored, and no others: what is lost is lost for both."""
    images = ImagePreparer(PROCESSORS["qwen2_5_vl"])
    seen, _ = MiniSuite().make_env(size="448x336").reset(seed=1, options={"task": "mini/popup"})
    stored = stored_as(seen, encoding).screenshot
    prepared = images.prepare(stored)
    assert images.token_count(stored, "of another process") == prepared.tokens
    for screen, is_same in ((stored, True), (seen.screenshot, encoding == "webp")):
        whole = Image.open(io.BytesIO(screen)).convert("RGB")
        decoded = images.of_image(f"another {len(screen)}", whole)
        assert torch.equal(decoded.pixels, prepared.pixels) == is_same

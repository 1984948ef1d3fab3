"""env.screenshots: encoded once, where the environment runs; everything after decodes those bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bus.errors import EnvError
from dart_cli.config.schema import EnvConfig
from dart_cli.data.store.writer import media_type
from dart_cli.env.async_env import make_async_env
from dart_cli.env.episode import play_episode
from envs.contract.base import Observation
from envs.contract.blobs import content_hash, image_suffix, image_type
from envs.contract.registry import find_task, load_suite, make_env
from envs.contract.screenshots import stored_as
from tests.env.parts import Memory, Says, action_spec, lease


def pixels(encoded: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def saved(encoded: bytes, encoding: str) -> bytes:
    """What Pillow makes of the lossless screen."""
    into = io.BytesIO()
    how = {"lossless": True, "quality": 0, "method": 1} if encoding == "webp" else {"quality": 90}
    Image.open(io.BytesIO(encoded)).convert("RGB").save(into, encoding, **how)
    return into.getvalue()


@pytest.mark.parametrize(
    ("encoding", "isolation"), [("webp", "thread"), ("jpeg", "thread"), ("webp", "process")]
)
async def test_each_step_keeps_the_screen_that_the_policy_saw_encoded_once(
    encoding: str, isolation: str
) -> None:
    config = EnvConfig.model_validate({"screenshots": encoding, "isolation": isolation})
    env, plain = make_async_env(config, "env-0/0"), make_env("mini")
    policy, sink = Says("click(1,1)", "click(999,999)", "done()"), Memory()
    one_lease = lease()
    try:
        await play_episode(
            env, one_lease, find_task("mini", one_lease.task_id), policy, sink, action_spec()
        )
    finally:
        await env.close()
    first, _ = plain.reset(seed=one_lease.task_seed, options={"task": one_lease.task_id})
    assert sink.steps[0].screenshot == saved(first.screenshot, encoding)
    for record, request in zip(sink.steps, policy.requests, strict=True):
        assert record.screenshot == request.screenshot
        assert record.image_hashes[-1] == content_hash(record.screenshot)
        assert record.media_type == image_type(record.screenshot) == f"image/{encoding}"
    final = sink.ends[0].screenshot
    assert final is not None
    assert media_type(final) == f"image/{encoding}"
    same = (pixels(first.screenshot) == pixels(sink.steps[0].screenshot)).all()
    assert same == (encoding == "webp")


def test_webp_loses_nothing_and_is_smaller() -> None:
    env = make_env("desk")
    screen, _ = env.reset(seed=1, options={"task": next(iter(load_suite("desk").tasks))})
    stored = stored_as(screen, "webp")
    assert (pixels(stored.screenshot) == pixels(screen.screenshot)).all()
    assert len(stored.screenshot) < len(screen.screenshot)


def test_png_leaves_every_screen_as_the_suite_gave_it() -> None:
    for options, kind in (({}, "png"), ({"encoding": "jpeg"}, "jpeg")):
        env = make_env("mini", **options)
        screen, _ = env.reset(seed=1, options={"task": "mini/popup"})
        assert screen.media_type == f"image/{kind}"
        assert stored_as(screen, "png") is screen
        assert (stored_as(screen, "jpeg") is screen) == (kind == "jpeg")  # never twice


def test_a_screen_that_cannot_be_written_names_the_encoding() -> None:
    wide = io.BytesIO()
    Image.new("1", (17_000, 1)).save(wide, "PNG")
    screen = Observation(wide.getvalue(), "image/png", 17_000, 1)
    with pytest.raises(EnvError, match="cannot be written as webp"):
        stored_as(screen, "webp")


def test_names_by_content() -> None:
    files = {kind: io.BytesIO() for kind in ("png", "jpeg", "webp", "gif")}
    for kind, into in files.items():
        Image.new("RGB", (8, 8)).save(into, kind)
    types = {kind: image_type(into.getvalue()) for kind, into in files.items()}
    assert types == {
        "png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "gif": None
    }  # fmt: skip
    assert [image_suffix(into.getvalue()) for into in files.values()] == [
        "png", "jpg", "webp", "jpg"
    ]  # fmt: skip

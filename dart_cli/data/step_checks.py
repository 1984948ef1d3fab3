"""Whether what an environment hands in fits together, before it is filed.

check_step    lengths, ranges, version spans, patches and image hashes of one step
check_end     the end of a trajectory
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from bus.errors import ProtocolError
from bus.messages import StepRecord, TrajectoryEnd
from dart_cli.config.schema import Config
from dart_cli.data.exchange.compatibility import live_patch_mistake
from dart_cli.data.store.encoding import in_range
from dart_cli.policy.pointer.tokens import map_mistake
from envs.base import content_hash, image_type


def check_step(record: StepRecord, config: Config) -> None:
    """Raise ProtocolError if lengths, ranges, spans or hashes do not fit together.

    What is filed is trained on: a step that the trainer would refuse must not become part of a
    batch, which would be served again and again.
    """
    where = f"step {record.step} of {record.trajectory_id}"
    _check_range(where, "step", [record.step])
    _check_range(where, "prompt_token_ids", record.prompt_token_ids)
    _check_range(where, "token_ids", record.sampled.token_ids)
    _check_range(where, "version_spans", [span.version for span in record.sampled.version_spans])
    _check_times(where, record.model_s, record.env_s)
    length = len(record.sampled.token_ids)
    if not length or not record.prompt_token_ids:
        raise ProtocolError(f"{where}: prompt_token_ids and token_ids must not be empty")
    for name in ("behaviour_logprobs", "entropies"):
        values: list[float] = getattr(record.sampled, name)
        if len(values) != length:
            raise ProtocolError(f"{where}: {name} must be as many as token_ids, {length}")
        if not all(map(isfinite, values)):
            raise ProtocolError(f"{where}: {name} must be finite")
    covered = 0
    for span in record.sampled.version_spans:
        if span.start != covered or not covered < span.end <= length:
            raise ProtocolError(f"{where}: version_spans must cover the tokens in order, once")
        covered = span.end
    if covered != length:
        raise ProtocolError(f"{where}: version_spans cover {covered} of {length} tokens")
    if mistake := live_patch_mistake(config, record.sampled, record.screenshot):
        raise ProtocolError(f"{where}: {mistake}")
    if mistake := map_mistake(record.pointed, record.sampled.patches):
        raise ProtocolError(f"{where}: {mistake}")
    if not record.image_hashes or record.image_hashes[-1] != content_hash(record.screenshot):
        raise ProtocolError(f"{where}: the last of image_hashes must be the screenshot's")
    for image in record.images:
        if image_type(image) is None or content_hash(image) not in record.image_hashes:
            raise ProtocolError(f"{where}: images must be PNG, JPEG or WebP, and of image_hashes")


def check_end(end: TrajectoryEnd) -> None:
    """Raise ProtocolError for values that no episode can have."""
    where = f"end of {end.trajectory_id}"
    _check_range(where, "steps", [end.steps])
    _check_times(where, end.reset_s, end.wall_s)


def _check_range(where: str, name: str, values: Sequence[int]) -> None:
    if not in_range(values):
        raise ProtocolError(f"{where}: {name} must be in [0, 2 ** 31)")


def _check_times(where: str, *seconds: float) -> None:
    if not all(isfinite(value) and value >= 0 for value in seconds):
        raise ProtocolError(f"{where}: times must be finite and not negative, got {seconds}")

"""Settings that were changed and that nothing reads, because another one is off; told in a dry run.

unread   each such key, and what would let it act
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dart_cli.config.schema import BY_TRACKER, Config

_READ: tuple[tuple[Callable[[Config], bool], str, tuple[str, ...]], ...] = (
    (
        lambda config: config.data.advantage in BY_TRACKER,
        "data.advantage by trackers",
        (
            *("data.tracker_decay", "data.tracker_half_life", "data.tracker_scale"),
            "data.tracker_margin",
        ),
    ),
    (
        lambda config: config.data.scheduling == "april",
        'data.scheduling = "april"',
        ("data.over_provision", "data.recycle"),
    ),
    (
        lambda config: config.data.screen_credit != "off",
        "data.screen_credit",
        ("data.screen_weight", "data.screen_discount"),
    ),
    (lambda config: config.data.dynamic_number, "data.dynamic_number", ("data.min_group_size",)),
    (lambda config: config.data.dynamic_length, "data.dynamic_length", ("data.length_slack",)),
    (
        lambda config: config.data.pool_ratio > 0,
        "data.pool_ratio",
        ("data.pool_online", "data.pool_per_task"),
    ),
    (
        lambda config: config.train.reuse > 0,
        "train.reuse",
        (
            *("train.reuse_gap", "train.reuse_min_ess", "train.reuse_min_agreement"),
            *("train.reuse_until", "train.reuse_fall"),
        ),
    ),
    (
        lambda config: config.train.correction in ("truncated", "sequence"),
        'train.correction = "truncated" or "sequence"',
        ("train.is_cap",),
    ),
    (
        lambda config: config.train.correction == "masked",
        'train.correction = "masked"',
        ("train.mask_low", "train.mask_high"),
    ),
    (lambda config: config.train.min_ess > 0, "train.min_ess", ("train.low_ess",)),
    (
        lambda config: config.train.demonstrations == "shaped",
        'train.demonstrations = "shaped"',
        ("train.demonstration_gamma",),
    ),
    (
        lambda config: config.train.normalise == "constant",
        'train.normalise = "constant"',
        ("train.constant_tokens",),
    ),
    (
        lambda config: config.policy.history == "evict",
        'policy.history = "evict"',
        ("policy.history_images_most",),
    ),
)
"""(whether they are read, with what, keys)."""


def unread(config: Config) -> Iterator[tuple[str, str]]:
    """(key, what alone reads it) of settings that differ from their defaults and have no effect."""
    for is_read, reader, keys in _READ:
        if is_read(config):
            continue
        for key in keys:
            section, name = key.split(".")
            value = getattr(config, section)
            if getattr(value, name) != type(value).model_fields[name].default:
                yield key, reader

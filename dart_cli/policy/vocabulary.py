"""Tokens of the supported vocabularies: which a policy may sample; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

END = "<|im_end|>"

CHAT_MESSAGE = """\
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>"""
"""One message in the chat templates that we write ourselves."""

STRUCTURAL = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens that structure a prompt; in a completion they would break the next forward pass or prompt."""


def forbidden_ids(
    known: Mapping[str, int], vocabulary: int, *, ends: Iterable[int], others: Iterable[int]
) -> set[int]:
    """Ids below `vocabulary` that are never sampled: STRUCTURAL, `others`, and rows without a token.

    `ends`, and END if `known`, are sampled: a completion ends with one of them.
    """
    forbidden = {known[token] for token in STRUCTURAL if token in known} | set(others)
    forbidden |= set(range(vocabulary)) - set(known.values())
    return forbidden.difference(ends, {known[END]} if END in known else ())

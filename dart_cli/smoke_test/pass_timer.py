"""Measure how long a forward and a backward pass of the model take on this machine."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import torch
from PIL import Image

from dart_cli.policy.forward import last_hidden
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.smoke_test.time_budget import RunSize

TEXT = 300
"""Tokens of text in a prompt, beside its screens."""


class PassTimer:
    """A function of a RunSize: the seconds of a forward and a backward pass over its longest prompt."""

    def __init__(self, policy: LoadedPolicy, most_s: float) -> None:
        """Create a timer for `policy` that does not measure passes longer than `most_s` seconds."""
        self._policy = policy
        self._most_s = most_s
        self._seconds: dict[int, float] = {}  # number of image tokens in a prompt -> seconds
        # The first pass starts threads, so its time is not kept.
        self._measure([policy.images.prepare(_blank((64, 64), 0))])

    def __call__(self, size: RunSize) -> float:
        """Return the seconds of a pass; a lower bound if the pass would take longer than the limit."""
        images = [self._policy.images.prepare(_blank(size.screen, n)) for n in range(size.images)]
        tokens = sum(image.tokens for image in images)
        if tokens not in self._seconds:
            longest = max((measured for measured in self._seconds if measured < tokens), default=0)
            least_s = self._seconds[longest] * tokens / longest if longest else 0.0
            self._seconds[tokens] = least_s if least_s > self._most_s else self._measure(images)
        return self._seconds[tokens]

    def _measure(self, images: Sequence[PreparedImage]) -> float:
        """Return the seconds of a forward and a backward pass over a prompt with these images."""
        policy = self._policy
        image_tokens = sum(image.tokens for image in images)
        prompt = [policy.pad_token_id] * TEXT + [policy.image_token_id] * image_tokens
        began = time.monotonic()
        with torch.enable_grad():
            states = last_hidden(policy.model, policy.inputs_of([prompt], [images]), last=1)
            torch.autograd.backward(states.sum())
        policy.model.zero_grad(set_to_none=True)
        return time.monotonic() - began


def _blank(size: tuple[int, int], number: int) -> bytes:
    """Return an empty screen as PNG, a different one for each `number`."""
    encoded = io.BytesIO()
    Image.new("L", size, number).save(encoded, "PNG")
    return encoded.getvalue()

"""The seconds that a pass of the model takes on this machine."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import torch
from PIL import Image

from dart_cli.policy.forward import last_hidden
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.smoke_test.time_budget import Level

TEXT = 300
"""Tokens of a prompt that are no screen's."""


class Passes:
    """The seconds of a forward and a backward pass over the longest prompt of a level."""

    def __init__(self, policy: LoadedPolicy, most_s: float) -> None:
        """Take `most_s` as the limit: a pass that would take more is not measured."""
        self._policy = policy
        self._most_s = most_s
        self._seconds: dict[int, float] = {}  # by tokens of screens in a prompt
        self._measured([policy.images.prepare(_blank((64, 64), 0))])  # the first pass makes threads

    def __call__(self, level: Level) -> float:
        """Return the seconds, or what they are at least."""
        images = [self._policy.images.prepare(_blank(level.screen, n)) for n in range(level.images)]
        tokens = sum(each.tokens for each in images)
        if tokens not in self._seconds:
            longest = max((each for each in self._seconds if each < tokens), default=0)
            least_s = self._seconds[longest] * tokens / longest if longest else 0.0
            self._seconds[tokens] = least_s if least_s > self._most_s else self._measured(images)
        return self._seconds[tokens]

    def _measured(self, images: Sequence[PreparedImage]) -> float:
        policy = self._policy
        shown = sum(each.tokens for each in images)
        prompt = [policy.pad_token_id] * TEXT + [policy.image_token_id] * shown
        began = time.monotonic()
        with torch.enable_grad():
            states = last_hidden(policy.model, policy.inputs_of([prompt], [images]), last=1)
            torch.autograd.backward(states.sum())
        policy.model.zero_grad(set_to_none=True)
        return time.monotonic() - began


def _blank(size: tuple[int, int], number: int) -> bytes:
    """Return an empty screen, another one for each number."""
    encoded = io.BytesIO()
    Image.new("L", size, number).save(encoded, "PNG")
    return encoded.getvalue()

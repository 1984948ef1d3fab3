"""Models of a transformers that knows no `mm_encoder_outputs`: their screens are not dropped silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dart_cli.policy.forward import logits
from dart_cli.policy.loader import LoadedPolicy, load_policy
from scripts.small_models import FAMILIES


def numbers(policy: LoadedPolicy) -> torch.Tensor:
    """Logits after a prompt with two screens of different sizes."""
    noise = np.random.default_rng(0).integers(0, 256, (112, 168, 3), dtype=np.uint8)
    images = [
        policy.images.of_image(str(side), Image.fromarray(noise[:, :side])) for side in (112, 168)
    ]
    shown = [[policy.image_token_id] * image.tokens for image in images]
    prompt = [30, 31, *shown[0], 32, *shown[1], 33]
    with torch.no_grad():
        return logits(policy.model, policy.inputs_of([prompt], [images]), last=3)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_screens_reach_a_model_that_takes_pixels_alone(
    model_type: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = load_policy(family(model_type))
    expected = numbers(newer)
    kind: Any = type(newer.model.model)
    present = kind.forward

    def forward(
        self: Any, pixel_values: object = None, image_grid_thw: object = None, **named: Any
    ) -> Any:
        named.pop("mm_encoder_outputs", None)  # as unknown names were
        if pixel_values is not None:
            found = self.get_image_features(pixel_values, image_grid_thw)
            counts = [len(each) for each in found.pooler_output]
            named["mm_encoder_outputs"] = {
                "image": SimpleNamespace(
                    pooler_output=found.pooler_output,
                    deepstack_features=[
                        level.split(counts) for level in found.deepstack_features or []
                    ],
                )
            }
        return present(self, **named)

    monkeypatch.setattr(kind, "forward", forward)
    older = load_policy(family(model_type))
    torch.testing.assert_close(numbers(older), expected)
    torch.testing.assert_close(numbers(older), expected)  # and again: nothing is left behind

"""The requests and replies that all arms of benchmarks/data_bus/transport.py send; needs no part of `dart`."""

from __future__ import annotations

import base64
import io
import json
import os
import uuid
from pathlib import Path
from typing import Any

SIZES = {"448x336": 700, "1920x1080": 3200}  # screenshot -> prompt tokens
COMPLETION_TOKENS = 64
Fields = dict[str, Any]


def screenshot(size: str) -> bytes:
    """Return a PNG of which an eighth is noise, as a photograph is: 0.4 bytes a pixel, like a desktop."""
    from PIL import Image

    width, height = (int(side) for side in size.split("x"))
    image = Image.new("RGB", (width, height), "#dde3ea")
    photo = (width // 2, height // 4)
    image.paste(Image.frombytes("RGB", photo, os.urandom(3 * photo[0] * photo[1])), (20, 20))
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def exchanges(size: str) -> dict[str, tuple[Fields, Fields]]:
    """Return the fields of the request and of the reply by name of the exchange."""
    shot = screenshot(size)
    width, height = (int(side) for side in size.split("x"))
    sampled: Fields = {
        "sampled": {
            "token_ids": list(range(1000, 1000 + COMPLETION_TOKENS)),
            "behaviour_logprobs": [-0.125 * (i % 17) - 0.01 for i in range(COMPLETION_TOKENS)],
            "entropies": [0.1 * (i % 13) + 0.007 for i in range(COMPLETION_TOKENS)],
            "version_spans": [{"version": 7, "start": 0, "end": COMPLETION_TOKENS}],
        },
        "prompt_token_ids": [151_000 + i % 700 for i in range(SIZES[size])],
        "text": "Thought: the form is open.\nAction: click(start_box='(211,140)')",
    }
    place: Fields = {"trajectory_id": uuid.uuid4().hex, "step": 4, "screenshot": shot}
    step: Fields = {
        **place,
        **sampled,
        "media_type": "image/png",
        "image_hashes": [uuid.uuid4().hex * 2 for _ in range(5)],
        "worker": "rollout-0",
        "action": {"type": "click", "x": 211, "y": 140, "button": "left"},
        "error": "",
        "model_s": 1.25,
        "env_s": 2.5,
    }
    act: Fields = {
        **place,
        "instruction": "Rename the report to summary.txt and close the editor.",
        "turns": [{"text": sampled["text"], "screenshot": None} for _ in range(4)],
        "width": width,
        "height": height,
        "sampling": {"temperature": 1.0, "max_tokens": 512, "seed": 11},
    }
    completion = {**sampled, "stop": "end", "queue_s": 0.01, "engine_s": 1.2}
    return {
        "StepRecord-Ack": (step, {"accepted": True, "note": ""}),
        "ActRequest-Completion": (act, completion),
    }


def payload(path: Path) -> dict[str, dict[str, tuple[Fields, Fields]]]:
    """Return the fields by size and exchange, as `write_payload` wrote them, with screenshots as bytes again."""
    sizes: dict[str, dict[str, tuple[Fields, Fields]]] = json.loads(path.read_text())
    for exchanges in sizes.values():
        for request, _ in exchanges.values():
            request["screenshot"] = base64.b64decode(request["screenshot"])
    return sizes


def write_payload(path: Path) -> None:
    """Write the messages to a file, so that all arms send the same bytes."""
    sizes = {size: exchanges(size) for size in SIZES}
    path.write_text(json.dumps(sizes, default=lambda blob: base64.b64encode(blob).decode()))

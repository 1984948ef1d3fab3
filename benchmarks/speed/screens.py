"""Screens on their way to vLLM's process: bytes of a request as uint8 pixels and as the float32 patches of before.

    python benchmarks/speed/screens.py [--size 1920x1080] [--shown 5] [--out benchmarks/results/screens.json]

A turn shows `--shown` screens: in the first none of them is in vLLM's cache (after a miss of all), in the next
all but the newest are. Each screen is prepared once, as Qwen2.5-VL's image processor does it, then encoded
and decoded by vLLM's own serializer (`screen_ms`); float32 patches are made from the pixels first. The limit is
`copy_ms`: the same bytes copied once in memory. `screens_in_4_gib` are those that vLLM's cache, which was of 4 GiB,
holds by its own count of bytes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.multimodal.cache.base import MultiModalCache
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dart_cli.engines.vllm.models import image_item
from dart_cli.policy.images import ImagePreparer, PreparedImage

ROUNDS = 5
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}
"""The bounds of UI-TARS and Qwen2.5-VL: a screen of 1920x1080 keeps its size."""


def main() -> None:
    """Encode the requests both ways, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--size", default="1920x1080")
    parser.add_argument("--shown", type=int, default=5, help="screens of a prompt")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    width, height = map(int, arguments.size.split("x"))
    preparer = ImagePreparer(Qwen2VLImageProcessorPil(size=PIXELS), cache_bytes=4 << 30)
    screens = [preparer.prepare(screen(seed, width, height)) for seed in range(arguments.shown)]
    result = {
        "size": arguments.size,
        "shown": arguments.shown,
        "tokens_per_screen": screens[0].tokens,
        "uint8": measure(screens, lambda each: each.pixels),
        "float32": measure(screens, lambda each: each.patches),
    }
    result["bytes_ratio"] = round(
        result["float32"]["first_request_bytes"] / result["uint8"]["first_request_bytes"], 2
    )
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def screen(seed: int, width: int, height: int) -> bytes:
    """A PNG of large blocks and some noise."""
    rng = Random(seed)
    blocks = Image.new("RGB", (24, 14))
    blocks.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(24 * 14)])
    buffer = io.BytesIO()
    blocks.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def measure(screens: list[PreparedImage], sent: Any) -> dict[str, Any]:
    """Bytes and milliseconds of the first request and of the next one, which sends one screen."""
    items = [image_item(sent(each), each.grid) for each in screens]
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(type(items[0]))
    sizes = [sum(memoryview(frame).nbytes for frame in encoder.encode(item)) for item in items]
    seconds, copies = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for each in screens:
            fresh = image_item(sent(each), each.grid)
            frames = [bytes(frame) for frame in encoder.encode(fresh)]
            decoder.decode(frames)
        seconds.append((time.perf_counter() - began) / len(items))
        block = np.empty(sizes[0], dtype=np.uint8)
        block.fill(1)
        began = time.perf_counter()
        block.copy()
        copies.append(time.perf_counter() - began)
    held = MultiModalCache.get_item_size(items[0])
    return {
        "first_request_bytes": sum(sizes),
        "next_request_bytes": sizes[-1],
        "screen_ms": round(1e3 * statistics.median(seconds), 2),
        "copy_ms": round(1e3 * statistics.median(copies), 2),
        "cached_bytes_per_screen": held,
        "screens_in_4_gib": int((4 << 30) // held),
    }


if __name__ == "__main__":
    main()

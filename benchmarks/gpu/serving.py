"""The checks of scripts/gpu-check of engine and publication.

parity        the engine's log-probabilities against the trainer's, in bfloat16
publication   a 7B's tensors through the file channel
"""

from __future__ import annotations

import torch

from benchmarks.gpu.settings import (
    BrokenError,
    Clock,
    Found,
    Settings,
    compared_layers,
    config_of,
)


def parity(settings: Settings) -> Found:
    """The engine plays, the trainer scores; `dart doctor --parity` on the drawn model."""
    from dart_cli.doctor.parity import parity as compare

    layers = compared_layers(settings)
    clock = Clock(settings.device)
    findings = list(compare(config_of(settings, layers, recompute="none")))
    found: Found = {"layers": layers, "seconds_of_it": round(clock.lap(), 2)}
    found["findings"] = [f"{each.level}: {' '.join(each.text.split())}" for each in findings]
    if any(each.level == "error" for each in findings):
        raise BrokenError("engine and trainer disagree", found)
    return found


def publication(settings: Settings) -> Found:
    """Tensors of all layers from the device to files, and back: checked, bit for bit."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from dart_cli.weights.file import FileChannel, load

    with torch.device("meta"):
        shapes = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(settings.shards, local_files_only=True)
        ).state_dict()
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(each.shape, device=settings.device, dtype=torch.bfloat16)
        for name, each in shapes.items()
    }
    gigabytes = sum(each.nbytes for each in tensors.values()) / 1e9
    channel, clock = FileChannel(settings.scratch / "weights", keep=2), Clock(settings.device)
    published = channel.publish(tensors, 1)
    found: Found = {"gb": round(gigabytes, 3), "publish_s": round(clock.lap(), 2)}
    held = load(published.path, tensors)
    found["read_and_check_s"] = round(clock.lap(), 2)
    placed = {name: torch.empty_like(each) for name, each in tensors.items()}
    clock.lap()
    for name, each in held.items():
        placed[name].copy_(each)
    found["place_s"] = round(clock.lap(), 2)
    found["publish_gb_s"] = round(gigabytes / max(found["publish_s"], 1e-9), 2)
    wrong = [name for name, each in placed.items() if not torch.equal(each, tensors[name])]
    if wrong:
        raise BrokenError(f"{len(wrong)} tensors came back as others, e.g. {wrong[0]}", found)
    return found

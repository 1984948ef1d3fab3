"""Weight sets for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dart_cli.config.schema import LoraConfig
from dart_cli.weights.file import FileChannel
from dart_cli.weights.manifest import Published


def publish(
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    policy_version: int,
    *,
    lora: LoraConfig | None = None,
) -> Published:
    """Write one version; none is removed."""
    return FileChannel(directory, keep=10_000, lora=lora).publish(tensors, policy_version)

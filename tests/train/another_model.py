"""A second model of the same class, tokens and screens, as a teacher."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def another(folder: Path, seed: int = 7) -> Path:
    """Return a copy of a small model folder with other weights; it is made once, beside the folder."""
    out = folder.with_name(f"{folder.name}-another-{seed}")
    if not out.exists():
        shutil.copytree(folder, out)
        draw = torch.Generator().manual_seed(seed)
        tensors = {
            name: value + 0.3 * value.float().std().nan_to_num() * _noise(value, draw)
            for name, value in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _noise(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=draw).to(like.dtype)

"""The folders of models: those that ship with dart, and whether one can be loaded.

BUILTIN          names of the shipped models, and their folders
MODEL_TYPES      the kinds of model that the policy can load
model_folder     the folder that `model.path` names
is_model_folder  whether a folder is a model's and not a run's
model_problem    why a `model.path` cannot be loaded, as far as its files show without torch
"""

from __future__ import annotations

import json
from pathlib import Path

from dart_cli.config.load import shown

BUILTIN = {
    f"builtin:{name}": Path(__file__).parents[1] / "policy" / name for name in ("tiny", "miniwob")
}
"""Models that ship with dart, and their folders; both are of the same tiny kind."""

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` in the config.json of the folders that the policy can load."""


def model_folder(path: str | Path) -> Path:
    """The folder that a `model.path` other than `builtin:...` names.

    `~name` is kept as it is where this host has no such user; no folder is found there.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def model_problem(path: str) -> str:
    """Why the model at `path` (`model.path`) cannot be loaded, and the cure; empty if it can.

    Continues a sentence that begins with the key.
    """
    folder = model_folder(path)
    if path in BUILTIN:
        return ""
    if path.startswith("builtin:"):
        return (
            f"= {shown(path)} does not ship with dart; there is {' and '.join(map(repr, BUILTIN))}"
        )
    if not folder.is_dir():
        return (
            f"is no folder: {path}; fetch one with `hf download REPO --local-dir {path}`, "
            f"or set {next(iter(BUILTIN))!r}"
        )
    kind = _model_type(folder)
    if kind is None:
        return f"= {shown(path)} has no config.json with a model_type; name a complete model folder"
    if kind not in MODEL_TYPES:
        return f"= {shown(path)} is of model_type {kind}; want one of {', '.join(MODEL_TYPES)}"
    if not any(folder.glob("*.safetensors")):
        return (
            f"= {shown(path)} has no *.safetensors; other formats are never unpickled, "
            "convert the weights first"
        )
    return ""


def is_model_folder(folder: Path) -> bool:
    """Whether its config.json is a model's; a run directory has a config.json, too."""
    return _model_type(folder) is not None


def _model_type(folder: Path) -> str | None:
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(tree["model_type"]) if isinstance(tree, dict) and "model_type" in tree else None

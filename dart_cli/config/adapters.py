"""Checks of adapters (`model.lora`) before they are loaded; no torch.

TARGETS          the linear layers of the language model that get adapters
lora_problem     why adapters cannot be used here, and the fix
folder_problem   why training cannot begin with the adapters of a folder
adapter_change   what differs between two settings of `model.lora`
"""

from __future__ import annotations

import importlib.util

from bus.errors import ModelError
from dart_cli.config.model_folder import ADAPTERS, model_folder, read_json
from dart_cli.config.schema import LoraConfig

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""Every linear layer of attention, of DeltaNet and of the MLP, but for two. With fewer, less is learned at the
same rank (arXiv 2305.14314, 4).

DeltaNet's in_proj_a and in_proj_b have none. They give one number for each value head (32 in Qwen3.5-9B), so
that adapters of rank 32 would be as large as the matrices themselves. Engines have dropped such adapters
without an error (sglang#30499), and the trainer would then learn with other decays than the engine samples with.
"""

ADAPTER_TENSORS = "adapter_model.safetensors"
"""The file, in a folder of adapters, that has their weights."""
_PLAIN = {
    "peft_type": "LORA",
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": None,
    "alpha_pattern": None,
}
"""Keys of peft's adapter_config.json, with their values in adapters that only add (alpha / rank) B A."""
_PARTS = {"peft": "peft", "accelerate": "accelerate"}
"""Modules that adapters need, and their packages. peft cannot be imported without accelerate."""


def lora_problem() -> str:
    """Return which packages that adapters need are missing, and the fix; empty if none is."""
    missing = [name for module, name in _PARTS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {verb} not installed; pip install -e '.[lora]' in dart's folder"
    )


def folder_problem(path: str, lora: LoraConfig) -> str:
    """Return why the adapters at `path` (`model.adapters`) do not fit `lora`; empty if they fit.

    The text continues a sentence that begins with the key. Tensors are checked later, when they are loaded.
    """
    folder = model_folder(path)
    try:
        stored = read_json(folder, ADAPTERS)
    except ModelError as error:
        return f"= {path!r} is no folder of adapters: {error}"
    if not (folder / ADAPTER_TENSORS).is_file():
        return f"= {path!r} is no folder of adapters: it has no {ADAPTER_TENSORS}; copy it again"
    for key, value in (("rank", stored.get("r")), ("alpha", stored.get("lora_alpha"))):
        if value != getattr(lora, key):
            return (
                f"= {path!r} has {key} {value}, but model.lora.{key} = {getattr(lora, key):g}; "
                f"set model.lora.{key} = {value}"
            )
    for key, usual in _PLAIN.items():
        if stored.get(key, usual) not in (usual, None, {}, []):
            return f"= {path!r} has {key} = {stored[key]!r} in its {ADAPTERS}, which dart does not compute"
    return ""


def adapter_change(before: LoraConfig | None, now: LoraConfig | None) -> str:
    """Return what has changed in `model.lora`, as the start of a sentence; empty if nothing has."""
    if before is None or now is None:
        if now is not None:
            return "model.lora is set, but there were no adapters"
        return (
            "" if before is None else f"model.lora is not set, but rank {before.rank} was trained"
        )
    for key in LoraConfig.model_fields:
        was, is_now = getattr(before, key), getattr(now, key)
        if was != is_now:
            return f"model.lora.{key} = {is_now!r}, but it was {was!r}"
    return ""

"""What adapters (`model.lora`) need, and whether two sets of them can be one, without torch.

TARGETS          the linear layers of the language model that get adapters
lora_problem     why adapters cannot be had here, and the cure
folder_problem   why a folder's adapters cannot be those of `model.lora`
adapter_change   what differs between the settings of two sets of adapters
"""

from __future__ import annotations

import importlib.util

from bus.errors import ModelError
from dart_cli.config.model_folder import ADAPTERS, model_folder, read_json
from dart_cli.config.schema import LoraConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of attention and MLP: fewer learn less at the same rank (arXiv 2305.14314, 4)."""

ADAPTER_TENSORS = "adapter_model.safetensors"
"""What a folder of adapters has in place of a model's weights."""
_PLAIN = {
    "peft_type": "LORA",
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": None,
    "alpha_pattern": None,
}
"""Keys of peft's adapter_config.json, and what they are in adapters that add (alpha / rank) B A alone."""
_PARTS = {"peft": "peft", "accelerate": "accelerate"}
"""Modules that adapters need, and their packages: peft is not imported without the other."""


def lora_problem() -> str:
    """Return what adapters need and is not installed, with the cure; empty if nothing is missing."""
    missing = [name for module, name in _PARTS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {verb} not installed; pip install -e '.[lora]' in dart's folder"
    )


def folder_problem(path: str, lora: LoraConfig) -> str:
    """Why the adapters at `path` (`model.adapters`) cannot be those of `lora`; empty if they can.

    Continues a sentence that begins with the key. Their tensors are looked at when they are loaded.
    """
    folder = model_folder(path)
    try:
        told = read_json(folder, ADAPTERS)
    except ModelError as error:
        return f"= {path!r} is no folder of adapters: {error}"
    if not (folder / ADAPTER_TENSORS).is_file():
        return f"= {path!r} is no folder of adapters: it has no {ADAPTER_TENSORS}; copy it again"
    for key, said in (("rank", told.get("r")), ("alpha", told.get("lora_alpha"))):
        if said != getattr(lora, key):
            return (
                f"= {path!r} has {key} {said}, but model.lora.{key} = {getattr(lora, key):g}; "
                f"set model.lora.{key} = {said}"
            )
    for key, usual in _PLAIN.items():
        if told.get(key, usual) not in (usual, None, {}, []):
            return f"= {path!r} has {key} = {told[key]!r} in its {ADAPTERS}, which dart does not compute"
    return ""


def adapter_change(before: LoraConfig | None, now: LoraConfig | None) -> str:
    """Return what of `model.lora` is other than `before`, as the start of a sentence; empty if nothing is."""
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

"""Which layers `model.lora` adapts, and what that needs, without torch.

adapted_layers   the linear layers that get adapters, by name, with their inputs and outputs
adapter_count    how many numbers are trained and published
adapter_of       which layer's adapter a tensor of a peft folder is
folder_problem   why a folder's adapters cannot be those of `model.lora`
lora_problem     why adapters cannot be had here, and the cure
adapter_change   what differs between the settings of two sets of adapters
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bus.errors import ModelError, first_line
from dart_cli.config.architecture import canonical, expected_tensors
from dart_cli.config.model_files import read_json
from dart_cli.config.models import ADAPTERS, model_folder
from dart_cli.config.schema import LoraConfig

_LAYER = re.compile(r"language_model\.layers\.\d+\..*\.(\w+)")
_TARGETS = "model.lora.targets"
ADAPTER_TENSORS = "adapter_model.safetensors"
"""What a folder of adapters has in place of a model's weights."""
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
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


def adapted_layers(
    shapes: Mapping[str, Sequence[int]], lora: LoraConfig
) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each layer that gets adapters, by the name of its weight in `shapes`.

    `shapes` has every tensor of a model, by any of its names (architecture.py). Raises ModelError for
    a target that the model has not; it names those that there are.
    """
    found: dict[str, tuple[int, int]] = {}
    known: set[str] = set()
    for name, shape in shapes.items():
        if not name.endswith(".weight") or len(shape) != 2:
            continue
        layer = canonical(name).removesuffix(".weight")
        if layer.startswith("visual."):
            # qwen3_vl's table of positions is no layer.
            chosen = lora.vision and layer != "visual.pos_embed"
        elif inner := _LAYER.fullmatch(layer):
            known.add(inner[1])
            chosen = inner[1] in lora.targets
        else:
            chosen = False
        if chosen:
            outputs, inputs = shape
            found[name] = int(inputs), int(outputs)
    for target in lora.targets:
        if target not in known:
            raise ModelError(
                f"{_TARGETS} names {target[:60]!r}, which the layers of this model have not; "
                f"there are {', '.join(_in_order(known))}"
            )
    return found


def adapter_count(shapes: Mapping[str, Sequence[int]], lora: LoraConfig) -> int:
    """Numbers in all adapters: rank x (inputs + outputs) of each layer. Raises ModelError."""
    return sum(
        lora.rank * (inputs + outputs) for inputs, outputs in adapted_layers(shapes, lora).values()
    )


def adapter_of(name: str) -> tuple[str, str] | None:
    """(canonical name of the layer's weight, "A" or "B") of a tensor in a peft folder; None for any other."""
    found = _PEFT_NAME.fullmatch(name)
    return None if found is None else (canonical(f"{found[1]}.weight"), found[2])


def folder_problem(path: str, base: Path, lora: LoraConfig) -> str:
    """Why the adapters at `path` (`model.adapters`) cannot be those of `lora` on the model at `base`; empty if they can.

    Continues a sentence that begins with the key. Reads headers, not the tensors.
    """
    folder = model_folder(path)
    try:
        told = read_json(folder, ADAPTERS)
        with safe_open(folder / ADAPTER_TENSORS, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        layers = adapted_layers(expected_tensors(read_json(base, "config.json")), lora)
    except (ModelError, OSError, SafetensorError) as error:
        return f"= {path!r} is no folder of adapters: {first_line(error)}"
    for key, said in (("rank", told.get("r")), ("alpha", told.get("lora_alpha"))):
        if said != getattr(lora, key):
            return (
                f"= {path!r} has {key} {said}, but model.lora.{key} = {getattr(lora, key):g}; "
                f"set model.lora.{key} = {said}"
            )
    for key, usual in _PLAIN.items():
        if told.get(key, usual) not in (usual, None, {}, []):
            return f"= {path!r} has {key} = {told[key]!r} in its {ADAPTERS}, which dart does not compute"
    wanted = {}
    for name, (inputs, outputs) in layers.items():
        wanted[canonical(name), "A"] = (lora.rank, inputs)
        wanted[canonical(name), "B"] = (outputs, lora.rank)
    held = {adapter_of(name): shape for name, shape in shapes.items()}
    if wrong := [each for each in wanted if held.get(each) != wanted[each]]:
        return (
            f"= {path!r} lacks the adapter of {wrong[0][0]}, or has it in another shape; set model.lora.targets "
            "and vision to the layers that it adapts, and model.path to the model that it is of"
        )
    if more := [name for name in shapes if adapter_of(name) not in wanted]:
        return f"= {path!r} also adapts {more[0]}; name that layer in model.lora.targets, or set vision"
    return ""


def lora_problem() -> str:
    """What adapters need and is not installed, with the cure; empty if nothing is missing."""
    missing = [name for module, name in _PARTS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {verb} not installed; pip install -e '.[lora]' in dart's folder"
    )


def adapter_change(before: LoraConfig | None, now: LoraConfig | None) -> str:
    """What of `model.lora` is other than `before`, as the start of a sentence; empty if nothing is."""
    if before is None or now is None:
        if now is not None:
            return "model.lora is set, but there were no adapters"
        return (
            "" if before is None else f"model.lora is not set, but rank {before.rank} was trained"
        )
    for key in LoraConfig.model_fields:
        was, is_now = getattr(before, key), getattr(now, key)
        if was != is_now and (key != "targets" or set(was) != set(is_now)):
            return f"model.lora.{key} = {is_now!r}, but it was {was!r}"
    return ""


def _in_order(names: Iterable[str]) -> list[str]:
    """As the default lists them, then by name."""
    usual = LoraConfig().targets
    return sorted(
        names, key=lambda name: (usual.index(name) if name in usual else len(usual), name)
    )

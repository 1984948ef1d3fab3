"""Folders of models: where they are, and what their small files contain; no torch, no weights.

BUILTIN          the names of the models that ship with dart, and their folders
model_folder     the folder that a `model.path` names; `resolve` also requires that it exists
folder_of        the model folder of a configuration; None for a model that ships with dart
check_folder     raises an error unless the files are there and dart loads the class
model_config     the config.json of a folder whose class dart loads; `read_config` also of any other class
class_problem    why dart does not load the class in a config.json, and the fix
model_problem    why a `model.path` cannot be loaded, and the fix
is_model_folder  returns True for a model folder, and False for a run directory
weight_files     the safetensors files of a folder
preprocessor     the settings of the image processor; `screens` returns its sizes in pixels (Screens)
chat_template    the template in chat_template.json, for a tokenizer whose files have none
base_name        the name of the model that a training began with
read_json        reads one JSON file of a folder

Every command makes these checks before it starts anything. Whether the tensors fit config.json, and the
tokenizer fits the model, shows when the model is loaded (dart_cli/policy/loader.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bus.errors import ModelError, cure_of
from dart_cli.config.architecture import MODEL_TYPES, shape_of
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value

BUILTIN = {
    f"builtin:{name}": Path(__file__).parents[1] / "policy" / name for name in ("tiny", "small")
}
"""The models that ship with dart, and their folders. Both have the same class."""

TOKENIZER = "tokenizer.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
"""The file in which transformers 5 saves a processor, with the settings of the image processor."""
TEMPLATE = "chat_template.json"
"""The file in which processors saved their template before transformers 5; tokenizers do not read it."""
VERIFIER = "verifier.json"
"""The file that marks the folder of a verifier; see dart_cli/policy/verifier.py."""
TUNED = "tune.json"
"""The file in which `dart tune` records its training, beside the weights."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTERS = "adapter_config.json"
"""The file that a folder of LoRA adapters has in place of a config.json."""

EXAMPLES = {
    "qwen2_vl": "Qwen2-VL, UI-TARS",
    "qwen2_5_vl": "Qwen2.5-VL, UI-TARS-1.5",
    "qwen3_vl": "Qwen3-VL, GUI-Owl-1.5",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
    "qwen3_5": "Qwen3.5, Holo3.1",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, Holo3",
}
"""Models of each class."""
_CLASSES = [f"{kind} ({EXAMPLES[kind]})" for kind in MODEL_TYPES]
CLASSES_CURE = (
    f"take a checkpoint of class {', '.join(_CLASSES[:-1])} or {_CLASSES[-1]}: "
    "docs/policy.md#classes-that-we-do-not-take"
)
_IMAGE_WORDS = ("vision", "visual", "image", "img", "pixel")
"""The config.json of a model that sees has one of these words in a key."""
_QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys of the config.json of quantised weights: transformers', compressed-tensors' older one, MLX'."""

_PICKLED = ("*.bin", "*.pt", "*.pth")
_GGUF = "*.gguf"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", _GGUF, *_PICKLED)
_MADE_BY = {
    "recall-base": "scripts/shipped_models/build_recall.py",
}
"""Folders that configurations and pages name, and the scripts that make them."""
_FOR_A_PLAN = "; for a plan alone, `dart doctor CONFIG`, its config.json and preprocessor_config.json are enough"


class Screens(NamedTuple):
    """The sizes by which a preprocessor resizes a screen."""

    factor: int  # pixels: patch size times merge size; both sides become multiples of it
    min_pixels: int  # least area of a resized screen
    max_pixels: int  # its greatest area


def model_folder(path: str | Path) -> Path:
    """Return the folder that a `model.path` names; it need not exist. A name in BUILTIN is a folder of dart.

    `~name` stays unchanged if this host has no such user.
    """
    if str(path) in BUILTIN:
        return BUILTIN[str(path)]
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def folder_of(config: Config) -> Path | None:
    """Return the model folder of a configuration; None for a model that ships with dart."""
    return None if config.model.path in BUILTIN else model_folder(config.model.path)


def resolve(name: str | Path) -> Path:
    """Return the folder that a `model.path` names. Raises ModelError if it does not exist."""
    folder = model_folder(name)
    if str(name).startswith("builtin:") and str(name) not in BUILTIN:
        raise ModelError(f"model {name} is unknown; built in are: {', '.join(BUILTIN)}")
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; give a local Hugging Face folder or builtin:tiny"
        )
    return folder


def model_problem(path: str) -> str:
    """Return why the model at `path` (`model.path`) cannot be loaded, and the fix; empty if it can.

    The text continues a sentence that begins with the key.
    """
    folder = model_folder(path)
    if path in BUILTIN:
        return ""
    if path.startswith("builtin:"):
        return f"= {short_value(path)} does not ship with dart; there is {' and '.join(map(repr, BUILTIN))}"
    if not folder.is_dir():
        script = _MADE_BY.get(folder.name)
        command = (
            f"python {script} --out {path}" if script else f"hf download REPO --local-dir {path}"
        )
        return (
            f"is no folder: {path}; {'make it' if script else 'fetch one'} with `{command}`, "
            f"or set {next(iter(BUILTIN))!r}{_FOR_A_PLAN}"
        )
    try:
        check_folder(folder)
    except ModelError as error:
        return f"= {short_value(path)} cannot be loaded: {error}"
    return ""


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder.

    Raises ModelError if a file is missing, or dart does not load the class or its sizes.

    No code of the folder is run, whatever its `auto_map` names.
    """
    config = model_config(folder)
    weight_files(folder)
    if not (folder / TOKENIZER).is_file():
        raise _missing(folder / TOKENIZER)
    screens(folder)
    if not _has_template(folder):
        raise ModelError(
            f"{folder}: no chat template in chat_template.jinja, tokenizer_config.json or {TEMPLATE}; "
            "copy the file that the model's source has"
        )
    try:
        shape_of(config)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    return config


def model_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises ModelError unless dart loads its class and trains its weights."""
    config = read_config(folder)
    if problem := class_problem(folder, config):
        raise ModelError(problem)
    if key := next((key for key in _QUANTISED if config.get(key)), ""):
        method = config[key].get("quant_method") if isinstance(config[key], dict) else None
        raise ModelError(
            f"{folder / 'config.json'} has a {key} ({method or 'unnamed'}): quantised "
            "weights cannot be trained; fetch the model's float32, float16 or bfloat16 weights"
        )
    return config


def class_problem(folder: Path, config: Mapping[str, Any]) -> str:
    """Return why dart does not load the class in the config.json of a folder, and the fix; empty if it does.

    Only the text of `config` decides, so it may be newer than the installed transformers.
    """
    kind = str(config.get("model_type") or "missing")[:60]
    reason = ""
    if kind in MODEL_TYPES:
        if isinstance(config.get("vision_config"), dict):
            return ""
        reason = " without a vision_config: it has no vision tower"
    elif "auto_map" in config:
        reason = ": it is Python code in its folder (auto_map), which is never run"
    elif kind.removesuffix("_text") in MODEL_TYPES or not any(
        word in key for key in config for word in _IMAGE_WORDS
    ):
        reason = ": it has no vision tower"
    return (
        f"{folder / 'config.json'}: model_type is {kind}, which dart does not load{reason}; "
        f"{CLASSES_CURE}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder, of whatever class.

    Raises ModelError for a folder of another format: adapters alone or beside a model, and GGUF.
    """
    # transformers would add adapters that lie beside a model to its layers, and not say so.
    if (folder / ADAPTERS).is_file():
        base = read_json(folder, ADAPTERS).get("base_model_name_or_path") or "of unknown name"
        raise ModelError(
            f"{folder} has LoRA adapters ({ADAPTERS}) of the model {str(base)[:200]}; name that model's folder, "
            "and this one as model.adapters, or merge both (`dart export RUN OUT --merged`)"
        )
    if any(folder.glob(_GGUF)) and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has weights in the format GGUF, which cannot be trained; fetch the safetensors of the model "
            "that they were made from"
        )
    return read_json(folder, "config.json")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: SINGLE, or else the files that INDEX names.

    transformers looks for them in this order. A folder with both was saved over an older model. Raises
    ModelError where there are none, or one is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files: list[Path] = []
    if (folder / INDEX).is_file():
        placed = read_json(folder, INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(
            isinstance(name, str) for name in placed.values()
        ):
            raise ModelError(f"{folder / INDEX} has no weight_map; copy it again")
        files = [folder / name for name in sorted(set(placed.values()))]
    if missing := [file for file in files if not file.is_file()]:
        raise ModelError(
            f"{missing[0]} is missing; only safetensors weights can be loaded, copy every file of them"
        )
    if not files:
        pickled = any(any(folder.glob(pattern)) for pattern in _PICKLED)
        fix = (
            "other formats are never unpickled, convert the weights first"
            if pickled
            else f"fetch the weights with `hf download REPO --local-dir {folder}`"
        )
        raise ModelError(f"{folder} has no *.safetensors; {fix}{_FOR_A_PLAN}")
    return files


def is_model_folder(folder: Path) -> bool:
    """Return True if a folder has files of a model. A run directory has none."""
    if not folder.is_dir():
        return False
    if any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return True
    try:
        return "model_type" in read_json(folder, "config.json")
    except ModelError:
        return False


def preprocessor(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor. Raises ModelError where the folder has none."""
    if (folder / PREPROCESSOR).is_file():
        return read_json(folder, PREPROCESSOR)
    if (folder / PROCESSOR).is_file():
        part = read_json(folder, PROCESSOR).get("image_processor")
        if isinstance(part, dict):
            return part
    raise _missing(folder / PREPROCESSOR)


def screens(folder: Path) -> Screens:
    """Return the sizes of the folder's preprocessor, as transformers reads them.

    Raises ModelError if there is no preprocessor, or if its numbers cannot be used.
    """
    return screens_from(preprocessor(folder), folder)


def screens_from(settings: Mapping[str, Any], folder: Path) -> Screens:
    """Return the sizes in a preprocessor's settings. Raises ModelError, with `folder` in its text."""
    size = settings.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if not isinstance(size, dict):
        raise ModelError(
            f"{folder}: the preprocessor's size must have shortest_edge and longest_edge, got "
            f"{str(size)[:40]!r}; copy it again from the model's source"
        )
    least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    side, merge = settings.get("patch_size", 14), settings.get("merge_size", 2)
    numbers = (least, most, side, merge)
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ModelError(
            f"{folder}: the preprocessor has no whole numbers for patch_size, merge_size and the "
            "least and most pixels of a screen; copy it again from the model's source"
        )
    return Screens(int(side) * int(merge), int(least or 0), int(most or 0))


def screens_of(config: Config) -> Screens:
    """Return the sizes of a configuration's model; `resized` coordinates need them. Raises ModelError."""
    return screens(model_folder(config.model.path))


def chat_template(folder: Path) -> str | None:
    """Return the processor's chat template; None where only the tokenizer may have one."""
    if not (folder / TEMPLATE).is_file():
        return None
    template = read_json(folder, TEMPLATE).get("chat_template")
    return template if isinstance(template, str) else None


def base_name(path: str) -> str:
    """Return the name of the model at `path` without folders; for a tuned model, its base's name."""
    folder = model_folder(path)
    if (folder / TUNED).is_file():
        base = read_json(folder, TUNED).get("base")
        if isinstance(base, str) and base:
            return base
    return Path(path).name.removeprefix("builtin:")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder.

    Raises ModelError if it is missing or not a JSON object.
    """
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; copy it from the model's source, or is this another folder?"
        ) from None
    except OSError as error:
        fix = cure_of(error, "copy it again")
        raise ModelError(f"{path} cannot be read: {error.strerror}; {fix}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it again") from None
    except RecursionError:
        raise ModelError(f"{path} is not a model's: nested too deeply; copy it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; copy it again")
    return value


def _has_template(folder: Path) -> bool:
    """Return True if a folder has a chat template, in one of the three files that may have one."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").stat().st_size > 0
    own = "tokenizer_config.json"
    tokenizer_config = read_json(folder, own) if (folder / own).is_file() else {}
    return bool(tokenizer_config.get("chat_template") or chat_template(folder))


def _missing(path: Path) -> ModelError:
    return ModelError(f"{path} is missing; copy it from the model's source beside config.json")

"""The folders of models: those that ship with dart, and whether one can be loaded.

BUILTIN          names of the shipped models, and their folders
MODEL_TYPES      the kinds of model that the policy can load
model_folder     the folder that `model.path` names
resolve          the same, which must exist; of those that ship, too
is_model_folder  whether a folder is a model's and not a run's
check_model      the whole folder, without torch: each file, each header, each shape
model_problem    why a `model.path` cannot be loaded, and the cure
resize_problem   why the coordinates of [policy] would not be those of the model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bus.errors import ModelError
from dart_cli.config.load import shown
from dart_cli.config.model_files import check_small_files, read_json, screens
from dart_cli.config.model_tensors import check_tensors
from dart_cli.config.schema import PolicyConfig

BUILTIN = {
    f"builtin:{name}": Path(__file__).parents[1] / "policy" / name for name in ("tiny", "miniwob")
}
"""Models that ship with dart, and their folders; both are of the same tiny kind."""

ADAPTERS = "adapter_config.json"
"""What a folder of LoRA adapters has in place of a config.json."""

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` in the config.json of the folders that the policy can load."""

_PICKLED = ("*.bin", "*.pt", "*.pth")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", *_PICKLED)
_MADE_BY = {
    "miniwob-base": "scripts/build_miniwob_base.py",
    "recall-base": "scripts/build_recall_base.py",
}
"""Folders that configurations and pages name, and what makes them."""
_FOR_A_PLAN = "; for a plan alone, `dart doctor CONFIG`, its config.json and preprocessor_config.json are enough"


def model_folder(path: str | Path) -> Path:
    """The folder that a `model.path` other than `builtin:...` names.

    `~name` is kept as it is where this host has no such user; no folder is found there.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolve(name: str | Path) -> Path:
    """The folder of a configuration's `model`. Raises ModelError if it does not exist."""
    if str(name).startswith("builtin:"):
        if str(name) not in BUILTIN:
            raise ModelError(f"model {name} is unknown; built in are: {', '.join(BUILTIN)}")
        return BUILTIN[str(name)]
    folder = model_folder(name)
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; give a local Hugging Face folder or builtin:tiny"
        )
    return folder


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
        script = _MADE_BY.get(folder.name)
        cure = f"python {script} --out {path}" if script else f"hf download REPO --local-dir {path}"
        return (
            f"is no folder: {path}; {'make it' if script else 'fetch one'} with `{cure}`, "
            f"or set {next(iter(BUILTIN))!r}{_FOR_A_PLAN}"
        )
    try:
        check_model(folder)
    except ModelError as error:
        return f"= {shown(path)} cannot be loaded: {error}"
    return ""


def check_model(folder: Path) -> dict[str, Any]:
    """Raise ModelError unless the folder is a whole model that the policy can load; its config.json.

    Reads the small files and the headers of the weights, not the weights: a fraction of a second for
    any size. No code of the folder is run, whatever its `auto_map` names.
    """
    _refuse_adapters(folder)
    config = read_json(folder, "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"{folder / 'config.json'}: model_type is {str(kind or 'missing')[:60]}, want one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    if not any(folder.glob("*.safetensors")):
        others = any(any(folder.glob(pattern)) for pattern in _PICKLED)
        cure = (
            "other formats are never unpickled, convert the weights first"
            if others
            else f"fetch the weights with `hf download REPO --local-dir {folder}`"
        )
        raise ModelError(f"{folder} has no *.safetensors; {cure}{_FOR_A_PLAN}")
    check_small_files(folder, config)
    check_tensors(folder, config)
    return config


def _refuse_adapters(folder: Path) -> None:
    """Raise ModelError for the folder of adapters that `dart export` and peft write."""
    if (folder / "config.json").exists() or not (folder / ADAPTERS).is_file():
        return
    base = read_json(folder, ADAPTERS).get("base_model_name_or_path") or "of unknown name"
    raise ModelError(
        f"{folder} has LoRA adapters ({ADAPTERS}) of the model {str(base)[:200]}, no model of its own; "
        "name that model's folder, or `dart export RUN OUT --merged` writes both as one model"
    )


def resize_problem(path: str, policy: PolicyConfig) -> str:
    """Why clicks in pixels of the resized screenshot would be read in other pixels than the model's.

    Continues a sentence that begins with `policy.resize_factor`; empty where they fit. `path` is a
    `model.path` without a problem.
    """
    folder = BUILTIN.get(path) or model_folder(path)
    wanted = screens(folder)
    given = (policy.resize_factor, policy.resize_min_pixels, policy.resize_max_pixels)
    if policy.coordinates != "resized" or wanted == given:
        return ""
    return (
        f"and policy.resize_min_pixels, resize_max_pixels are {', '.join(map(str, given))}, but "
        f"{path} resizes screens by {', '.join(map(str, wanted))}; clicks would be read in other "
        "pixels than the model sees: set "
        f"policy.resize_factor = {wanted.factor}, policy.resize_min_pixels = {wanted.min_pixels}, "
        f"policy.resize_max_pixels = {wanted.max_pixels}"
    )


def is_model_folder(folder: Path) -> bool:
    """Whether it is meant to be a model's; a run directory has a config.json, too."""
    if not folder.is_dir():
        return False
    if any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return True
    try:
        return "model_type" in read_json(folder, "config.json")
    except ModelError:
        return False

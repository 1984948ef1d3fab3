"""The small files of a Hugging Face model folder, as the supported classes' checkpoints have them.

check_files     names a missing file before transformers fails with an unclear error
preprocessor    how screens are resized and cut: preprocessor_config.json or a part of the processor's
chat_template   from chat_template.json, where the tokenizer's own files have none
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bus.errors import ModelError

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
"""Where transformers 5 saves a processor, with the image processor's settings."""
TEMPLATE = "chat_template.json"
"""Where processors kept their template before transformers 5; tokenizers do not read it."""


def check_files(folder: Path) -> None:
    """Raise ModelError for the first file that is absent."""
    if not (folder / "tokenizer.json").is_file():
        raise _missing(folder / "tokenizer.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(folder, index.name).get("weight_map", {})
        shards = sorted(set(weight_map.values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        if not (folder / shard).is_file():
            raise ModelError(
                f"{folder / shard} is missing; only safetensors weights can be loaded, copy every shard"
            )


def preprocessor(folder: Path) -> dict[str, Any]:
    """The image processor's settings. Raises ModelError where the folder has none."""
    if (folder / PREPROCESSOR).is_file():
        return read_json(folder, PREPROCESSOR)
    if (folder / PROCESSOR).is_file():
        part = read_json(folder, PROCESSOR).get("image_processor")
        if isinstance(part, dict):
            return part
    raise _missing(folder / PREPROCESSOR)


def chat_template(folder: Path) -> str | None:
    """The processor's chat template; None where the folder has none apart from the tokenizer's."""
    if not (folder / TEMPLATE).is_file():
        return None
    held = read_json(folder, TEMPLATE).get("chat_template")
    return held if isinstance(held, str) else None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object. Raises ModelError where the file is missing or holds none."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; copy it from the model's source, or is this another folder?"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; copy it again")
    return value


def _missing(path: Path) -> ModelError:
    return ModelError(f"{path} is missing; copy it from the model's source beside config.json")

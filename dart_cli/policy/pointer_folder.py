"""A model folder with a pointer head.

    add_pointer    the same model with a head and the three tokens, as another folder
    attach_head    the head of a folder, as `model.pointer_head`
    without_head   what to do with a folder that has none

The new folder has the files of the old one. Changed are: the tokens in tokenizer.json and beside it, their
ids and the size of the vocabulary in config.json, three rows of the embeddings (of the output embeddings,
too, where those are not the same tensor), and the head's tensors under `pointer_head.`. New rows are the
mean of all rows that have a token. Rows that have none, as in real checkpoints, are used up first.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from bus.errors import ModelError, UserError, first_line
from dart_cli.config.architecture import (
    ID_KEYS,
    PREFIX,
    TOKENS,
    canonical,
    head_parameters,
    text_sizes,
)
from dart_cli.config.model_folder import (
    INDEX,
    SINGLE,
    TOKENIZER,
    check_folder,
    read_json,
    weight_files,
)
from dart_cli.config.rules.machine import refuse_out
from dart_cli.language.pointer_tokens import PointerTokens, pointer_tokens
from dart_cli.policy.model_files import PolicyFiles, new_folder
from dart_cli.policy.pointer_head import PointerHead, initial_head

_EMBEDDINGS = ("language_model.embed_tokens.weight", "lm_head.weight")
_HEAD_FILE = "model-pointer-head.safetensors"
"""The head's tensors, where the model's are in several files."""
_NOT_COPIED = frozenset({".bin", ".pt", ".pth"})
"""Weights in formats that are never read."""
_TOKENIZER_CONFIG, _ADDED_TOKENS = "tokenizer_config.json", "added_tokens.json"


def without_head(name: str | Path) -> str:
    """Return what to do with the folder `name`, which has no head, as one line."""
    return (
        f"{name} has no pointer head; make a folder that has one with "
        f'`dart model add-pointer {name} OUT`, or set policy.pointing = "text"'
    )


def attach_head(model: PreTrainedModel, folder: Path, *, weights: bool) -> None:
    """Make the folder's head `model.pointer_head`, in the model's dtype; without `weights` on meta.

    Raises ModelError where it cannot be read.
    """
    with torch.device("meta"):
        head = PointerHead(int(model.config.get_text_config().hidden_size))
    if weights:
        with PolicyFiles(folder) as files:
            for name in [name for name, _ in head.named_parameters()]:
                module, _, attribute = name.rpartition(".")
                value = files.whole(f"{PREFIX}{name}").to(model.dtype)
                head.get_submodule(module).register_parameter(attribute, nn.Parameter(value))
    model.add_module(PREFIX.removesuffix("."), head.to(model.dtype))


def add_pointer(folder: Path, out: Path, seed: int = 0) -> PointerTokens:
    """Write `folder` with a head, drawn by `seed`, to `out`, which must not exist; it is whole or absent.

    Raises ModelError for a folder that cannot be loaded, UserError where it has a head or one of the
    tokens already, or where `out` cannot be made.
    """
    refuse_out(out)
    config = check_folder(folder)
    with PolicyFiles(folder):
        pass  # they can be read
    if pointer_tokens(config) is not None:
        raise UserError(f"{folder} has a pointer head already; use it as it is")
    width, rows = (text_sizes(config)[key] for key in ("hidden_size", "vocab_size"))
    try:
        head_parameters(width)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    with new_folder(out) as draft:
        tokens, count = _write_tokenizer(folder, draft)
        rows = max(rows, *(each + 1 for each in tokens.triple))
        _write_config(config, draft, tokens, rows)
        _write_tensors(folder, draft, tokens, rows, count, initial_head(width, seed))
        for file in sorted(folder.iterdir()):
            is_ours = not file.name.startswith(".") and file.suffix not in _NOT_COPIED
            if file.is_file() and is_ours and not (draft / file.name).exists():
                shutil.copyfile(file, draft / file.name)
        check_folder(draft)
    return tokens


def _write_tokenizer(folder: Path, draft: Path) -> tuple[PointerTokens, int]:
    """Return the tokenizer's files with the tokens; (their ids, how many ids there were)."""
    tree = read_json(folder, TOKENIZER)
    try:
        known = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise ModelError(
            f"{folder / TOKENIZER} cannot be read ({first_line(error)}); copy it again from the "
            "model's source"
        ) from None
    if held := [token for token in TOKENS if token in known]:
        raise UserError(
            f"{folder / TOKENIZER} has the token {held[0]} already, but config.json has no "
            f"{ID_KEYS[0]}; start from the model's own folder"
        )
    # The library numbers added tokens as they come, behind the largest id that there is.
    first = max(known.values()) + 1
    new = [
        {
            "id": first + place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, token in enumerate(TOKENS)
    ]
    tree["added_tokens"] = [*tree["added_tokens"], *new]
    _write_json(draft / TOKENIZER, tree, indent=None)
    written = Tokenizer.from_file(str(draft / TOKENIZER))
    if [written.token_to_id(token) for token in TOKENS] != [token["id"] for token in new]:
        raise ModelError(
            f"{folder / TOKENIZER} has ids without a token, to which the pointer's cannot be added; "
            "fetch the folder again from the model's source"
        )
    if (folder / _TOKENIZER_CONFIG).is_file():
        settings = read_json(folder, _TOKENIZER_CONFIG)
        if isinstance(decoder := settings.get("added_tokens_decoder"), dict):
            settings["added_tokens_decoder"] = decoder | {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in new
            }
        for key in ("additional_special_tokens", "extra_special_tokens"):
            if isinstance(settings.get(key), list):
                settings[key] = [*settings[key], *TOKENS]
        _write_json(draft / _TOKENIZER_CONFIG, settings)
    if (folder / _ADDED_TOKENS).is_file():
        added = read_json(folder, _ADDED_TOKENS)
        added |= {str(token["content"]): token["id"] for token in new}
        _write_json(draft / _ADDED_TOKENS, added)
    return PointerTokens(first, first + 1, first + 2), first


def _write_config(config: dict[str, Any], draft: Path, tokens: PointerTokens, rows: int) -> None:
    config = config | dict(zip(ID_KEYS, tokens.triple, strict=True))
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config["text_config"] = nested | {"vocab_size": rows}
    if "vocab_size" in config or not isinstance(nested, dict):
        config["vocab_size"] = rows
    _write_json(draft / "config.json", config)


@torch.no_grad()
def _write_tensors(
    folder: Path,
    draft: Path,
    tokens: PointerTokens,
    rows: int,
    count: int,
    head: dict[str, torch.Tensor],
) -> None:
    """Write those of the model's files that have embeddings, which are changed, and the head.

    At most one file is in memory: those without embeddings are copied by the caller.
    """
    dtype, added = torch.float32, 0  # bytes
    files = weight_files(folder)
    is_single = [file.name for file in files] == [SINGLE]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            if not any(canonical(name) in _EMBEDDINGS for name in names):
                continue
            metadata = opened.metadata() or {"format": "pt"}
            tensors = {name: opened.get_tensor(name) for name in names}
        for name in names:
            if canonical(name) in _EMBEDDINGS:
                before = tensors[name]
                tensors[name] = _extended(before, tokens, rows, count)
                dtype, added = before.dtype, added + tensors[name].nbytes - before.nbytes
        if is_single:
            tensors |= _named(head, dtype)
        save_file(tensors, draft / file.name, metadata=metadata)
    if is_single:
        return
    save_file(_named(head, dtype), draft / _HEAD_FILE, metadata={"format": "pt"})
    index = read_json(folder, INDEX)
    index["weight_map"] |= dict.fromkeys(_named(head, dtype), _HEAD_FILE)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        metadata["total_size"] += (
            added + sum(each.numel() for each in head.values()) * dtype.itemsize
        )
    _write_json(draft / INDEX, index)


def _extended(weight: torch.Tensor, tokens: PointerTokens, rows: int, count: int) -> torch.Tensor:
    """Embeddings [V, H] with at least `rows` rows; those of `tokens` are the mean of the first `count`."""
    missing = max(0, rows - weight.shape[0])
    extended = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    extended[list(tokens.triple)] = weight[:count].double().mean(dim=0).to(weight.dtype)
    return extended


def _named(head: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{name}": tensor.to(dtype) for name, tensor in head.items()}


def _write_json(path: Path, tree: dict[str, Any], indent: int | None = 2) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

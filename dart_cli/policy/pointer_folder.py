"""Model folders with a pointer head: adding one to a folder, and loading it.

    add_pointer    writes another folder with the same model, a pointer head and the three pointer tokens
    attach_head    loads the head of a folder as `model.pointer_head`
    without_head   returns the message for a folder without a head

`add_pointer` copies the folder and changes four things:

1. It adds the tokens to tokenizer.json and the files beside it.
2. It writes their ids, and the size of the vocabulary, into config.json.
3. It sets three rows of the embeddings, and of the output embeddings if they are another tensor. Rows that
   have no token yet, which real checkpoints have, are used before new ones are added. The new values are the
   mean of all rows that have a token.
4. It adds the head's tensors under `pointer_head.`.
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
"""The file of the head's tensors, if the model's tensors are in several files."""
_NOT_COPIED = frozenset({".bin", ".pt", ".pth"})
"""Suffixes of weights in formats that dart never reads."""
_TOKENIZER_CONFIG, _ADDED_TOKENS = "tokenizer_config.json", "added_tokens.json"


def without_head(name: str | Path) -> str:
    """Return the message for a folder `name` without a head, with the fix, as one line."""
    return (
        f"{name} has no pointer head; make a folder that has one with "
        f'`dart model add-pointer {name} OUT`, or set policy.pointing = "text"'
    )


def attach_head(model: PreTrainedModel, folder: Path, *, weights: bool) -> None:
    """Load the folder's head as `model.pointer_head`, in the model's dtype; without `weights`, on `meta`.

    Raises ModelError if it cannot be read.
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
    """Write the model of `folder`, with a head drawn from `seed`, to `out`, and return the pointer tokens.

    `out` must not exist. After an error there is no `out`, never half of one. Raises ModelError for a folder
    that cannot be loaded, and UserError if it already has a head or one of the tokens, or if `out` cannot be
    written.
    """
    refuse_out(out)
    config = check_folder(folder)
    with PolicyFiles(folder):
        pass  # raises ModelError if the tensors cannot be read
    if pointer_tokens(config) is not None:
        raise UserError(f"{folder} has a pointer head already; use it as it is")
    width, rows = (text_sizes(config)[key] for key in ("hidden_size", "vocab_size"))
    try:
        head_parameters(width)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    with new_folder(out) as draft:
        tokens, count = _write_tokenizer(folder, draft)
        rows = max(rows, *(token_id + 1 for token_id in tokens.triple))
        _write_config(config, draft, tokens, rows)
        _write_tensors(folder, draft, tokens, rows, count, initial_head(width, seed))
        for file in sorted(folder.iterdir()):
            is_ours = not file.name.startswith(".") and file.suffix not in _NOT_COPIED
            if file.is_file() and is_ours and not (draft / file.name).exists():
                shutil.copyfile(file, draft / file.name)
        check_folder(draft)
    return tokens


def _write_tokenizer(folder: Path, draft: Path) -> tuple[PointerTokens, int]:
    """Write the tokenizer's files with the pointer tokens; return these, and the number of ids before."""
    tree = read_json(folder, TOKENIZER)
    try:
        vocabulary = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise ModelError(
            f"{folder / TOKENIZER} cannot be read ({first_line(error)}); copy it again from the "
            "model's source"
        ) from None
    if present := [token for token in TOKENS if token in vocabulary]:
        raise UserError(
            f"{folder / TOKENIZER} has the token {present[0]} already, but config.json has no "
            f"{ID_KEYS[0]}; start from the model's own folder"
        )
    # The library numbers added tokens one by one, after the largest id.
    first = max(vocabulary.values()) + 1
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
    extended = Tokenizer.from_file(str(draft / TOKENIZER))
    if [extended.token_to_id(token) for token in TOKENS] != [token["id"] for token in new]:
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
    """Write the files that have embeddings, with the new rows, and the head.

    One file at a time is in memory. The caller copies the files without embeddings.
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
            tensors |= _head_tensors(head, dtype)
        save_file(tensors, draft / file.name, metadata=metadata)
    if is_single:
        return
    save_file(_head_tensors(head, dtype), draft / _HEAD_FILE, metadata={"format": "pt"})
    index = read_json(folder, INDEX)
    index["weight_map"] |= dict.fromkeys(_head_tensors(head, dtype), _HEAD_FILE)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        parameters = sum(tensor.numel() for tensor in head.values())
        metadata["total_size"] += added + parameters * dtype.itemsize
    _write_json(draft / INDEX, index)


def _extended(weight: torch.Tensor, tokens: PointerTokens, rows: int, count: int) -> torch.Tensor:
    """Return embeddings [V, H] with at least `rows` rows; `tokens` get the mean of the first `count` rows."""
    missing = max(0, rows - weight.shape[0])
    extended = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    extended[list(tokens.triple)] = weight[:count].double().mean(dim=0).to(weight.dtype)
    return extended


def _head_tensors(head: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the head's tensors by their names in the model, in its dtype."""
    return {f"{PREFIX}{name}": tensor.to(dtype) for name, tensor in head.items()}


def _write_json(path: Path, tree: dict[str, Any], indent: int | None = 2) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

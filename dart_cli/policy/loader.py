"""The loader of policy folders. Engine and trainer use it alike, for tiny and for real models.

    load_policy     loads a Hugging Face folder (or `builtin:tiny`) as a LoadedPolicy
    check_weights   checks that a folder would load, without reading its weights
    LoadedPolicy    the model, its tokenizer, its image preparer, and its special token ids
    weight_tensors  returns the tensors that the trainer publishes and the engine loads
    use_our_layers  replaces forward passes of layers, for a model that was loaded in another way

Qwen2-VL, Qwen2.5-VL (UI-TARS-1.5-7B is one), Qwen3-VL, Qwen3.5 and the mixtures of both are supported. Nothing
is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging as transformers_logging

from bus.errors import (
    ModelError,
    cure_of,
    first_line,
    is_out_of_memory,
)
from dart_cli.config import model_folder as files
from dart_cli.config.architecture import ID_KEYS, TOKENS
from dart_cli.config.model_folder import check_folder, resolve
from dart_cli.config.schema import LoraConfig, Pointing
from dart_cli.hardware.device import check_memory
from dart_cli.language.pointer_tokens import PointerTokens, pointer_tokens
from dart_cli.language.vocabulary import CUT, END, LiteralText, forbidden_ids
from dart_cli.policy.delta_net import use_states
from dart_cli.policy.experts import use_routing
from dart_cli.policy.forward import ModelInputs, collate, device_of, use_batched_vision
from dart_cli.policy.images import ImagePreparer, PreparedImage
from dart_cli.policy.lora import add_adapters, is_adapter
from dart_cli.policy.model_files import PolicyFiles
from dart_cli.policy.packed import use_packed
from dart_cli.policy.pointer_folder import attach_head, without_head
from dart_cli.policy.pointer_head import PointerHead, head_of

_AS_IT_IS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Values of `tokenizer_class` with which a folder's tokenizer.json is the whole tokenizer."""

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments with which transformers fetches nothing, and neither runs a folder's code (`auto_map`) nor asks
to."""


@dataclass
class LoadedPolicy:
    """A vision-language policy with the token ids that the engine and the trainer need."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    images: ImagePreparer
    image_token_id: int
    pad_token_id: int
    end_token_ids: tuple[int, ...]  # a completion ends with the first of these
    # never drawn from the vocabulary, in sampling and training
    forbidden_token_ids: tuple[int, ...]
    max_positions: int  # tokens of prompt and completion together
    literal: LiteralText  # marks text that comes from outside: tasks, screens, completions
    lora: LoraConfig | None = None  # if set, the adapters are what is trained and published
    pointer: PointerTokens | None = None  # set if the folder has a pointer head
    pointing: Pointing = "text"  # only with "pointer" can the model sample `pointer.start`
    _forbidden: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return device_of(self.model)

    @property
    def pointer_head(self) -> PointerHead | None:
        """The model's pointer head; None if the folder has none."""
        return head_of(self.model)

    @property
    def absent_token_ids(self) -> frozenset[int]:
        """Tokens that no completion contains, since they are neither drawn nor forced by a pointer."""
        forced = self.pointer.forced if self.pointer and self.pointing == "pointer" else ()
        return frozenset(self.forbidden_token_ids).difference(forced)

    def drawn_token_ids(self) -> frozenset[int]:
        """Return the tokens over which the distributions of the model range."""
        rows = int(self.model.get_input_embeddings().weight.shape[0])
        return frozenset(range(rows)).difference(self.forbidden_token_ids)

    def forbidden(self, device: torch.device) -> torch.Tensor:
        """Return `forbidden_token_ids` [K] as a tensor on `device`, for `masked_logprobs`."""
        if device not in self._forbidden:
            self._forbidden[device] = torch.tensor(self.forbidden_token_ids, device=device)
        return self._forbidden[device]

    def inputs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]]
    ) -> ModelInputs:
        """Batch token ids [B][L] with their encoded screenshots [B][I]; see `collate`."""
        return self.inputs_of(
            sequences, [[self.images.prepare(encoded) for encoded in row] for row in images]
        )

    def inputs_of(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PreparedImage]]
    ) -> ModelInputs:
        """Batch token ids [B][L] with their prepared images [B][I]; see `collate`."""
        return collate(
            sequences,
            images,
            pad_token=self.pad_token_id,
            image_token=self.image_token_id,
            merge=self.images.merge,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without end tokens. Other special tokens are spelt out."""
        token_ids = [token for token in token_ids if token not in self.end_token_ids]
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included.

        The parts between CUTs are tokenised separately, so that no special token crosses a CUT.
        """
        encode = self.tokenizer.encode
        parts = [part for part in text.split(CUT) if part]
        return [token for part in parts for token in encode(part, add_special_tokens=False)]

    def encode_completion(self, text: str) -> list[int]:
        """Return the token ids [A] of the completion `text`, with an end token; `decode` inverts it.

        Special tokens that the text spells are encoded as plain characters.
        """
        ends = self.tokenizer.convert_tokens_to_ids("<|im_end|>"), self.tokenizer.eos_token_id
        end = next(token for token in (*ends, *self.end_token_ids) if token in self.end_token_ids)
        return [*self.encode(self.literal.mark(text)), end]


def weight_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's weight sets by name: its adapters if it has any, else its parameters.

    The trainer publishes these tensors and the engine loads them. Copying into them changes the model. Tied
    parameters appear once.
    """
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)} or tensors


def load_policy(
    name: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    weights: bool = True,
    lora: LoraConfig | None = None,
    seed: int = 0,
    pointing: Pointing = "text",
    adapters: str = "",
) -> LoadedPolicy:
    """Load a policy folder in evaluation mode; `dtype` "auto" is the dtype of the folder.

    Without `weights` the policy only encodes and decodes tokens; its model is on `meta` and cannot run. With
    `lora` the model gets adapters (lora.py), read from the folder `adapters` or drawn with `seed`. A pointer
    head of the folder is always loaded, but only with `pointing` "pointer" can the model sample pointers.

    Raises ModelError, which names the file and the fix, if the folder is missing, incomplete, or of an
    unsupported model class. Raises MissingPartError for adapters without peft, and DartError as
    `check_memory` does.
    """
    folder = resolve(name)
    config = check_folder(folder)
    pointer = pointer_tokens(config)
    if pointer is None and pointing == "pointer":
        raise ModelError(without_head(name))
    processor = files.preprocessor(folder)
    with check_memory(name, device):
        model = _load_weights(folder, dtype) if weights else _without_weights(folder)
        if pointer is not None:
            attach_head(model, folder, weights=weights)
        if weights:
            # Tensors from safetensors may still be the mapped file, and a process that rewrites the folder
            # would then kill this one with SIGBUS. Moving to a GPU copies them; on the CPU they are cloned.
            model.to(device)
            if torch.device(device).type == "cpu":
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        if lora is not None:
            add_adapters(model, lora, seed, adapters)
    if weights:
        use_our_layers(model)
    try:
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, **_LOCAL)
        preparer = ImagePreparer(Qwen2VLImageProcessorPil.from_dict(processor))
    except (OSError, ValueError, KeyError) as error:
        fix = "copy the files again from the model's source"
        raise ModelError(
            f"{folder}: tokenizer or image processor cannot be loaded ({first_line(error)}); "
            f"{cure_of(error, fix)}"
        ) from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = files.chat_template(folder)
    return _assemble(folder, model.eval(), tokenizer, preparer, lora, pointer, pointing)


def use_our_layers(model: PreTrainedModel, compute: torch.dtype | None = None) -> None:
    """Let a model that has its weights take packs, states, routing, and screens that are encoded together.

    The model computes in `compute`, by default the type of its parameters. Raises MissingPartError on a GPU
    without the kernel of recurrent layers.
    """
    use_batched_vision(model)
    use_packed(model)
    use_states(model, compute)
    use_routing(model)


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that loads the folder's tokenizer.

    AutoTokenizer builds a class of its own from the vocabulary for some `model_type` (qwen3_5 is one), also
    where the folder says that tokenizer.json is to be taken as it is. The texts would then be cut otherwise.
    """
    name = "tokenizer_config.json"
    if not (folder / name).is_file():
        return AutoTokenizer
    class_name = files.read_json(folder, name).get("tokenizer_class")
    return PreTrainedTokenizerFast if class_name in _AS_IT_IS else AutoTokenizer


def _assemble(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    preparer: ImagePreparer,
    lora: LoraConfig | None,
    pointer: PointerTokens | None,
    pointing: Pointing,
) -> LoadedPolicy:
    config: Any = model.config
    vocabulary = tokenizer.get_vocab()
    ends = _as_ids(getattr(model.generation_config, "eos_token_id", None))
    ends |= _as_ids(tokenizer.eos_token_id)
    ends |= {vocabulary[END]} if END in vocabulary else set()
    if not ends:
        raise ModelError(f"{folder / 'tokenizer_config.json'}: no end token; set eos_token")
    pad = tokenizer.pad_token_id
    pad = int(pad) if pad is not None else min(ends)
    rows = int(model.get_input_embeddings().weight.shape[0])
    _check_tokenizer(folder, config, tokenizer, rows, pointer)
    if preparer.factor != _factor(config):
        raise ModelError(
            f"{folder}: the preprocessor cuts patches of {preparer.factor} pixels, the model takes "
            f"{_factor(config)}; copy both files from the same model"
        )
    others = {pad, int(config.image_token_id), int(config.video_token_id)}
    if tokenizer.unk_token_id is not None:
        others.add(int(tokenizer.unk_token_id))
    if pointer is not None:
        others |= set(pointer.forced if pointing == "pointer" else pointer.triple)
    forbidden = forbidden_ids(vocabulary, rows, ends=ends, others=others)
    added = tokenizer.added_tokens_decoder.items()
    literal = [str(token) for index, token in added if token.special or index in forbidden | ends]
    return LoadedPolicy(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        images=preparer,
        image_token_id=int(config.image_token_id),
        pad_token_id=pad,
        end_token_ids=tuple(sorted(ends)),
        forbidden_token_ids=tuple(sorted(forbidden)),
        max_positions=int(config.get_text_config().max_position_embeddings),
        literal=LiteralText(literal),
        lora=lora,
        pointer=pointer,
        pointing=pointing,
    )


def _factor(config: Any) -> int:
    """Return the pixels of one image token's side: the patch size times the number of merged patches."""
    return int(config.vision_config.patch_size * config.vision_config.spatial_merge_size)


def _check_tokenizer(
    folder: Path,
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    rows: int,
    pointer: PointerTokens | None,
) -> None:
    """Raise ModelError if the tokenizer belongs to another model, whose embeddings have `rows` rows."""
    vocabulary = tokenizer.get_vocab()
    problem = ""
    if (largest := max(vocabulary.values())) >= rows:
        problem = f"has a token {largest}, the model's embeddings have {rows} rows (vocab_size)"
    elif config.image_token_id not in tokenizer.added_tokens_decoder:
        problem = f"has no special token {config.image_token_id}, the image_token_id of config.json"
    ids = pointer.triple if pointer else ()
    for key, token, token_id in zip(ID_KEYS, TOKENS, ids, strict=False):
        if vocabulary.get(token) != token_id:
            problem = f"has {vocabulary.get(token, 'nothing')} as {token}, but {key} is {token_id}"
    if problem:
        raise ModelError(
            f"{folder / files.TOKENIZER} {problem}; it belongs to another model: copy both again"
        )


def check_weights(folder: Path) -> None:
    """Raise ModelError unless the folder would load; of the tensors, only names and shapes are read."""
    policy = load_policy(folder, weights=False)
    with PolicyFiles(folder) as tensors:
        tensors.check(policy.model)


def _without_weights(folder: Path) -> PreTrainedModel:
    """Return the model on the meta device, where it has shapes but no values."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(folder, **_LOCAL)
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: config.json cannot be loaded ({first_line(error)}); "
            f"{cure_of(error, 'copy it again')}"
        ) from error
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _load_weights(folder: Path, dtype: str | torch.dtype) -> PreTrainedModel:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported in `report`, and refused below
            output_loading_info=True,
            **_LOCAL,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{folder}: the weights cannot be loaded ({first_line(error)}); "
            f"{cure_of(error, 'copy them again')}"
        ) from error
    except Exception as error:  # SafetensorError derives from Exception alone
        if type(error).__name__ != "SafetensorError":
            raise
        raise ModelError(
            f"{folder}: a safetensors file is broken ({first_line(error)}); copy it again"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    wrong = sorted(report["missing_keys"]) + sorted(key[0] for key in report["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"{folder}: {len(wrong)} tensors are missing or of another shape, "
            f"the first is {wrong[0]}; the folder is incomplete or belongs to another model"
        )
    loaded: PreTrainedModel = model
    return loaded


def _as_ids(value: Any) -> set[int]:
    """Return the token ids of a setting, which is None, one id or a list of ids."""
    if value is None:
        return set()
    return {int(token) for token in value} if isinstance(value, list | tuple) else {int(value)}

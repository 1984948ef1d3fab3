"""Check that trajectories can be trained on, before they are filed.

    check_step    checks a step that an environment submits: lengths, ranges, spans, patches, hashes
    check_end     checks the end of a trajectory
    model_facts   reads the tokens and image sizes of the run's model from its folder
    ModelFacts    these facts; it compares a step from another run with them

A sample that the model cannot process would end the trainer, be served again, and end it again. So
trajectories from elsewhere are first compared with the model's folder, without torch: token ids with the
vocabulary and with the tokens that are never sampled, lengths with the model's positions, image
placeholders with the sizes of the images, and the vocabulary's fingerprint with the fingerprint of the
model that the tokens were made for.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

from PIL import Image

from bus.errors import ActionError, ModelError, ProtocolError
from bus.messages import SampledTokens, StepRecord, TrajectoryEnd
from dart_cli.config.architecture import MIXTURES, Experts, pointer_ids, shape_of
from dart_cli.config.model_folder import model_folder
from dart_cli.config.schema import MODEL_ENGINES, MOST_ACTIONS, Config, Pointing
from dart_cli.data.store.steps import in_range
from dart_cli.language.coordinates import smart_resize
from dart_cli.language.pointer_tokens import Triple, map_mistake, patch_mistake
from dart_cli.language.vocabulary import forbidden_ids
from envs.contract.blobs import content_hash, image_type
from envs.contract.screenshots import seen_size

MOST_ROUTING = 4096
"""Bytes of a token that say which experts it passed; Qwen3-VL-30B-A3B has 384."""

_NOT_POINTING = 'there are patches, of a policy with policy.pointing = "pointer"; here it is text'


def check_step(record: StepRecord, config: Config) -> None:
    """Raise ProtocolError if lengths, ranges, spans or hashes do not fit together.

    A step that the trainer would refuse must not become part of a batch, which would be served again and
    again.
    """
    where = f"step {record.step} of {record.trajectory_id}"
    # 1. Every number is in range.
    _check_range(where, "step", [record.step])
    _check_range(where, "prompt_token_ids", record.prompt_token_ids)
    _check_range(where, "token_ids", record.sampled.token_ids)
    _check_range(where, "version_spans", [span.version for span in record.sampled.version_spans])
    _check_times(where, record.model_s, record.env_s)
    # 2. There are tokens, with as many log-probabilities and entropies.
    length = len(record.sampled.token_ids)
    if not length or not record.prompt_token_ids:
        raise ProtocolError(f"{where}: prompt_token_ids and token_ids must not be empty")
    for name in ("behaviour_logprobs", "entropies"):
        values: list[float] = getattr(record.sampled, name)
        if len(values) != length:
            raise ProtocolError(f"{where}: {name} must be as many as token_ids, {length}")
        if not all(map(isfinite, values)):
            raise ProtocolError(f"{where}: {name} must be finite")
    # 3. The version spans cover each token once.
    covered = 0
    for span in record.sampled.version_spans:
        if span.start != covered or not covered < span.end <= length:
            raise ProtocolError(f"{where}: version_spans must cover the tokens in order, once")
        covered = span.end
    if covered != length:
        raise ProtocolError(f"{where}: version_spans cover {covered} of {length} tokens")
    # 4. The patches are of the policy's pointer and of the screenshot.
    if mistake := _live_patch_mistake(config, record.sampled, record.screenshot):
        raise ProtocolError(f"{where}: {mistake}")
    if mistake := map_mistake(record.pointed, record.sampled.patches):
        raise ProtocolError(f"{where}: {mistake}")
    # 5. The routing has equally many bytes for each token that the engine has computed.
    computed = len(record.prompt_token_ids) + length - 1
    bytes_each, rest = divmod(len(record.sampled.routing), computed)
    if rest or bytes_each > MOST_ROUTING:
        raise ProtocolError(
            f"{where}: routing of {len(record.sampled.routing)} bytes for {computed} tokens; each must have equally "
            f"many, at most {MOST_ROUTING}"
        )
    if bytes_each and (mistake := _routing_mistake(config, record.sampled.routing, bytes_each)):
        raise ProtocolError(f"{where}: {mistake}")
    # 6. The hint is inside of the prompt.
    if (hint := record.hint) is not None:
        _check_range(where, "hint", hint.token_ids)
        if not hint.start <= hint.end <= len(record.prompt_token_ids):
            raise ProtocolError(f"{where}: its hint is outside of its prompt")
    # 7. The hashes match the images.
    if not record.image_hashes or record.image_hashes[-1] != content_hash(record.screenshot):
        raise ProtocolError(f"{where}: the last of image_hashes must be the screenshot's")
    for image in record.images:
        if image_type(image) is None or content_hash(image) not in record.image_hashes:
            raise ProtocolError(f"{where}: images must be PNG, JPEG or WebP, and of image_hashes")
    # 6. A completion has a bounded number of actions.
    if record.more_actions and (record.action is None or len(record.more_actions) >= MOST_ACTIONS):
        raise ProtocolError(
            f"{where}: more_actions must be at most {MOST_ACTIONS - 1}, after action"
        )


def check_end(end: TrajectoryEnd) -> None:
    """Raise ProtocolError for values that no episode can have."""
    where = f"end of {end.trajectory_id}"
    _check_range(where, "steps", [end.steps])
    _check_times(where, end.reset_s, end.wall_s)


def _check_range(where: str, name: str, values: Sequence[int]) -> None:
    if not in_range(values):
        raise ProtocolError(f"{where}: {name} must be in [0, 2 ** 31)")


def _check_times(where: str, *seconds: float) -> None:
    if not all(isfinite(value) and value >= 0 for value in seconds):
        raise ProtocolError(f"{where}: times must be finite and not negative, got {seconds}")


@dataclass(frozen=True)
class ModelFacts:
    """The facts about tokens and images that a model folder has."""

    vocabulary: int  # every token id is below this
    max_positions: int  # of prompt and completion together
    image_token: int  # placeholder of an image in a prompt
    factor: int  # width and height in pixels that one placeholder covers
    min_pixels: int
    max_pixels: int
    fingerprint: str  # of the tokenizer's vocabulary
    forbidden: frozenset[int]  # token ids that no completion holds
    pointer: Triple | None  # the tokens of a pointer; None where the policy does not point
    experts: Experts | None = None  # None if the model has none
    routing_bytes: int = 0  # bytes of a token that say which experts all layers chose

    def incompatibility(
        self, prompt: list[int], sampled: SampledTokens, images: Iterable[bytes]
    ) -> tuple[str, str] | None:
        """Return the column of a step that does not fit this model and what is wrong; None if all fits."""
        # 1. Token ids and lengths.
        completion = sampled.token_ids
        for column, ids in (("prompt_token_ids", prompt), ("token_ids", completion)):
            if max(ids) >= self.vocabulary:
                return column, (
                    f"{max(ids)} is no token of this model, which has {self.vocabulary}; "
                    "these trajectories were made for another model"
                )
        length = len(prompt) + len(completion)
        if length > self.max_positions:
            return "prompt_token_ids", f"{length} tokens, the model takes {self.max_positions}"
        # 2. Image placeholders.
        try:
            sizes = [self.places(image) for image in images]
        except ActionError as error:
            return "screenshot", str(error)
        places, expected = prompt.count(self.image_token), sum(sizes)
        if places != expected:
            return "prompt_token_ids", (
                f"{places} image placeholders, its images need {expected} with this model; "
                "these trajectories were made for another model"
            )
        at = 0
        for size in sizes:
            at = prompt.index(self.image_token, at)
            if prompt[at : at + size].count(self.image_token) < size:
                return "prompt_token_ids", f"the {size} placeholders of an image are not adjacent"
            at += size
        # 3. The completion.
        if mistake := self.patch_mistake(sampled, sizes[-1]):
            return "patches", mistake
        if forbidden := self.forbidden.intersection(completion):
            return (
                "token_ids",
                f"{min(forbidden)} is a token that no policy samples: of prompts, or unknown",
            )
        return None

    def patch_mistake(self, sampled: SampledTokens, cells: int | None) -> str:
        """Return what is wrong with the patches of a step; empty if nothing.

        `cells` is the number of cells of its screenshot, or None if that is unknown.
        """
        if sampled.patches and self.pointer is None:
            return _NOT_POINTING
        return patch_mistake(
            sampled.token_ids,
            sampled.patches,
            sampled.behaviour_logprobs,
            sampled.entropies,
            triple=self.pointer,
            cells=cells,
        )

    def places(self, encoded: bytes) -> int:
        """Return how many placeholders the prompt needs for an image: one for each cell."""
        return _places(self, *_size(encoded))


@lru_cache(maxsize=1024)
def _places(facts: ModelFacts, width: int, height: int) -> int:
    """Return how many placeholders an image of `width` x `height` pixels needs."""
    rows, columns = smart_resize(
        height,
        width,
        factor=facts.factor,
        min_pixels=facts.min_pixels,
        max_pixels=facts.max_pixels,
    )
    return (rows // facts.factor) * (columns // facts.factor)


def _size(encoded: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(encoded)) as image:
        return seen_size(image)


def model_facts(config: Config) -> ModelFacts | None:
    """Return the facts of the run's model; None if its folder is not on this host or no model is used.

    Raises ModelError if the files of the folder cannot be read.
    """
    name = config.model.path
    folder = model_folder(name)
    if config.rollout.engine not in MODEL_ENGINES or not folder.is_dir():
        return None
    return _facts(folder, config.policy.pointing)


def _live_patch_mistake(config: Config, sampled: SampledTokens, screenshot: bytes) -> str:
    """Return what is wrong with the patches that an engine drew on the screenshot; empty if nothing.

    If the model or the image cannot be read, the tokens alone are checked.
    """
    if config.policy.pointing == "text":
        return _NOT_POINTING if sampled.patches else ""
    try:
        facts = model_facts(config)
    except ModelError:
        facts = None
    if facts is None:
        numbers = sampled.behaviour_logprobs, sampled.entropies
        return patch_mistake(sampled.token_ids, sampled.patches, *numbers)
    cells = None
    if sampled.patches:
        with suppress(ActionError, OSError, Image.DecompressionBombError):
            cells = facts.places(screenshot)
    return facts.patch_mistake(sampled, cells)


def _routing_mistake(config: Config, routing: bytes, bytes_each: int) -> str:
    """Return what is wrong with the choice of experts of a step; empty if nothing, or if the model is not here."""
    try:
        facts = model_facts(config)
    except ModelError:
        facts = None
    if facts is None:
        return ""
    if facts.experts is None:
        return "there is routing, of a mixture of experts, which the model is not"
    if bytes_each != facts.routing_bytes:
        return f"routing has {bytes_each} bytes for each token, the model {facts.routing_bytes}"
    if facts.experts.index_bytes == 1:
        is_beyond = bool(routing.translate(None, bytes(range(facts.experts.count))))
    else:
        indices = memoryview(routing).cast("H").tolist() if sys.byteorder == "little" else []
        is_beyond = max(indices, default=0) >= facts.experts.count
    return f"routing names an expert beyond the {facts.experts.count}" if is_beyond else ""


@lru_cache(maxsize=8)
def _facts(folder: Path, pointing: Pointing) -> ModelFacts:
    """Return the facts about the model in `folder`, read from its JSON files. Raises ModelError."""
    try:
        model, images = _read(folder, "config.json"), _read(folder, "preprocessor_config.json")
        text, size = model.get("text_config", model), images.get("size", {})
        shape = shape_of(model) if model.get("model_type") in MIXTURES else None
        fewest = images.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = images.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return ModelFacts(
            vocabulary=int(text["vocab_size"]),
            max_positions=int(text["max_position_embeddings"]),
            image_token=int(model["image_token_id"]),
            factor=int(images["patch_size"]) * int(images["merge_size"]),
            min_pixels=int(fewest),
            max_pixels=int(most),
            fingerprint=_fingerprint(folder),
            pointer=pointer_ids(model) if pointing == "pointer" else None,
            forbidden=frozenset(_never_sampled(folder, model, int(text["vocab_size"]), pointing)),
            experts=shape.experts if shape else None,
            routing_bytes=shape.routing_bytes if shape else 0,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder}: cannot be compared with trajectories ({type(error).__name__}: {error}); "
            "copy its json files again from the model's source"
        ) from None


def _read(folder: Path, name: str) -> dict[str, Any]:
    value = json.loads((folder / name).read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} does not hold a JSON object")  # noqa: TRY004 - caught with the others
    return value


def _fingerprint(folder: Path) -> str:
    """Return a hash of the tokens of all ids that does not depend on the file's layout."""
    tokenizer = _read(folder, "tokenizer.json")
    added = [[token["id"], token["content"]] for token in tokenizer.get("added_tokens", [])]
    plain = json.dumps([tokenizer["model"]["vocab"], sorted(added)], sort_keys=True)
    return blake2b(plain.encode(), digest_size=8).hexdigest()


def _never_sampled(
    folder: Path, model: dict[str, Any], vocabulary: int, pointing: Pointing
) -> set[int]:
    """Return the token ids that no completion contains, read from the folder's files."""

    def optional(name: str) -> dict[str, Any]:
        return _read(folder, name) if (folder / name).is_file() else {}

    tokenizer, settings = _read(folder, "tokenizer.json"), optional("tokenizer_config.json")
    vocab = tokenizer["model"]["vocab"]  # Unigram: [token, score] in the order of ids
    token_ids: dict[str, int] = (
        dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    )
    token_ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    decoder = settings.get("added_tokens_decoder", {})
    token_ids |= {token["content"]: int(key) for key, token in decoder.items()}

    def special(name: str) -> set[int]:
        token = settings.get(name)
        token = token["content"] if isinstance(token, dict) else token
        return {token_ids[token]} if token in token_ids else set()

    stops = (optional("generation_config.json") or model).get("eos_token_id", [])
    ends = set(stops) if isinstance(stops, list) else {stops}
    others = special("pad_token") | special("unk_token")
    others |= {model[name] for name in ("image_token_id", "video_token_id") if name in model}
    if pointing == "text":
        others |= set(pointer_ids(model) or ())
    return forbidden_ids(token_ids, vocabulary, ends=ends | special("eos_token"), others=others)

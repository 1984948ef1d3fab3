"""Memory of one trainer rank at its peak: pure formulas, in bytes.

TrainerSetup     what the formulas follow from, beside the model's shape
TrainerMemory    what one rank holds, by part
trainer_memory   the peak of an update
kept_by_layer    what a layer of the language model keeps of a token for the backward pass
kept_by_block    what a block of the vision tower keeps of a patch, where it is trained

The parts are those of `dart_cli/train` with FSDP2 (docs/hardware.md): trained parameters are float32
shards over the ranks, which are the masters, with float32 gradients and AdamW's two
moments; frozen ones are whole on each rank in `model.dtype`; each layer of the language model, the embedding and the head are units that are gathered in `model.dtype` and whose
gradients are reduced in float32. In float32 on one rank all are plain tensors. tests/doctor/test_trainer_memory.py holds the formulas to
torch's own tracker of an update without data.

An update's memory is highest at one of these moments, the one that needs most:

    head    all layers have kept what they keep; the head's gradient is made
    norm    the last norm goes backward; the head stays gathered, its gradient is not yet reduced
    last    the last layer's MLP goes backward
    next    the layer before it does, while the last layer's gradients are reduced
    first   the first layer does, and the embedding is gathered ahead
    tower   a vision block goes backward, where the tower is trained
    end     the gradients of embedding and head are reduced
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dart_cli.algo.memory_bounds import CHUNK_TOKENS, VOCABULARY_CHUNK, WHOLE_GRADIENTS_BYTES
from dart_cli.config.architecture import Shape

WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number of `model.dtype`."""

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes of a trained parameter: the float32 master, its float32 gradient, AdamW's two moments."""


PeakPhase = Literal["head", "norm", "last", "next", "first", "tower", "end"]

CONTEXT = 2_500_000_000
"""Bytes of a GPU's context, kernels and NCCL's buffers: an assumption."""
FRAGMENTS = 0.05
"""Share of what comes and goes that the allocator leaves unused between it: an assumption."""


@dataclass(frozen=True)
class TrainerSetup:
    """One trainer. `tokens` are those of its largest forward pass, `predicted` the completions' in it."""

    tokens: int
    predicted: int
    dtype: str = "bfloat16"
    ranks: int = 1
    recompute: bool = False
    offload: bool = False  # masters, gradients and moments in main memory
    freeze_vision: bool = True
    reference: bool = False  # a second model, for the KL
    adapters: int = 0  # parameters of LoRA's adapters, which alone are trained; 0 for all
    points: bool = False  # trains a pointer head, where the folder has one

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the model; float32 on one rank, not offloaded, is plain tensors."""
        return self.ranks > 1 or self.dtype == "bfloat16" or self.offload


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one rank."""

    held: dict[str, int]  # from the start of the run to its end
    passing: dict[str, int]  # at the moment of the peak
    moment: PeakPhase
    host: int  # of main memory, with offload

    @property
    def fixed(self) -> int:
        """What is held, whatever the prompts are."""
        return sum(self.held.values())

    @property
    def peak(self) -> int:
        """What the tensors of an update take at once."""
        return self.fixed + sum(self.passing.values())

    @property
    def total(self) -> int:
        """The peak on a GPU, with context and fragments."""
        return self.peak + CONTEXT + int(FRAGMENTS * sum(self.passing.values()))


def trained_parameters(shape: Shape, setup: TrainerSetup) -> int:
    """How many numbers the optimizer changes."""
    if setup.adapters:
        return setup.adapters
    vision = 0 if setup.freeze_vision else shape.vision
    return shape.text + vision + (shape.pointer if setup.points else 0)


def kept_by_layer(shape: Shape, dtype: str) -> int:
    """Bytes that a layer keeps of a token for the backward pass, without recompute.

    Two norms: their input in float32, normalised, scaled. Attention: queries, keys, values, its
    output, and the float32 logarithm of each head's sum. MLP: gate, its activation, up, their product.
    """
    wide = WIDTH[dtype]
    norms = 2 * (4 + 2 * wide) * shape.width
    attention = wide * (2 * shape.queries + 2 * shape.keys) + 4 * (shape.queries // shape.head)
    mlp = 4 * wide * shape.mlp
    heads = (4 + wide) * (shape.queries + shape.keys) if shape.normed_heads else 0
    return norms + attention + mlp + heads


def kept_by_block(shape: Shape, dtype: str) -> int:
    """Bytes that a block of the vision tower keeps of a patch, without recompute.

    Two norms, of which Qwen2.5's are as the language model's; attention with its joint queries, keys and
    values; an MLP of two matrices, or of three.
    """
    wide = WIDTH[dtype]
    of_width = {"qwen2_5_vl": 2 * (4 + 2 * wide) + 7 * wide}.get(shape.kind, 11 * wide)
    of_mlp = {"qwen2_vl": 3, "qwen2_5_vl": 4, "qwen3_vl": 2}[shape.kind] * wide
    return of_width * shape.vision_width + of_mlp * shape.vision_mlp


def trainer_memory(
    shape: Shape, setup: TrainerSetup, *, whole_gradients: int = WHOLE_GRADIENTS_BYTES
) -> TrainerMemory:
    """Return what a rank holds and what an update takes beside it at the moment of its peak.

    Gradients of up to `whole_gradients` bytes are whole on each rank.
    """
    moments: dict[PeakPhase, dict[str, int]] = {
        "head": _at_head(shape, setup),
        "norm": _at_norm(shape, setup),
        "last": _at_layer(shape, setup, shape.layers),
        "next": _at_layer(shape, setup, max(1, shape.layers - 1)),
        "first": _at_layer(shape, setup, 1),
        "end": _at_end(shape, setup),
    }
    if not setup.freeze_vision and not setup.adapters:
        moments |= _with_tower(shape, setup, moments)
    if setup.points and _gathers(setup):
        moments = {name: _with_pointer(shape, setup, each) for name, each in moments.items()}
    highest = max(moments, key=lambda name: sum(moments[name].values()))
    trained = trained_parameters(shape, setup)
    host = 0
    if setup.offload:
        host = -(-(MASTER + GRADIENT + MOMENTS) * trained // setup.ranks)
    return TrainerMemory(_held(shape, setup, whole_gradients), moments[highest], highest, host)


def _with_pointer(shape: Shape, setup: TrainerSetup, moment: dict[str, int]) -> dict[str, int]:
    """Add the pointer head and its gradient, both gathered with the root, from forward to backward."""
    size = WIDTH[setup.dtype] * shape.pointer
    return moment | {name: moment.get(name, 0) + size for name in ("gathered", "head")}


def _held(shape: Shape, setup: TrainerSetup, whole_gradients: int) -> dict[str, int]:
    wide, trained = WIDTH[setup.dtype], trained_parameters(shape, setup)
    # Adapters stand beside the whole model.
    frozen = shape.parameters - (0 if setup.adapters else trained)
    shared = 0 if setup.offload else -(-trained // setup.ranks)
    gradients = GRADIENT * shared
    if setup.sharded and GRADIENT * trained <= whole_gradients:
        gradients = GRADIENT * trained
    reference = 0
    if setup.reference and not setup.adapters:
        reference = wide * -(-shape.parameters // setup.ranks)
    return {
        "masters": MASTER * shared,
        "gradients": gradients,
        "moments": MOMENTS * shared,
        "frozen": wide * frozen,
        "reference": reference,
    }


def _at_head(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """All layers went forward; the distributions of a chunk, and the head's gradient, are there."""
    wide = WIDTH[setup.dtype]
    each = wide * shape.width if setup.recompute else kept_by_layer(shape, setup.dtype)
    last_norm = (4 + 2 * wide) * shape.width
    gathered = wide * (shape.embedding + shape.layer) if _gathers(setup) else 0
    return {
        "activations": setup.tokens * (shape.layers * each + last_norm + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": gathered,
        "head": _scoring(shape, setup, wide),
    }


def _scoring(shape: Shape, setup: TrainerSetup, wide: int) -> int:
    """Of a chunk's distributions and the gradients that they give, block of the vocabulary by block.

    Forward a block's logits and probabilities; backward its slopes, widened, and the weight's gradient.
    """
    ids = min(VOCABULARY_CHUNK, shape.vocabulary)
    block, rows = min(CHUNK_TOKENS, setup.predicted) * ids, ids * shape.width
    of_hidden = 4 * setup.predicted * shape.width
    if setup.adapters:
        return max(8 * block, of_hidden + (4 + wide) * block)
    both = max(4 * rows + (4 + wide) * block, (4 + wide) * rows + wide * block)
    if ids < shape.vocabulary:  # the next block's gradient is made before the last one's is freed
        both = max(both, 8 * rows)
    return max(8 * block, of_hidden + wide * shape.embedding + both)


def _at_norm(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Five float32 tensors of the norm's width, beside the input that it kept."""
    wide = WIDTH[setup.dtype]
    each = wide * shape.width if setup.recompute else kept_by_layer(shape, setup.dtype)
    norm = 6 * 4 * shape.width
    gathers = _gathers(setup)
    return {
        "activations": setup.tokens * (shape.layers * each + norm + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": wide * (shape.embedding + shape.layer) if gathers else 0,
        "head": wide * shape.embedding if gathers else 0,
    }


def _at_layer(shape: Shape, setup: TrainerSetup, index: int) -> dict[str, int]:
    """Layer `index`, from 1 on, goes backward: three of its MLP's four kept numbers have gradients.

    The unit before it is gathered already; the gradients of the layer behind it are being reduced.
    """
    wide = WIDTH[setup.dtype]
    one = kept_by_layer(shape, setup.dtype)
    others = index * wide * shape.width if setup.recompute else (index - 1) * one
    backward = 2 * wide * shape.mlp + 2 * wide * shape.width
    before = shape.layer if index > 1 else 0 if shape.tied else shape.embedding
    reduced = 4 * shape.layer if index < shape.layers else 0
    gathers = _gathers(setup)
    return {
        "activations": setup.tokens * (others + one + backward + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": wide * (shape.embedding + shape.layer + before) if gathers else 0,
        "head": wide * shape.embedding if gathers else 0,
        "reduced": reduced if gathers else 0,
    }


def _at_end(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Return what there is at the end, when the backward pass is over.

    The embedding's gradient becomes float32, then a shard of the sum. The head and its own
    gradient, in `model.dtype`, stand beside it; tied they are one.
    """
    wide = WIDTH[setup.dtype]
    if not _gathers(setup):
        return {"features": _features(shape, setup, wide)}
    reduced = 4 + 4 / setup.ranks + (0 if shape.tied else wide)
    return {
        "features": _features(shape, setup, wide),
        "gathered": wide * shape.embedding,
        "head": wide * shape.embedding,
        "reduced": int(reduced * shape.embedding),
    }


def _with_tower(
    shape: Shape, setup: TrainerSetup, moments: Mapping[PeakPhase, dict[str, int]]
) -> dict[PeakPhase, dict[str, int]]:
    """Return the moments with what a trained tower keeps, and the one in which its last block goes backward.

    As many patches as all tokens of the pack would be: screens are most of them.
    """
    wide, patches = WIDTH[setup.dtype], setup.tokens * shape.merge
    one = kept_by_block(shape, setup.dtype)
    each = wide * shape.vision_width if setup.recompute else one
    kept = patches * shape.vision_blocks * each
    found: dict[PeakPhase, dict[str, int]] = {
        name: {**parts, "tower": kept} for name, parts in moments.items() if name != "end"
    }
    backward = one + 3 * wide * shape.vision_mlp if setup.recompute else 3 * wide * shape.vision_mlp
    found["tower"] = {
        **moments["end"],  # the head, gathered, and its gradient
        "reduced": 4 * shape.vision_block if _gathers(setup) else 0,
        "tower": kept + patches * backward,
    }
    return found


def _gathers(setup: TrainerSetup) -> bool:
    """Whether weights come from shards; LoRA's base is whole on each rank, and not reduced."""
    return setup.sharded and not setup.adapters


def _positions(shape: Shape, wide: int) -> int:
    """Bytes of a token's cosines and sines."""
    return 2 * wide * shape.head


def _features(shape: Shape, setup: TrainerSetup, wide: int) -> int:
    """Of the pack's screens, as many as its tokens: token ids, positions, features."""
    return setup.tokens * (4 * 8 + wide * shape.width * (1 + shape.deepstack))

"""Compute the memory of one trainer rank at its peak: pure formulas, in bytes.

TrainerSetup           the inputs of the formulas, beside the model's shape
TrainerMemory          the memory of one rank, by part
trainer_memory         computes the peak of an update
layer_activations      what a layer with attention stores of a token for the backward pass
recurrence_activations what a DeltaNet layer stores of it
block_activations      what a block of the vision tower stores of a patch, if the tower is trained

The formulas follow `dart_cli/train` with FSDP2 (docs/hardware.md). Trained parameters are the float32
masters, in shards over the ranks, with float32 gradients and AdamW's two moments. Frozen parameters are whole
on each rank in `model.dtype`, but for the experts of a mixture under adapters, which are shards. Each layer
of the language model, the embedding and the head is a unit that is gathered in `model.dtype` and whose
gradients are reduced in float32. In float32 on one rank all are plain tensors.
tests/doctor/test_trainer_memory.py compares the formulas with torch's own count of the memory of an update,
which needs no data.

The peak of an update is in one of these phases, whichever needs most:

    teacher the forward pass of a teacher of its own weights, which stores nothing for a backward pass
    head    all layers have stored their activations, and the head's gradient is computed
    norm    backward pass of the last norm; the head is still gathered, its gradient is not reduced yet
    last    backward pass of the last layer's MLP
    next    backward pass of the layer before it, while the last layer's gradients are reduced
    first   backward pass of the first layer, with the embedding gathered ahead
    tower   backward pass of a vision block, if the tower is trained
    end     the gradients of embedding and head are reduced
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dart_cli.algo.memory_bounds import CHUNK_TOKENS, VOCABULARY_CHUNK, WHOLE_GRADIENTS_BYTES
from dart_cli.config.architecture import Shape

WIDTH = {"float32": 4, "bfloat16": 2}
"""`model.dtype` -> bytes of a number."""

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes for each trained parameter: the float32 master, its float32 gradient, AdamW's two moments."""

UpdatePhase = Literal["teacher", "head", "norm", "last", "next", "first", "tower", "end"]
"""A phase of an update. The module's docstring describes the phases."""

RULE_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, in both of its implementations."""

CONTEXT = 2_500_000_000
"""Bytes of a GPU's context, kernels and NCCL's buffers (assumed)."""
FRAGMENTS = 0.05
"""Unused gaps that the allocator leaves, as a share of the temporary memory (assumed)."""


@dataclass(frozen=True)
class TrainerSetup:
    """The setup of a trainer.

    `tokens` is the size of its largest forward pass, `predicted` the completion tokens in it.
    """

    tokens: int
    predicted: int
    dtype: str = "bfloat16"
    ranks: int = 1
    recompute: bool = False
    offload: bool = False  # masters, gradients and moments in main memory
    freeze_vision: bool = True
    reference: bool = False  # the model that the run began with, for the KL or as a teacher
    teacher: Shape | None = None  # another model, which scores the policy's tokens
    is_taught: bool = False  # the teacher or, with hints, the reference scores them
    adapters: int = 0  # parameters of LoRA's adapters, which alone are trained; 0 without LoRA
    points: bool = False  # whether a pointer head is trained, if the model folder has one

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the model. Float32 on one rank without offload is plain tensors."""
        return self.ranks > 1 or self.dtype == "bfloat16" or self.offload


@dataclass(frozen=True)
class TrainerMemory:
    """The memory of one rank, in bytes by part."""

    permanent: dict[str, int]  # allocated from the start of the run to its end
    passing: dict[str, int]  # temporary, in the phase of the peak
    phase: UpdatePhase  # the phase of the peak
    host: int  # main memory, with offload

    @property
    def fixed(self) -> int:
        """The permanent memory, which does not depend on the prompts."""
        return sum(self.permanent.values())

    @property
    def peak(self) -> int:
        """The most memory that the tensors of an update take at the same time."""
        return self.fixed + sum(self.passing.values())

    @property
    def total(self) -> int:
        """The peak on a GPU, with its context and the allocator's gaps."""
        return self.peak + CONTEXT + int(FRAGMENTS * sum(self.passing.values()))


def trained_parameters(shape: Shape, setup: TrainerSetup) -> int:
    """Return the number of parameters that the optimizer changes."""
    if setup.adapters:
        return setup.adapters
    vision = 0 if setup.freeze_vision else shape.vision
    return shape.text + vision + (shape.pointer if setup.points else 0)


def mixture_activations(shape: Shape, dtype: str, *, trained: bool = True) -> int:
    """Return the bytes that the experts of a layer store of a token for the backward pass, without recompute.

    Each chosen expert stores gate with up, the activation of gate, and its output, and where it is trained also its
    input and the product. The shared expert stores what an MLP does, and its output, which a gate multiplies. The
    router stores the probabilities of all experts in float32, and the indices of the chosen ones.
    """
    wide, experts = WIDTH[dtype], shape.experts
    if experts is None:
        return 0
    routed = shape.width + 3 * experts.neurons
    if trained:
        routed += shape.width + experts.neurons
    shared = 4 * experts.shared + shape.width + 1 if experts.shared else 0
    router = 4 * experts.count + 4 + (36 + wide) * experts.per_token
    return wide * (experts.per_token * routed + shared) + router


def layer_activations(shape: Shape, dtype: str, *, trained: bool = True) -> int:
    """Return the bytes that a layer with attention stores of a token for the backward pass, without recompute.

    Attention stores queries, keys, values, its output, and the float32 logarithm of each head's sum; where a
    gate multiplies the output, the gate and the product too. Normalised heads are stored as they were before.
    """
    wide = WIDTH[dtype]
    queries, keys = shape.queries, shape.keys
    attention = wide * (2 * queries + 2 * keys) + 4 * (queries // shape.head)
    if shape.normed_heads:
        attention += (_norm(shape, wide) - wide) * (queries + keys)
    if shape.gated:
        attention += 2 * wide * queries
        if (
            dtype == "float32"
        ):  # where queries need no copy to be normalised, their gates stay beside them
            attention += wide * queries
    return _around(shape, dtype, trained=trained) + attention


def recurrence_activations(shape: Shape, dtype: str, *, trained: bool = True) -> int:
    """Return the bytes that a DeltaNet layer stores of a token for the backward pass, without recompute.

    The convolution stores its input and its output. The rule is another one for each dtype
    (dart_cli/policy/delta_net.py). In bfloat16 it is flash-linear-attention's kernel, which stores queries,
    keys, values and a matrix of each chunk, and computes the states again. In float32 it is transformers', which
    stores each step of a chunk, and the state after it. The gated norm computes in float32.
    """
    wide, delta = WIDTH[dtype], shape.delta
    if delta is None:
        return 0
    heads, keys, values = delta.heads, delta.heads * delta.key_head, delta.values
    if dtype == "float32":
        states = keys * delta.value_head // RULE_CHUNK
        rule = 4 * (12 * keys + 3 * values + 5 * RULE_CHUNK * heads + states) + 40 * heads
    else:
        rule = wide * (2 * keys + values + RULE_CHUNK * heads) + 28 * heads
    convolution, norm = 2 * wide * delta.mixed, 3 * (4 + wide) * values
    return _around(shape, dtype, trained=trained) + convolution + rule + norm


def _around(shape: Shape, dtype: str, *, trained: bool) -> int:
    """Return the bytes that a layer stores of a token beside its attention: two norms and the MLP.

    The MLP stores gate, its activation, up, and their product.
    """
    wide = WIDTH[dtype]
    mlp = 4 * wide * shape.mlp
    if shape.experts is not None:
        mlp = mixture_activations(shape, dtype, trained=trained)
    return 2 * _norm(shape, wide) * shape.width + mlp


def _norm(shape: Shape, wide: int) -> int:
    """Return the bytes that a norm stores for each number: in float32, normalised, and scaled.

    Qwen3.5 scales in float32, the other classes in the model's dtype.
    """
    return 8 + wide if shape.gated else 4 + 2 * wide


def _layers(shape: Shape, setup: TrainerSetup, count: int) -> int:
    """Return the bytes that the first `count` layers store of a token, without recompute.

    With adapters, experts are not trained.
    """
    recurrences = sum(place < count for place in shape.delta.places) if shape.delta else 0
    trained = not setup.adapters
    one = layer_activations(shape, setup.dtype, trained=trained)
    recurrence = recurrence_activations(shape, setup.dtype, trained=trained)
    return (count - recurrences) * one + recurrences * recurrence


def block_activations(shape: Shape, dtype: str) -> int:
    """Return the bytes that a block of the vision tower stores of a patch, without recompute.

    It has two norms (Qwen2.5's are like the language model's), attention with joint queries, keys and values,
    and an MLP of two matrices, or of three.
    """
    wide = WIDTH[dtype]
    of_width = {"qwen2_5_vl": 2 * (4 + 2 * wide) + 7 * wide}.get(shape.kind, 11 * wide)
    of_mlp = {"qwen2_vl": 3, "qwen2_5_vl": 4}.get(shape.kind, 2) * wide
    return of_width * shape.vision_width + of_mlp * shape.vision_mlp


def trainer_memory(
    shape: Shape, setup: TrainerSetup, *, whole_gradients: int = WHOLE_GRADIENTS_BYTES
) -> TrainerMemory:
    """Return the memory of a rank in the phase of an update that needs most.

    Gradients of up to `whole_gradients` bytes in all are whole on each rank.
    """
    phases: dict[UpdatePhase, dict[str, int]] = {
        "head": _at_head(shape, setup),
        "norm": _at_norm(shape, setup),
        "last": _at_layer(shape, setup, shape.layers),
        "next": _at_layer(shape, setup, max(1, shape.layers - 1)),
        "first": _at_layer(shape, setup, 1),
        "end": _at_end(shape, setup),
    }
    if not setup.freeze_vision and not setup.adapters:
        phases |= _with_tower(shape, setup, phases)
    if setup.is_taught or setup.teacher is not None:
        phases = _with_taught(shape, setup, phases)
    if setup.teacher is not None:
        phases["teacher"] = _at_teacher(setup.teacher, setup)
    if setup.points and _gathers(setup):
        phases = {name: _with_pointer(shape, setup, parts) for name, parts in phases.items()}
    highest = max(phases, key=lambda name: sum(phases[name].values()))
    trained = trained_parameters(shape, setup)
    host = 0
    if setup.offload:
        host = -(-(MASTER + GRADIENT + MOMENTS) * trained // setup.ranks)
    return TrainerMemory(_permanent(shape, setup, whole_gradients), phases[highest], highest, host)


def _with_pointer(shape: Shape, setup: TrainerSetup, phase: dict[str, int]) -> dict[str, int]:
    """Add the pointer head and its gradient to a phase: they are gathered with the root in all of them."""
    size = WIDTH[setup.dtype] * shape.pointer
    return phase | {name: phase.get(name, 0) + size for name in ("gathered", "head")}


def _permanent(shape: Shape, setup: TrainerSetup, whole_gradients: int) -> dict[str, int]:
    """Return the parts that are allocated during the whole run."""
    wide, trained = WIDTH[setup.dtype], trained_parameters(shape, setup)
    # With LoRA the whole model is frozen.
    frozen = shape.parameters - (0 if setup.adapters else trained)
    if setup.adapters and shape.experts is not None:  # experts under adapters are shards
        stacked = shape.layers * shape.experts.stacked
        frozen -= stacked - -(-stacked // setup.ranks)
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
        "teacher": wide * -(-setup.teacher.parameters // setup.ranks) if setup.teacher else 0,
    }


def _at_teacher(teacher: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Return the parts of a frozen model's forward pass: two gathered layers, the head, and one layer's numbers.

    Its shards are gathered also where adapters are trained, since it is sharded as a model of its own.
    """
    wide = WIDTH[setup.dtype]
    layers = sorted(map(teacher.parameters_of, range(teacher.layers)))[-2:]
    return {
        "activations": setup.tokens
        * (
            wide * (4 * teacher.width + 3 * teacher.mlp + teacher.routed)
            + _positions(teacher, wide)
        ),
        "features": _features(teacher, setup, wide),
        "gathered": wide * (2 * teacher.embedding + sum(layers)) if setup.sharded else 0,
    }


def _with_taught(
    shape: Shape, setup: TrainerSetup, phases: Mapping[UpdatePhase, dict[str, int]]
) -> dict[UpdatePhase, dict[str, int]]:
    """Return all phases with what the policy's pass compares itself with: a teacher's states and its head.

    Beside the policy's logits of a block, the head's phase has the teacher's, once more with their exponents.
    """
    wide, teacher = WIDTH[setup.dtype], setup.teacher or shape
    states = wide * setup.predicted * teacher.width
    is_apart = setup.teacher is not None or not setup.adapters
    head = wide * teacher.embedding if is_apart and setup.sharded else 0
    with_taught: dict[UpdatePhase, dict[str, int]] = {
        name: {**parts, "taught": states + head} for name, parts in phases.items()
    }
    block = min(CHUNK_TOKENS, setup.predicted) * min(VOCABULARY_CHUNK, shape.vocabulary)
    with_taught["head"]["taught"] += 8 * block
    return with_taught


def _at_head(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Return the parts after the forward pass, with the distributions of a chunk and the head's gradient."""
    wide = WIDTH[setup.dtype]
    last_norm, last = _norm(shape, wide) * shape.width, shape.parameters_of(shape.layers - 1)
    gathered = wide * (shape.embedding + last) if _gathers(setup) else 0
    return {
        "activations": setup.tokens
        * (_stored(shape, setup, shape.layers) + last_norm + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": gathered + _frozen_experts(shape, setup, 1),
        "head": _scoring(shape, setup, wide),
    }


def _scoring(shape: Shape, setup: TrainerSetup, wide: int) -> int:
    """Return the bytes of a chunk's distributions and their gradients, computed in blocks of the vocabulary.

    The forward pass has a block's logits and probabilities; the backward pass its slopes, once more in
    float32, and the gradient of the head's weight.
    """
    ids = min(VOCABULARY_CHUNK, shape.vocabulary)
    block, rows = min(CHUNK_TOKENS, setup.predicted) * ids, ids * shape.width
    of_hidden = 4 * setup.predicted * shape.width
    if setup.adapters:
        return max(8 * block, of_hidden + (4 + wide) * block)
    both = max(4 * rows + (4 + wide) * block, (4 + wide) * rows + wide * block)
    if ids < shape.vocabulary:
        # The next block's gradient is computed before the last one's is freed.
        both = max(both, 8 * rows)
    return max(8 * block, of_hidden + wide * shape.embedding + both)


def _at_norm(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Return the parts in the last norm's backward pass: its input and five more float32 tensors."""
    wide = WIDTH[setup.dtype]
    norm, last = 6 * 4 * shape.width, shape.parameters_of(shape.layers - 1)
    gathers = _gathers(setup)
    return {
        "activations": setup.tokens
        * (_stored(shape, setup, shape.layers) + norm + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": wide * (shape.embedding + last)
        if gathers
        else _frozen_experts(shape, setup, 1),
        "head": wide * shape.embedding if gathers else 0,
    }


def _at_layer(shape: Shape, setup: TrainerSetup, index: int) -> dict[str, int]:
    """Return the parts in the backward pass of layer `index`, counted from 1.

    Three of the four numbers that its MLP stores have gradients. The unit before the layer is gathered
    already, and the gradients of the layer after it are being reduced.
    """
    wide = WIDTH[setup.dtype]
    one = _layers(shape, setup, index) - _layers(shape, setup, index - 1)
    others = _stored(shape, setup, index if setup.recompute else index - 1)
    backward = 2 * wide * shape.mlp + 2 * wide * shape.width
    if shape.experts is not None:
        backward = 2 * wide * shape.experts.per_token * shape.width
    own = shape.parameters_of(index - 1)
    before = 0 if shape.tied else shape.embedding
    if index > 1:
        before = shape.parameters_of(index - 2)
    reduced = 4 * shape.parameters_of(index) if index < shape.layers else 0
    gathers = _gathers(setup)
    return {
        "activations": setup.tokens * (others + one + backward + _positions(shape, wide)),
        "features": _features(shape, setup, wide),
        "gathered": wide * (shape.embedding + own + before)
        if gathers
        else _frozen_experts(shape, setup, 2),
        "head": wide * shape.embedding if gathers else 0,
        "reduced": reduced if gathers else 0,
    }


def _at_end(shape: Shape, setup: TrainerSetup) -> dict[str, int]:
    """Return the parts at the end of the backward pass.

    The embedding's gradient becomes float32, then a shard of the sum. The head and its gradient, in
    `model.dtype`, are allocated as well; if head and embedding are tied, they are the same.
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
    shape: Shape, setup: TrainerSetup, phases: Mapping[UpdatePhase, dict[str, int]]
) -> dict[UpdatePhase, dict[str, int]]:
    """Return all phases with a trained tower's activations, and its last block's backward pass as a phase.

    All tokens of the pack are assumed to be image tokens, since most of them are.
    """
    wide, patches = WIDTH[setup.dtype], setup.tokens * shape.merge
    one = block_activations(shape, setup.dtype)
    per_patch = wide * shape.vision_width if setup.recompute else one
    activations = patches * shape.vision_blocks * per_patch
    with_tower: dict[UpdatePhase, dict[str, int]] = {
        name: {**parts, "tower": activations} for name, parts in phases.items() if name != "end"
    }
    backward = one + 3 * wide * shape.vision_mlp if setup.recompute else 3 * wide * shape.vision_mlp
    with_tower["tower"] = {
        **phases["end"],  # the gathered head and its gradient
        "reduced": 4 * shape.vision_block if _gathers(setup) else 0,
        "tower": activations + patches * backward,
    }
    return with_tower


def _gathers(setup: TrainerSetup) -> bool:
    """Return True if weights are gathered from shards. With LoRA each rank has the whole frozen model."""
    return setup.sharded and not setup.adapters


def _frozen_experts(shape: Shape, setup: TrainerSetup, layers: int) -> int:
    """Return the bytes of the experts under adapters of `layers` layers, gathered from shards; 0 of any other model.

    Which of two layers are gathered at a time depends on the kernels; two are the most.
    """
    if not setup.adapters or shape.experts is None or setup.ranks == 1:
        return 0
    return layers * WIDTH[setup.dtype] * shape.experts.stacked


def _stored(shape: Shape, setup: TrainerSetup, count: int) -> int:
    """Return the bytes that the first `count` layers keep of a token; with recompute only their inputs."""
    if setup.recompute:
        return count * WIDTH[setup.dtype] * shape.width
    return _layers(shape, setup, count)


def _positions(shape: Shape, wide: int) -> int:
    """Return the bytes of a token's cosines and sines."""
    return 2 * wide * shape.head


def _features(shape: Shape, setup: TrainerSetup, wide: int) -> int:
    """Return the bytes of token ids, positions and image features, if all tokens are image tokens."""
    return setup.tokens * (4 * 8 + wide * shape.width * (1 + shape.deepstack))

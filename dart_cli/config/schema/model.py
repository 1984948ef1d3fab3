"""The model and what it sees and writes: [model], [model.lora], [policy]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import MANY, MOST_PIXELS, Section, one_of, without_control

CODECS = (
    *("compact", "uitars"),
    *("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-xml"),
    *("pyautogui", "scalecua", "glm"),
)

Pointing = Literal["text", "pointer"]

CODEC_PARTS = ("limits", "parse", "format", "as_history")
"""What an action language has; see dart_cli/policy/codec.py."""

POINT_PARTS = ("write_point", "find_points")
"""What one has beside them for `pointing` "pointer"."""


class LoraConfig(Section):
    """Adapters of low rank, trained in place of the weights: docs/tune.md."""

    rank: int = Field(default=32, ge=1, le=512)
    """Columns of an adapter: a layer of I inputs and O outputs trains `rank` x (I + O) numbers."""

    alpha: float = Field(default=64.0, gt=0, le=MANY)
    """What the adapters add is multiplied by alpha / rank."""

    targets: list[str] = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    """Linear layers of the language model that get adapters, by their names in each layer."""

    vision: bool = False
    """Adapters for all linear layers of the vision tower, too; else it is not trained."""


class ModelConfig(Section):
    """The policy network."""

    path: Annotated[str, AfterValidator(without_control)] = "builtin:tiny"
    """A Hugging Face folder (Qwen2-VL, Qwen2.5-VL / UI-TARS, Qwen3-VL), or one that ships with dart:
    `builtin:tiny` for the embedded suites, `builtin:miniwob`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating point type of weights and activations."""

    freeze_vision: bool = False
    """Do not train the vision tower."""

    lora: LoraConfig | None = None
    """Train adapters of low rank (LoRA) and leave the weights as they are."""

    adapters: Annotated[str, AfterValidator(without_control)] = ""
    """A folder of adapters that those of [model.lora] begin with, as `dart export`, `dart tune` and peft
    write it: one application's adapters, and then another's, on the same model."""


class PolicyConfig(Section):
    """How screens become prompts and text becomes actions."""

    family: Annotated[str, AfterValidator(without_control)] = "none"
    """The family of models whose codec, numbers, history and prompt are used where this file does not set
    them: a name of docs/families.md; `auto`, as the folder of `model.path` shows; `none`, the defaults below."""

    codec: Annotated[str, one_of(CODECS, "file.py:MyCodec")] = "compact"
    """The model's action language: `compact` (tiny model), `uitars` (UI-TARS text), the `toolcall` codecs
    (calls of Qwen's computer_use and mobile_use), `pyautogui`, `scalecua`, `glm`, or your own as `package.module:Codec` or `file.py:Codec`
    (docs/policy.md). Which model writes which: docs/families.md."""

    coordinates: Literal["thousandths", "thousand", "resized", "unit"] = "thousandths"
    """Numbers in actions: `thousandths`, 0-999 of each side; `thousand`, 0-1000 (Qwen2-VL, Qwen3-VL);
    `resized`, pixels of the smart-resized screenshot (Qwen2.5-VL, UI-TARS-1.5); `unit`, 0 to 1."""

    pointing: Pointing = "text"
    """How the model names a place: `text`, by numbers; `pointer`, by a patch of the screenshot that the
    pointer head of its folder draws (docs/pointing.md)."""

    verifier: Annotated[str, AfterValidator(without_control)] = ""
    """`pointer`: a model folder of `dart tune` on a verifier's rows; it chooses among the candidates of a
    greedy pointer, as `dart eval` plays them. Sampled actions, which are trained on, are left as they are."""

    verifier_threshold: float = Field(default=0.8, ge=0, le=1)
    """The first candidate that the verifier is so sure of is clicked, else the best one."""

    resize_factor: int = Field(default=28, ge=1, le=4096)
    """`resized`: what both sides become multiples of, the model's patch size times its merge size."""

    resize_min_pixels: int = Field(default=100 * 28 * 28, ge=1, le=MOST_PIXELS)
    """`resized`: fewest pixels of a resized screenshot, as in the model's preprocessor_config.json."""

    resize_max_pixels: int = Field(default=16384 * 28 * 28, ge=1, le=MOST_PIXELS)
    """`resized`: most pixels of a resized screenshot, likewise."""

    history: Literal["slide", "evict"] = "slide"
    """Which past screenshots a prompt keeps: `slide`, always the newest `history_images`; `evict`, all
    until there would be more than `history_images_most`, then the newest `history_images` alone, so
    that between two evictions each prompt extends the one before (docs/policy.md)."""

    history_images: int = Field(default=1, ge=1, le=32)
    """Screenshots in a prompt, the current one included; with `evict`, after an eviction."""

    history_images_most: int = Field(default=0, ge=0, le=256)
    """`evict`: most screenshots in a prompt, the current one included."""

    history_turns: int = Field(default=0, ge=0, le=1000)
    """Past turns whose text stays in the prompt; with `evict`, after an eviction."""

    history_texts: int = Field(default=1, ge=1, le=32)
    """Screens whose texts (`env.observe`) are in a prompt, the current one included; with `evict`, after
    an eviction."""

    system_prompt: str = ""
    """Put first in every prompt; empty for none."""

    template: str = "{instruction}"
    """Text around the task's instruction, e.g. the actions that a model may write."""

    previous_line: str = "Step {step}: {action}\n"
    """Where `template` has {previous}: one line for each step whose turn is no longer in the prompt, with its
    number and what its completion says of its action. The newline that ends the last is left out."""

    previous_none: str = "None"
    """What is in the place of {previous} while there is no such step."""

    part_order: Literal["auto", "separate", "instruction_first", "image_first"] = "auto"
    """Where the instruction is: in a user message of its own before the first screen's (UI-TARS), or in
    one message with that screen, before its image (Qwen) or after it (the tiny models). `auto`: by
    `codec`; `image_first` for `compact` as long as every turn in the prompt has its screenshot."""

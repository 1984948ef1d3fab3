"""The model and what it sees and writes: [model], [model.lora], [policy]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import MANY, Section, one_of, without_control

ACTION_PARSERS = (
    *("compact", "uitars"),
    *("toolcall", "toolcall-mobile", "toolcall-mai", "toolcall-xml"),
    *("pyautogui", "scalecua", "glm"),
)

Pointing = Literal["text", "pointer"]

ACTION_PARSER_PARTS = ("limits", "parse", "format", "as_history")
"""What an action language has; see dart_cli/language/parsers/base.py."""

POINT_PARTS = ("write_point", "find_points")
"""What one has beside them for `pointing` "pointer"."""


class LoraConfig(Section):
    """Adapters of low rank on the language model's linear layers, trained in place of the weights: docs/tune.md."""

    rank: int = Field(default=32, ge=1, le=512)
    """Columns of an adapter: a layer of I inputs and O outputs trains `rank` x (I + O) numbers."""

    alpha: float = Field(default=64.0, gt=0, le=MANY)
    """What the adapters add is multiplied by alpha / rank."""


class ModelConfig(Section):
    """The policy network."""

    path: Annotated[str, AfterValidator(without_control)] = "builtin:tiny"
    """A Hugging Face folder (Qwen2-VL, Qwen2.5-VL / UI-TARS, Qwen3-VL), or one that ships with dart:
    `builtin:tiny` for the embedded suites, `builtin:small`, which reads."""

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
    """The family of models whose action parser, numbers, history and prompt are used where this file does not set
    them: a name of docs/families.md; `auto`, as the folder of `model.path` shows; `none`, the defaults below."""

    action_parser: Annotated[str, one_of(ACTION_PARSERS, "file.py:MyParser")] = "compact"
    """The model's action language: `compact` (tiny model), `uitars` (UI-TARS text), the `toolcall` action parsers
    (calls of Qwen's computer_use and mobile_use), `pyautogui`, `scalecua`, `glm`, or your own as `package.module:ActionParser` or `file.py:ActionParser`
    (docs/policy.md). Which model writes which: docs/families.md."""

    coordinates: Literal["thousandths", "thousand", "resized", "unit"] = "thousandths"
    """Numbers in actions: `thousandths`, 0-999 of each side; `thousand`, 0-1000 (Qwen2-VL, Qwen3-VL);
    `resized`, pixels of the screenshot as the preprocessor of the model's folder resizes it (Qwen2.5-VL,
    UI-TARS-1.5): the folder's preprocessor_config.json must be on every host that plays; `unit`, 0 to 1."""

    pointing: Pointing = "text"
    """How the model names a place: `text`, by numbers; `pointer`, by a patch of the screenshot that the
    pointer head of its folder draws (docs/pointing.md)."""

    verifier: Annotated[str, AfterValidator(without_control)] = ""
    """`pointer`: a model folder of `dart tune` on a verifier's rows; it chooses among the candidates of a
    greedy pointer, the first that it gives 0.8 or else the best, as `dart eval` plays them. Sampled actions, which are trained on, are left as they are."""

    history_images: int = Field(default=1, ge=1, le=32)
    """Screenshots in a prompt, the current one included; the newest ones."""

    history_images_most: int = Field(default=0, ge=0, le=256)
    """Instead of dropping a screenshot at each step, keep all until there would be more than this many, then
    the newest `history_images` alone, so that between two evictions each prompt extends the one before
    (docs/policy.md); 0 for always the newest `history_images`."""

    history_turns: int = Field(default=0, ge=0, le=1000)
    """Past turns whose text stays in the prompt; with `history_images_most`, after an eviction."""

    history_texts: int = Field(default=1, ge=1, le=32)
    """Screens whose texts (`env.observe`) are in a prompt, the current one included; with
    `history_images_most`, after an eviction."""

    system_prompt: str = ""
    """Put first in every prompt; empty for none."""

    template: str = "{instruction}"
    """Text around the task's {instruction}, e.g. the actions that a model may write. {previous} stands for the
    steps whose turns are no longer in the prompt, each told in a line as the family has it."""

    part_order: Literal["auto", "separate", "instruction_first", "image_first"] = "auto"
    """Where the instruction is: in a user message of its own before the first screen's (UI-TARS), or in
    one message with that screen, before its image (Qwen) or after it (the tiny models). `auto`: by
    `action_parser`; `image_first` for `compact` as long as every turn in the prompt has its screenshot."""

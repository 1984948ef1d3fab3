"""The model, and what it sees and writes: sections [model], [model.lora], [policy]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import MANY, Section, iso_date, one_of, without_control

ACTION_PARSERS = (
    "compact",
    "uitars",
    "toolcall",
    "toolcall-mobile",
    "toolcall-mai",
    "toolcall-fara",
    "toolcall-xml",
    "pyautogui",
    "scalecua",
    "glm",
    "venus",
    "venus-web",
    "venus-mobile",
    "holo",
)

Pointing = Literal["text", "pointer"]

ACTION_PARSER_PARTS = ("limits", "parse", "format", "as_history")
"""Attributes that every action parser has; see dart_cli/language/parsers/base.py."""

POINT_PARTS = ("write_point", "find_points")
"""Attributes that `policy.pointing` = "pointer" needs beside them."""


SPLIT_PARTS = ("split", "join")
"""Attributes that `policy.max_actions` above 1 needs beside them."""

SPLIT_PARSERS = tuple(
    name for name in ACTION_PARSERS if name not in ("glm", "venus-web", "venus-mobile", "holo")
)
"""The action parsers whose languages have completions of several actions."""

MOST_ACTIONS = 32
"""Most actions of one completion: as many as UI-Venus-2's Sequence has, the longest that a family documents."""


class LoraConfig(Section):
    """Adapters of low rank (LoRA), trained in place of the language model's weights (docs/tune.md)."""

    rank: int = Field(default=32, ge=1, le=512)
    """Rank of an adapter. A layer of I inputs and O outputs trains `rank` x (I + O) numbers."""

    alpha: float = Field(default=64.0, gt=0, le=MANY)
    """Scale of the adapters: what they add is multiplied by alpha / rank."""


class ModelConfig(Section):
    """The policy network."""

    path: Annotated[str, AfterValidator(without_control)] = "builtin:tiny"
    """A Hugging Face folder (Qwen2-VL, Qwen2.5-VL / UI-TARS, Qwen3-VL), or a model that ships with dart:
    `builtin:tiny` for the embedded suites, or `builtin:small`, which can read."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating point type of weights and activations."""

    freeze_vision: bool = False
    """Whether the vision tower stays as it is, and only the rest is trained."""

    lora: LoraConfig | None = None
    """Trains adapters of low rank (LoRA), and leaves the weights as they are."""

    adapters: Annotated[str, AfterValidator(without_control)] = ""
    """A folder of adapters, written by `dart export`, `dart tune` or peft, with which the adapters of
    [model.lora] begin. One can train them on one application and then on another, over the same model."""


class PolicyConfig(Section):
    """How screens become prompts and text becomes actions."""

    family: Annotated[str, AfterValidator(without_control)] = "none"
    """The family of models whose action parser, coordinates, history and prompt are used where this file does
    not set them: a name from docs/families.md, `auto` to recognise it from the folder of `model.path`, or
    `none` for the defaults below."""

    action_parser: Annotated[str, one_of(ACTION_PARSERS, "file.py:MyParser")] = "compact"
    """The model's action language: `compact` (the tiny models), `uitars` (UI-TARS text), the `toolcall`
    action parsers (calls of Qwen's computer_use and mobile_use), `pyautogui`, `scalecua`, `glm`, `venus`,
    `venus-web`, `venus-mobile`, `holo`, or your own as `package.module:ActionParser` or `file.py:ActionParser`
    (docs/policy.md). docs/families.md lists which model writes which."""

    max_actions: int = Field(default=1, ge=1, le=MOST_ACTIONS)
    """Most actions of a completion, which are performed one after another before the next screenshot
    (docs/policy.md). With more than 1, `policy.template` should tell the model how it writes several."""

    coordinates: Literal["thousandths", "thousand", "resized", "unit"] = "thousandths"
    """Unit of the coordinates in actions: `thousandths`, 0-999 of each side; `thousand`, 0-1000 (Qwen2-VL,
    Qwen3-VL); `unit`, 0 to 1; `resized`, pixels of the screenshot as the preprocessor of the model's folder
    resizes it (Qwen2.5-VL, UI-TARS-1.5). `resized` needs the folder's preprocessor_config.json on every host
    that plays."""

    pointing: Pointing = "text"
    """How the model names a place: `text`, by numbers; `pointer`, by a patch of the screenshot, which a
    pointer head chooses (docs/pointing.md)."""

    verifier: Annotated[str, AfterValidator(without_control)] = ""
    """With `pointing` = "pointer": the folder of a verifier, which `dart tune` trained on a verifier's rows.
    Where a greedy action points, as `dart eval` plays it, the verifier takes the first candidate to which it
    gives 0.8 or more, or else the best one. Sampled actions, which are trained on, are not changed."""

    history_images: int = Field(default=1, ge=1, le=32)
    """Number of screenshots in a prompt: the newest ones, the current one included."""

    history_images_most: int = Field(default=0, ge=0, le=256)
    """Keeps all screenshots until there would be more than this many, and then evicts all but the newest
    `history_images`. Between two evictions each prompt extends the one before, which saves computation
    (docs/policy.md). 0 always shows the newest `history_images`."""

    history_turns: int = Field(default=0, ge=0, le=1000)
    """Number of past turns whose text stays in the prompt; with `history_images_most`, after an eviction."""

    system_prompt: str = ""
    """System message at the start of every prompt; empty for none. {date} stands for `date`, {instruction}
    for the task."""

    template: str = "{instruction}"
    """Text around the task's {instruction}, e.g. a list of the actions that the model may write. {previous}
    stands for the steps whose turns are no longer in the prompt, one line each, in the form of the family,
    and {date} for `date`."""

    date: Annotated[str, AfterValidator(iso_date)] = "2026-01-01"
    """The date, as YYYY-MM-DD, that a prompt with {date} tells. It does not follow the clock, so that runs
    repeat; set the date of your environments' clock where tasks depend on it."""

    thinking: Literal["auto", "on", "off"] = "auto"
    """Whether the chat template lets the model write a thought before its reply (`enable_thinking` of Qwen's
    and GLM's templates): `auto` leaves it to the template."""

    reasoning_effort: Literal["", "low", "medium", "high", "xhigh"] = ""
    """How long thoughts are, as the chat template tells the model (Qwen3.8: low, medium or xhigh); empty leaves
    it to the template."""

    part_order: Literal["auto", "separate", "instruction_first", "image_first"] = "auto"
    """Where the instruction stands. `separate`: in a separate user message, before the first screen
    (UI-TARS). `instruction_first`: in one message with the first screen, before its image (Qwen).
    `image_first`: after its image (the tiny models). `auto`: as `action_parser` needs it; for `compact` this is `image_first` as
    long as every turn in the prompt has its screenshot."""

"""Families of models: how each is prompted, what it writes, and how a model folder shows its family.

    Family         one family: action parser, coordinates, history, prompt, and how its folders are recognised
    FAMILIES       all families, by `policy.family`
    VALUES         the keys of [policy] that a family sets
    values_of      the values of these keys for a family, each with its origin
    with_family    fills in these keys of a configuration where the user did not set them
    origins        the value of each of these keys in a configuration, and where it comes from
    recognise      the family of a model folder, and why

Prompts are in dart_cli/language/prompts (NAME.system.txt, NAME.template.txt), word for word as the models
were trained on them. Everything else is in families.toml. docs/families.md has the table with what was
checked.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bus.error_texts import did_you_mean
from bus.errors import ConfigError, ModelError
from dart_cli.config.architecture import MODEL_TYPES
from dart_cli.config.model_folder import Screens, class_problem, folder_of, read_config, screens
from dart_cli.config.schema import Config

FAMILY_KEY = "policy.family"
"""The key that names the family."""
AUTO, NONE = "auto", "none"

PROMPTS = Path(__file__).parents[1] / "language" / "prompts"

_OWN_TYPES = ("glm4v_moe",)
"""Model types that belong to one family alone. A Qwen2-VL, for example, may belong to several families or to
none."""
_CARD = "README.md"
_CARD_LENGTH = 20_000  # characters of a model card that are read
_NAME_IN_CONFIG = "the name in its config.json"
_LONG = 80  # characters; a longer value is shortened in a message


@dataclass(frozen=True)
class Family:
    """One family of models."""

    title: str  # names of its checkpoints
    model_types: tuple[str, ...]
    name_pattern: str  # matches its checkpoints' names; "" where a folder cannot show the family
    action_parser: str
    coordinates: str
    history_images: int
    history_turns: int
    part_order: str
    source: str  # of prompt, history and calls
    licence: str
    prompt: str = ""  # name of its files in PROMPTS; "" for the name of the family
    system: str = ""  # name of the file of the system message, where it is another
    previous_line: str = "Step {step}: {action}\n"
    previous_none: str = "None"
    thought: str = "kept"  # what becomes of thoughts in the history
    history_images_most: int = 0
    thinking: str = "auto"
    later_screen: str = "{screen}"  # around a screen that is not in the message of the instruction
    past_screen: str = ""  # around such a screen of a past turn, where that differs
    dropped_screen: str | None = None  # the message in its place; None for no message
    bounds: Screens | None = None  # sizes of a preprocessor that only its folders have
    note: str = ""

    @property
    def is_loaded(self) -> bool:
        """Whether dart loads models of this family. Otherwise it only has their action parser and prompt."""
        return any(kind in MODEL_TYPES for kind in self.model_types)


def _families() -> Mapping[str, Family]:
    """Return the families of families.toml, by name."""
    tree = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
    for fields in tree.values():
        fields["model_types"] = tuple(fields["model_types"])
        if "bounds" in fields:
            fields["bounds"] = Screens(*fields["bounds"])
    return {name: Family(**fields) for name, fields in tree.items()}


FAMILIES: Mapping[str, Family] = _families()
"""The families of families.toml, by name."""

VALUES = (
    "action_parser",
    "coordinates",
    "history_images",
    "history_images_most",
    "history_turns",
    "system_prompt",
    "template",
    "part_order",
    "thinking",
)
"""Keys of [policy] that a family sets."""


class Recognised(NamedTuple):
    """The name of a folder's family, and what shows it."""

    name: str
    why: str


def values_of(name: str) -> dict[str, tuple[Any, str]]:
    """Return the value and the origin of each key that a family of FAMILIES sets."""
    family, origin = FAMILIES[name], f"family {name}"
    values: dict[str, tuple[Any, str]] = {}
    for key in VALUES:
        if key not in ("system_prompt", "template"):
            values[key] = getattr(family, key), origin
    for key, file in (
        ("system_prompt", f"{family.system or family.prompt or name}.system.txt"),
        ("template", f"{family.prompt or name}.template.txt"),
    ):
        values[key] = _prompt(file), f"{origin}: prompts/{file}"
    return values


def _prompt(file: str) -> str:
    """Return the text of a file in PROMPTS; for a missing template, the instruction alone."""
    path = PROMPTS / file
    without = "{instruction}" if file.endswith(".template.txt") else ""
    return path.read_bytes().decode() if path.is_file() else without


def recognise(folder: Path) -> Recognised:
    """Return the family of a model folder. Raises ConfigError where the folder fits no family, or several."""
    try:
        config = read_config(folder)
    except ModelError as fault:
        fix = "" if folder.is_dir() else "; name the family"
        raise ConfigError(f'= "auto" reads the folder of model.path: {fault}{fix}') from None
    kind = str(config.get("model_type"))
    possible = {name: family for name, family in FAMILIES.items() if kind in family.model_types}
    if not possible:
        raise ConfigError(
            f'= "auto" reads the folder of model.path: {class_problem(folder, config)}'
        )
    candidates = {name: family for name, family in possible.items() if family.name_pattern}
    if len(candidates) == 1 and kind in _OWN_TYPES:
        [name] = candidates
        return Recognised(name, f"the only family of model_type {kind}")
    sizes = _screens(folder)
    by_bounds = [name for name, family in candidates.items() if sizes and family.bounds == sizes]
    if len(by_bounds) == 1:
        return Recognised(
            by_bounds[0],
            f"its preprocessor's bounds of {sizes[1]} to {sizes[2]} pixels" if sizes else "",
        )
    for where, text in _texts(folder, config):
        matches = [
            name
            for name, family in candidates.items()
            if re.search(family.name_pattern, text, re.IGNORECASE)
        ]
        # A checkpoint that was tuned from a Qwen model may name both, and in its config.json only its base.
        tuned = [name for name in matches if not name.startswith("qwen")]
        if not tuned and where != _NAME_IN_CONFIG:
            tuned = matches
        if len(tuned) == 1:
            return Recognised(tuned[0], f"model_type {kind}, {where}")
    raise ConfigError(
        f'= "auto": {folder} may be of {", ".join(candidates)}, all of model_type {kind}, and neither its '
        "preprocessor, its README.md nor its name shows which; name the family"
    )


def _screens(folder: Path) -> Screens | None:
    """Return the sizes of the folder's preprocessor; None if they cannot be read."""
    try:
        return screens(folder)
    except ModelError:
        return None


def _texts(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (place, text) pairs that may contain the checkpoint's name, the most reliable first."""
    try:
        card = (folder / _CARD).read_text(encoding="utf-8", errors="replace")[:_CARD_LENGTH]
    except OSError:
        card = ""
    title = re.search(r"^# +(.+)$", card, re.MULTILINE)
    return [
        ("the title of its README.md", title[1] if title else ""),
        (_NAME_IN_CONFIG, str(config.get("_name_or_path", ""))),
        ("its folder's name alone", folder.resolve().name),
    ]


class Origin(NamedTuple):
    """A key of [policy] that a family may set, with its value and where that comes from."""

    key: str  # without its section
    value: Any
    origin: str


def with_family(config: Config) -> Config:
    """Return `config` with the values of its family, and with the family's name in place of `auto`.

    Keys that the user set are kept. Raises ConfigError for an unknown family, and for a folder that shows
    none; its message is worded to follow the key's name.
    """
    policy = config.policy
    name = policy.family
    set_by_user = policy.model_fields_set
    if name == NONE or set_by_user.issuperset(VALUES):
        return config
    folder = folder_of(config)
    if folder is None:
        if name == AUTO:
            return config
        raise ConfigError(
            f'= "{name}" is for folders, not for model.path = "{config.model.path}"; set "none"'
        )
    if name == AUTO:
        name = recognise(folder).name
    elif name not in FAMILIES:
        names = (AUTO, NONE, *FAMILIES)
        hint = did_you_mean(name, names)
        raise ConfigError(f"must be one of {', '.join(names)}, got {name[:40]!r}{hint}")
    values = {key: value for key, (value, _) in values_of(name).items() if key not in set_by_user}
    filled = policy.model_copy(update={**values, "family": name})
    object.__setattr__(filled, "__pydantic_fields_set__", set(set_by_user))
    return config.model_copy(update={"policy": filled})


def origins(config: Config) -> list[Origin]:
    """Return the value and the origin of each key of [policy] that a family may set."""
    policy = config.policy
    family_values: dict[str, tuple[Any, str]] = {}
    if policy.family in FAMILIES:
        family_values = values_of(policy.family)
    result = []
    for key in VALUES:
        value = getattr(policy, key)
        if key in policy.model_fields_set:
            origin = "set by you"
        elif key in family_values and family_values[key][0] == value:
            origin = family_values[key][1]
        else:
            origin = "the default"
        result.append(Origin(key, value, origin))
    return result


def origin_line(entry: Origin) -> str:
    """Return `value (origin)`. A long text is shown by its length and its beginning."""
    if isinstance(entry.value, str) and len(entry.value) > _LONG:
        beginning = " ".join(entry.value.split())[: _LONG // 2]
        return f"{len(entry.value)} characters, {beginning!r}... ({entry.origin})"
    return f"{entry.value!r} ({entry.origin})"

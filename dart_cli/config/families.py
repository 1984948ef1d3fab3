"""Families of models: what each is asked, what it writes, and how a model folder shows which it is.

    Family         one family: action parser, coordinates, history, prompt, and the marks of its folders
    FAMILIES       all of them, by `policy.family`
    VALUES         the keys of [policy] that a family sets
    values_of      their values for a family, with what each follows from
    with_family    a configuration with them where the user set none
    origins        each of these keys: its value, and where it comes from; told, as one line
    recognise      the family of a model folder, and why

Prompts stand verbatim in dart_cli/language/prompts, as the models were trained on them: NAME.system.txt,
NAME.template.txt; all else is in families.toml. docs/families.md has the table with what was checked.
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
from dart_cli.config.model_folder import Screens, folder_of, read_json, screens
from dart_cli.config.schema import Config

FAMILY_KEY = "policy.family"
"""What names the family."""
AUTO, NONE = "auto", "none"

PROMPTS = Path(__file__).parents[1] / "language" / "prompts"

_OWN_TYPES = ("qwen3_5", "qwen3_5_moe", "glm4v_moe")
"""Model types that are one family's: a plain Qwen2-VL, for example, is of none."""
_CARD = "README.md"
_CARD_LENGTH = 20_000  # characters of a model card that are read
_MADE_OF = "the name in its config.json"
_LONG = 80  # characters of a value that is shown whole


@dataclass(frozen=True)
class Family:
    """One family."""

    title: str  # the checkpoints
    model_types: tuple[str, ...]
    named: str  # a pattern of the names of its checkpoints; "" for those that no folder shows
    action_parser: str
    coordinates: str
    history_images: int
    history_turns: int
    part_order: str
    source: str  # of prompt, history and calls
    licence: str
    prompt: str = ""  # its files in PROMPTS; "" for those of its own name
    system: str = ""  # another file for the system message
    previous_line: str = "Step {step}: {action}\n"
    previous_none: str = "None"
    thought: str = "kept"  # in the history that prompts show
    bounds: Screens | None = None  # a preprocessor that only its folders have
    note: str = ""

    @property
    def is_loaded(self) -> bool:
        """Whether engine and trainer load its class; else it has an action parser and a prompt alone."""
        return any(each in MODEL_TYPES for each in self.model_types)


def _families() -> Mapping[str, Family]:
    tree = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
    for its in tree.values():
        its["model_types"] = tuple(its["model_types"])
        if "bounds" in its:
            its["bounds"] = Screens(*its["bounds"])
    return {name: Family(**its) for name, its in tree.items()}


FAMILIES: Mapping[str, Family] = _families()
"""As families.toml has them."""

VALUES = (
    *("action_parser", "coordinates", "history_images", "history_turns"),
    *("system_prompt", "template", "part_order"),
)


class Recognised(NamedTuple):
    """The family of a folder, and what shows it."""

    name: str
    why: str


def values_of(name: str) -> dict[str, tuple[Any, str]]:
    """Return the keys that a family of FAMILIES sets: value, and where it comes from."""
    family, origin = FAMILIES[name], f"family {name}"
    found: dict[str, tuple[Any, str]] = {}
    for key in ("action_parser", "coordinates", "history_images", "history_turns", "part_order"):
        found[key] = getattr(family, key), origin
    for key, file in (
        ("system_prompt", f"{family.system or family.prompt or name}.system.txt"),
        ("template", f"{family.prompt or name}.template.txt"),
    ):
        found[key] = _prompt(file), f"{origin}: prompts/{file}"
    return found


def _prompt(file: str) -> str:
    path = PROMPTS / file
    without = "{instruction}" if file.endswith(".template.txt") else ""
    return path.read_bytes().decode() if path.is_file() else without


def recognise(folder: Path) -> Recognised:
    """Return the family of a model folder. Raises ConfigError where it shows none, or several."""
    try:
        config = read_json(folder, "config.json")
    except ModelError as fault:
        raise ConfigError(
            f'= "auto" reads the folder of model.path: {fault}; name the family'
        ) from None
    kind = str(config.get("model_type"))
    possible = {name: each for name, each in FAMILIES.items() if kind in each.model_types}
    if not possible:
        raise ConfigError(
            f'= "auto": no family has model_type {kind[:40]!r} ({folder}/config.json); set "none" and '
            "policy.action_parser, or name one"
        )
    told = {name: each for name, each in possible.items() if each.named}
    if len(told) == 1 and kind in _OWN_TYPES:
        [name] = told
        return Recognised(name, f"the only family of model_type {kind}")
    cut = _screens(folder)
    by_bounds = [name for name, each in told.items() if cut and each.bounds == cut]
    if len(by_bounds) == 1:
        return Recognised(
            by_bounds[0], f"its preprocessor's bounds of {cut[1]} to {cut[2]} pixels" if cut else ""
        )
    for where, text in _texts(folder, config):
        found = [name for name, each in told.items() if re.search(each.named, text, re.IGNORECASE)]
        # A checkpoint that was tuned from Qwen's may name both; and Qwen's may be what it was made of.
        tuned = [name for name in found if not name.startswith("qwen")]
        if not tuned and where != _MADE_OF:
            tuned = found
        if len(tuned) == 1:
            return Recognised(tuned[0], f"model_type {kind}, {where}")
    raise ConfigError(
        f'= "auto": {folder} may be of {", ".join(told)}, all of model_type {kind}, and neither its '
        "preprocessor, its README.md nor its name tells which; name the family"
    )


def _screens(folder: Path) -> Screens | None:
    try:
        return screens(folder)
    except ModelError:
        return None


def _texts(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what may name the checkpoint, surest first."""
    try:
        card = (folder / _CARD).read_text(encoding="utf-8", errors="replace")[:_CARD_LENGTH]
    except OSError:
        card = ""
    title = re.search(r"^# +(.+)$", card, re.MULTILINE)
    return [
        ("the title of its README.md", title[1] if title else ""),
        (_MADE_OF, str(config.get("_name_or_path", ""))),
        ("its folder's name alone", folder.resolve().name),
    ]


class Origin(NamedTuple):
    """One key of [policy] that a family may set."""

    key: str  # without its section
    value: Any
    origin: str


def with_family(config: Config) -> Config:
    """`config` with its family's values for the keys that it does not set, and the name of the family.

    Its keys that are set stay those that were. Raises ConfigError, which continues a sentence that begins
    with the key, for an unknown family and a folder that does not show one.
    """
    policy = config.policy
    name = policy.family
    mine = policy.model_fields_set
    if name == NONE or mine.issuperset(VALUES):
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
        known = (AUTO, NONE, *FAMILIES)
        hint = did_you_mean(name, known)
        raise ConfigError(f"must be one of {', '.join(known)}, got {name[:40]!r}{hint}")
    values = {key: value for key, (value, _) in values_of(name).items() if key not in mine}
    filled = policy.model_copy(update={**values, "family": name})
    object.__setattr__(filled, "__pydantic_fields_set__", set(mine))
    return config.model_copy(update={"policy": filled})


def origins(config: Config) -> list[Origin]:
    """Return the keys of [policy] that families set, in `config`."""
    policy = config.policy
    family_values: dict[str, tuple[Any, str]] = {}
    if policy.family in FAMILIES:
        family_values = values_of(policy.family)
    found = []
    for key in VALUES:
        value = getattr(policy, key)
        if key in policy.model_fields_set:
            origin = "set by you"
        elif key in family_values and family_values[key][0] == value:
            origin = family_values[key][1]
        else:
            origin = "the default"
        found.append(Origin(key, value, origin))
    return found


def told(each: Origin) -> str:
    """`value (origin)`, a long text by its length and its beginning."""
    if isinstance(each.value, str) and len(each.value) > _LONG:
        begins = " ".join(each.value.split())[: _LONG // 2]
        return f"{len(each.value)} characters, {begins!r}... ({each.origin})"
    return f"{each.value!r} ({each.origin})"

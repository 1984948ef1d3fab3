"""The check that a click fits into a completion of `rollout.max_tokens` tokens.

find_cut_off     returns a Finding if even the shortest click would be cut off
refuse_cut_off   raises ConfigError with this finding

It needs the action parser and the tokenizer's file alone, and does not import torch.
"""

from __future__ import annotations

from bus.errors import ActionError, ConfigError
from dart_cli.config.load import Source
from dart_cli.config.model_folder import TOKENIZER, model_folder
from dart_cli.config.rules import Finding, broken_rule
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import ActionParser, PointParser
from envs.contract.actions import Click

_SIDE = 1000  # pixels of a screen; the numbers of its first pixel are the shortest
_POINTER_TOKENS = 3  # start, pad, end, which a policy that points writes in the place of numbers
_SERVED = "served:"


def refuse_cut_off(config: Config, source: Source | None = None) -> None:
    """Raise ConfigError if no click fits into a completion of the run's model."""
    if mistake := find_cut_off(config):
        cited = f" {source.cite(mistake.subject)}" if source else ""
        raise ConfigError(f"{mistake}{cited}")


def find_cut_off(config: Config) -> Finding | None:
    """Return the mistake in `rollout.max_tokens` if no click fits, else None.

    Return None as well if there is no model, no readable tokenizer, or no click in the action language.
    """
    # Agents of other programs may write any text.
    if config.rollout.engine not in MODEL_ENGINES or config.env.suite.startswith(_SERVED):
        return None
    parts = _shortest(config)
    most = config.rollout.max_tokens
    text = "".join(parts)
    pointer_tokens = (len(parts) - 1) * _POINTER_TOKENS
    # A token has at least one byte, so a text of few bytes needs no tokenizer.
    if not parts or len(text.encode()) + pointer_tokens <= most:
        return None
    text_tokens = _count_tokens(config, parts)
    if text_tokens is None or text_tokens + pointer_tokens <= most:
        return None
    return broken_rule(
        "rollout.max_tokens",
        f"must be >= {text_tokens + pointer_tokens}, the tokens of the shortest click in "
        f'policy.action_parser = "{config.policy.action_parser}" ({text!r}), or every action is cut off, '
        f"got {most}",
    )


def _shortest(config: Config) -> list[str]:
    """Return the text of a click, or, if the policy points, the parts around its points.

    The list is empty if the language has no clicks.
    """
    policy = config.policy
    coordinates = make_coordinate_map(policy.coordinates, _SIDE, _SIDE)
    try:
        parser = make_action_parser(policy.action_parser)
        text = parser.format(Click(x=0, y=0), coordinates)
        text = _without_thought(parser, text, coordinates)
        if policy.pointing == "pointer" and isinstance(parser, PointParser):
            from dart_cli.language.pointer_text import split_text  # late: it imports bus.messages

            return split_text(parser, text)[0]
    except Exception:  # noqa: BLE001 - a user's action parser may raise anything; playing reports it
        return []
    return [text]


def _without_thought(parser: ActionParser, text: str, coordinates: CoordinateMap) -> str:
    """Return the text without the lines before its call that the action parser does not need."""
    action = parser.parse(text, coordinates)
    while "\n" in text:
        shorter = text.partition("\n")[2]
        try:
            if parser.parse(shorter, coordinates) != action:
                break
        except ActionError:
            break
        text = shorter
    return text


def _count_tokens(config: Config, parts: list[str]) -> int | None:
    """Return the number of tokens of `parts`; None if the tokenizer's file cannot be read."""
    from tokenizers import Tokenizer  # late: most configurations need none

    folder = model_folder(config.model.path)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception:  # noqa: BLE001 - the library raises a bare Exception; `model.path` is checked elsewhere
        return None
    return sum(len(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts)

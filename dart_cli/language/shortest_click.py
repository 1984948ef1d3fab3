"""Whether any click fits into a completion, by the action parser and the tokenizer's file alone: no torch.

cut_off        the mistake of a `rollout.max_tokens` that cuts off even the shortest click
refuse_cut_off raises it
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

_SIDE = 1000  # pixels of a screen on whose first pixel nothing clicks with longer numbers than elsewhere
_POINTER_TOKENS = 3  # start, patch, end: what a policy that points writes in the place of numbers
_SERVED = "served:"


def refuse_cut_off(config: Config, source: Source | None = None) -> None:
    """Raise ConfigError where no click fits into a completion of the run's model."""
    if mistake := cut_off(config):
        cited = f" {source.cite(mistake.subject)}" if source else ""
        raise ConfigError(f"{mistake}{cited}")


def cut_off(config: Config) -> Finding | None:
    """Return the mistake; None where a click fits, and where nothing tells: no model, no tokenizer, no click."""
    if config.rollout.engine not in MODEL_ENGINES or config.env.suite.startswith(_SERVED):
        return None  # agents of other programs may write what they like
    parts = _shortest(config)
    most = config.rollout.max_tokens
    text = "".join(parts)
    points = (len(parts) - 1) * _POINTER_TOKENS
    if not parts or len(text.encode()) + points <= most:  # a token has a byte at least
        return None
    needed = _tokens(config, parts)
    if needed is None or needed + points <= most:
        return None
    return broken_rule(
        "rollout.max_tokens",
        f"must be >= {needed + points}, the tokens of the shortest click in policy.action_parser = "
        f'"{config.policy.action_parser}" ({text!r}), or every action is cut off, got {most}',
    )


def _shortest(config: Config) -> list[str]:
    """Return the text of a click, in parts around its points where the policy points; none if it has no clicks."""
    policy = config.policy
    coordinates = make_coordinate_map(policy.coordinates, _SIDE, _SIDE)
    try:
        action_parser = make_action_parser(policy.action_parser)
        text = _without_thought(
            action_parser, action_parser.format(Click(x=0, y=0), coordinates), coordinates
        )
        if policy.pointing == "pointer" and isinstance(action_parser, PointParser):
            from dart_cli.language.pointer_text import split_text  # late: it loads the messages

            return split_text(action_parser, text)[0]
    except Exception:  # noqa: BLE001 - a user's action parser may raise anything; what plays reports it
        return []
    return [text]


def _without_thought(action_parser: ActionParser, text: str, coordinates: CoordinateMap) -> str:
    """Return the text without the lines before its call, where the action parser reads it so, too."""
    action = action_parser.parse(text, coordinates)
    while "\n" in text:
        shorter = text.partition("\n")[2]
        try:
            if action_parser.parse(shorter, coordinates) != action:
                break
        except ActionError:
            break
        text = shorter
    return text


def _tokens(config: Config, parts: list[str]) -> int | None:
    """How many the model's tokenizer makes of them; None where its file cannot be read."""
    from tokenizers import Tokenizer  # late: most configurations need none

    folder = model_folder(config.model.path)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception:  # noqa: BLE001 - its errors have no type of their own; `model.path` is checked elsewhere
        return None
    return sum(len(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts)

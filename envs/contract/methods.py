"""The contract of environments and suites, as their author reads it in an error: what is wanted, and what came.

call_method    what a method returns; an error where it is missing or takes other arguments
unpack         the values that it returned, if there are as many as the contract has
wrong_return   the error for what it returned in place of what the contract has
missing_names  which attributes an object lacks
describe       the type and the value of any object, in a few words
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterable, Mapping, Sequence

from bus.errors import EnvError

SIGNATURES: Mapping[str, str] = {
    "reset": "reset(*, seed=None, options=None)",
    "step": "step(action)",
    "evaluate": "evaluate()",
    "close": "close()",
    "oracle_action": "oracle_action()",
    "oracle_hint": "oracle_hint()",
    "state": "state()",
    "elements": "elements()",
}
"""Method of an environment -> how it is called."""

NEEDED = ("reset", "step", "evaluate", "close")
"""Methods that every environment has (envs.contract.base.GuiEnv)."""

_OLD_STEP = 4
"""Values that `step` of gym returned before 0.26."""

_MOST = 60
"""Characters of a value in an error."""

_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = _REPR.maxlong = 2 * _MOST


def call_method(env: object, name: str, *arguments: object, **named: object) -> object:
    """Return what the method `name` of an environment returns.

    Raises EnvError where there is no such method or it cannot be called so, and what the method raises.
    """
    method = getattr(env, name, None)
    if not callable(method):
        raise EnvError(f"{type(env).__name__} has no method {SIGNATURES[name]}")
    try:
        returned: object = method(*arguments, **named)
    except TypeError:
        if (own := _other_signature(method, arguments, named)) is None:
            raise
        raise EnvError(
            f"{name} must take what {SIGNATURES[name]} takes, {type(env).__name__} has {name}{own}"
        ) from None
    return returned


def _other_signature(
    method: object, arguments: Sequence[object], named: Mapping[str, object]
) -> inspect.Signature | None:
    """Return the signature of a method that cannot be called with these arguments; None where it can."""
    assert callable(method)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of C, without one
        return None
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return signature
    return None


def unpack(name: str, returned: object, names: Sequence[str]) -> Sequence[object]:
    """Return the values that a method returned together. Raises EnvError unless there is one for each of `names`."""
    if isinstance(returned, tuple | list) and len(returned) == len(names):
        return returned
    raise EnvError(f"{name} must return ({', '.join(names)}), got {_number_of(name, returned)}")


def _number_of(name: str, returned: object) -> str:
    if not isinstance(returned, tuple | list):
        return describe(returned)
    number = f"{len(returned)} value{'' if len(returned) == 1 else 's'}"
    if name == "step" and len(returned) == _OLD_STEP:
        return f"{number}; terminated and truncated are the two halves of gym's old `done`"
    return number


def wrong_return(name: str, wanted: str, got: object) -> EnvError:
    """Return the error of a method that returned another thing than `wanted`."""
    return EnvError(f"{name} must return {wanted}, got {describe(got)}")


def missing_names(thing: object, names: Iterable[str]) -> list[str]:
    """Return those of `names` that `thing` does not have, or has as None."""
    return [name for name in names if getattr(thing, name, None) is None]


def describe(value: object) -> str:
    """Return the type of a value and the value, cut to a few words."""
    kind = type(value).__name__
    text = " ".join(_REPR.repr(value).split())
    text = text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
    return text if value is None or text.startswith(kind) else f"{kind} {text}"

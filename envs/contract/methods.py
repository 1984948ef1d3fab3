"""Calls of an environment's methods, with errors that tell its author what the contract expects.

call_method    calls a method; raises an error if it is missing or takes other arguments
unpack         checks the number of values that a method returned
wrong_return   the error for a returned value that the contract does not allow
missing_names  the attributes that an object lacks
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
"""Method of an environment -> its signature, for errors."""

NEEDED = ("reset", "step", "evaluate", "close")
"""Methods that every environment has (envs.contract.base.GuiEnv)."""

_OLD_STEP = 4
"""Values that `step` of gym returned before 0.26."""

_MOST = 60
"""Characters of a value in an error."""

_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = _REPR.maxlong = 2 * _MOST


def call_method(env: object, name: str, *arguments: object, **keywords: object) -> object:
    """Call the method `name` of an environment and return its result.

    Raises EnvError if there is no such method or it does not take these arguments. What the method itself
    raises is passed on.
    """
    method = getattr(env, name, None)
    if not callable(method):
        raise EnvError(f"{type(env).__name__} has no method {SIGNATURES[name]}")
    try:
        returned: object = method(*arguments, **keywords)
    except TypeError:
        if (own := _other_signature(method, arguments, keywords)) is None:
            raise
        raise EnvError(
            f"{name} must take what {SIGNATURES[name]} takes, {type(env).__name__} has {name}{own}"
        ) from None
    return returned


def _other_signature(
    method: object, arguments: Sequence[object], keywords: Mapping[str, object]
) -> inspect.Signature | None:
    """Return the signature of a method that does not take these arguments.

    Returns None if it does take them, or has no signature.
    """
    assert callable(method)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a method in C may have no signature
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return signature
    return None


def unpack(name: str, returned: object, names: Sequence[str]) -> Sequence[object]:
    """Return the values of a returned tuple or list.

    Raises EnvError unless there is one for each of `names`.
    """
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


def wrong_return(name: str, expected: str, value: object) -> EnvError:
    """Return the error for a method that returned `value` where the contract has `expected`."""
    return EnvError(f"{name} must return {expected}, got {describe(value)}")


def missing_names(thing: object, names: Iterable[str]) -> list[str]:
    """Return the attributes of `names` that `thing` lacks or has as None."""
    return [name for name in names if getattr(thing, name, None) is None]


def describe(value: object) -> str:
    """Return the type of a value and the value itself, cut to a few words, for an error."""
    kind = type(value).__name__
    text = " ".join(_REPR.repr(value).split())
    text = text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
    return text if value is None or text.startswith(kind) else f"{kind} {text}"

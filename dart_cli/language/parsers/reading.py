"""How texts are read: what languages share, names of keys, an LALR grammar, calls with literal arguments.

    refuse_long   the error of a text that is too long for an action
    understood    errors of a call's arguments as ActionError
    text_of       an argument that is a text
    Verb, at_point, verb_of, unheld   calls that act at a point, by name
    not_expressed the error of an action that a language has no call for
    split_keys, read_keys, join_keys, write_keys, one_key, one_of_keys, one_press   names of keys, one per key, lower case
    first_read    what a reader makes of the first of several readings that it understands
    Grammar       parses a whole text, with readable errors
    Call, calls_of   calls of a few lines of code, read by Python's own parser and never run
    quoted        a text as a literal of one line

In code a name is a plain one or `module.name`. An argument is a text, a number, True, False, None, or a list of
them. Everything else is an ActionError: other expressions, other statements, names as values.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lark import Lark, Token, Tree
from lark.common import LexerConf
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.lexer import ContextualLexer, PatternStr

from bus.errors import ActionError
from envs.contract.actions import Action
from envs.tools.inputs import SAME_KEY, canonical

LONGEST = 16_384  # characters; a longer completion is refused without parsing
_SHOWN = 24  # characters of the offending text in a message
_MOST_SHOWN = 80  # characters that they take there, escaped
MOST_CALLS = 64  # statements in one completion
_LINES = re.compile(r"\r\n|\r|\n")

Span = tuple[int, int]
Candidate = TypeVar("Candidate")
Read = TypeVar("Read")


def refuse_long(text: str) -> None:
    """Raise ActionError for a text that is longer than any action."""
    if len(text) > LONGEST:
        raise ActionError(f"{len(text)} characters are too many for an action (at most {LONGEST})")


@contextmanager
def understood(call: str) -> Iterator[None]:
    """Raise the errors of reading a call's arguments as ActionError."""
    try:
        yield
    except KeyError as missing:
        raise ActionError(f"{call} lacks {missing}") from None
    except (TypeError, ValueError, OverflowError) as error:
        told = " ".join(str(error).split())[:120]
        raise ActionError(f"{call} is not understood: {told}") from None


def text_of(arguments: Mapping[str, Any], key: str) -> str:
    """Return an argument that is a text. Raises ActionError, KeyError or, for half a surrogate pair, ValueError."""
    text = arguments[key]
    if not isinstance(text, str):
        raise ActionError(f"{key} must be a text, got {json.dumps(text)[:60]}")
    text.encode()  # JSON can hold half a surrogate pair, and no message can
    return text


Verb = tuple[Callable[..., Action], str]
"""What a call at a point does, and with which button; "" for an action that has none."""


def at_point(verb: Verb, point: tuple[int, int], modifiers: Sequence[str] = ()) -> Action:
    """Return the action of a call at a pixel, while keys are held."""
    kind, button = verb
    fields: dict[str, Any] = {"button": button} if button else {}
    if modifiers:
        fields["modifiers"] = tuple(modifiers)
    return kind(x=point[0], y=point[1], **fields)


def verb_of(verbs: Mapping[str, Verb], action: Action) -> str | None:
    """Return the first call of a language that does the action; None for one that acts otherwise."""
    wanted = type(action), getattr(action, "button", "")
    return next((name for name, verb in verbs.items() if verb == wanted), None)


def unheld(verbs: Mapping[str, Verb], action: Any) -> tuple[str, int, int] | None:
    """`verb_of`, with the pixel; None for an action during which keys are held, too."""
    name = None if getattr(action, "modifiers", ()) else verb_of(verbs, action)
    return (name, action.x, action.y) if name else None


def not_expressed(language: str, action: Action, limits: Mapping[str, str]) -> ActionError:
    """Return the error of an action that a language has no call for."""
    return ActionError(f"{language} cannot express {action!r}: {limits[action.kind]}")


def first_read(candidates: Iterable[Candidate], read: Callable[[Candidate], Read]) -> Read:
    """Return what `read` makes of the first candidate that it understands.

    Raises the ActionError of the last one. The candidates are few: each costs a reading.
    """
    refusal = ActionError("there is no call")
    for each in candidates:
        try:
            return read(each)
        except ActionError as error:
            refusal = error
    raise refusal


class Match(NamedTuple):
    """What a rule matches: characters [start, end) from its first kept token to its last."""

    start: int
    end: int
    tree: Tree[Token]


class _UncheckedLexer(ContextualLexer):
    """Without lark's validation of terminals.

    Where the package interegular is installed, which vLLM brings, lark searches for terminals that
    collide: seconds in each process that makes an action parser, for a line of its debug log. That no
    terminal is empty, the other half of the validation, a test checks.
    """

    def __init__(self, conf: LexerConf, *args: Any, **options: Any) -> None:
        conf.skip_validation = True
        super().__init__(conf, *args, **options)


class Grammar:
    """Parses a whole text or raises ActionError with the position, what was found and what was expected."""

    def __init__(self, rules: str, readable: dict[str, str]) -> None:
        """`readable` names the pattern terminals of `rules` for messages."""
        self._parser = Lark(
            rules,
            parser="lalr",
            lexer="contextual",
            maybe_placeholders=False,
            _plugins={"ContextualLexer": _UncheckedLexer},
        )
        self._readable = readable | {
            terminal.name: terminal.pattern.value
            for terminal in self._parser.terminals
            if isinstance(terminal.pattern, PatternStr)
        }

    def parse(self, text: str) -> Tree[Token]:
        """Return the parse tree of `text`, all of it."""
        refuse_long(text)
        try:
            return self._parser.parse(text)
        except UnexpectedInput as error:
            raise ActionError(self._explain(error, text)) from None

    def matches(self, text: str, rule: str) -> list[Match]:
        """Return what `rule` matches in `text`, in its order. Raises ActionError as `parse` does."""
        found = self.parse(text).find_data(rule)
        return sorted(map(_match, found), key=lambda match: match.start)

    def _explain(self, error: UnexpectedInput, text: str) -> str:
        expected: set[str] = set()
        if isinstance(error, UnexpectedCharacters):
            expected = set(error.allowed or ())
        elif isinstance(error, UnexpectedToken):
            expected = set(error.expected)
        position = error.pos_in_stream or 0
        if isinstance(error, UnexpectedToken) and error.token.type == "$END":
            found = "the text ends too early" if text else "the text is empty"
        else:
            rest = text[position : position + _SHOWN]
            found = f"{rest!r:.{_MOST_SHOWN}} at character {position} is out of place"
        names = sorted(self._readable.get(name, "the end") for name in expected)
        return f"{found}; expected {' or '.join(names)}" if names else found


def _match(tree: Tree[Token]) -> Match:
    tokens = list(tree.scan_values(lambda _: True))
    return Match(tokens[0].start_pos or 0, tokens[-1].end_pos or 0, tree)


# --- Python calls


@dataclass(frozen=True)
class Call:
    """One call. Arguments by position are named after the signature that `calls_of` is given."""

    name: str
    arguments: Mapping[str, Any]
    rest: Sequence[Any]  # arguments by position beyond the signature: of hotkey all
    point: (
        Span | None
    )  # characters [start, end) of the code that write x and y, and what is ignored after them


def calls_of(
    code: str, signatures: Mapping[str, Sequence[str]], ignored: Sequence[str]
) -> list[Call]:
    """Return the calls of `code`, in their order. Raises ActionError.

    `signatures` has the names that exist, with their arguments by position; `ignored` arguments are dropped.
    Imports and texts that stand alone do nothing and are passed over.
    """
    refuse_long(code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(code)
    except SyntaxError as error:
        raise ActionError(f"line {error.lineno or 1} is no Python: {error.msg}"[:200]) from None
    except (ValueError, RecursionError, MemoryError):
        raise ActionError("the code is no Python") from None
    if len(tree.body) > MOST_CALLS:
        raise ActionError(f"{len(tree.body)} lines are too many for one action")
    places = _Places(code)
    calls = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            raise ActionError(f"line {node.lineno} is no call")
        calls.append(_call(node.value, signatures, ignored, places))
    return calls


class _Places:
    """Characters of the code, from lines and the bytes that the parser counts."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._starts = [0, *(each.end() for each in _LINES.finditer(code))]

    def of(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        return start + len(
            self._code[start : start + column].encode()[:column].decode(errors="ignore")
        )


def _call(
    node: ast.Call,
    signatures: Mapping[str, Sequence[str]],
    ignored: Sequence[str],
    places: _Places,
) -> Call:
    name = _name(node.func)
    if name not in signatures:
        raise ActionError(f"there is no call {name[:40]!r}")
    names = signatures[name]
    arguments = {key: _literal(value) for key, value in zip(names, node.args, strict=False)}
    rest = [_literal(value) for value in node.args[len(names) :]]
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ActionError(f"{name} unpacks no arguments")
        if keyword.arg in arguments:
            raise ActionError(f"{name} is given {keyword.arg[:24]} twice")
        arguments[keyword.arg] = _literal(keyword.value)
    point = _point(node, names, ignored, places)
    kept = {key: value for key, value in arguments.items() if key not in ignored}
    return Call(name, kept, rest, point)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    raise ActionError("a call is NAME(...) or MODULE.NAME(...)")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            return -node.operand.value if isinstance(node.op, ast.USub) else node.operand.value  # type: ignore[attr-defined]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if not any(
            isinstance(each, ast.List | ast.Tuple) for each in parts
        ):
            return list(map(_literal, parts))
    raise ActionError("an argument is a text, a number or a list of them")


def _point(
    node: ast.Call, names: Sequence[str], ignored: Sequence[str], places: _Places
) -> Span | None:
    """Where x and y stand, one after the other; by position, with what follows and is ignored."""
    given: list[tuple[str, ast.expr | ast.keyword]] = [
        *zip(names, node.args, strict=False),
        *((keyword.arg or "", keyword) for keyword in node.keywords),
    ]
    order = [name for name, _ in given]
    if "x" not in order or order[order.index("x") + 1 : order.index("x") + 2] != ["y"]:
        return None
    first = order.index("x")
    last = first + 1
    while last + 1 < len(node.args) and order[last + 1] in ignored:
        last += 1
    if last + 1 < len(node.args) and first < len(node.args):
        raise ActionError(f"write {order[last + 1]} by its name, after x and y")
    start, end = given[first][1], given[last][1]
    assert end.end_lineno is not None
    assert end.end_col_offset is not None
    return places.of(start.lineno, start.col_offset), places.of(end.end_lineno, end.end_col_offset)


def quoted(text: str, unwritten: Sequence[str]) -> str:
    """Return a literal of one line that means `text` and holds none of `unwritten`."""
    written = repr(text)
    for each in unwritten:
        written = written.replace(each, f"\\x{ord(each[0]):02x}{each[1:]}")
    return written


# --- names of keys: envs/tools/inputs.py has the table

_KEY = re.compile(r"[a-z0-9_]+|[!-/:-@\[-`{-~]")
_WHITE = {" ": "space", "\n": "enter", "\r": "enter", "\r\n": "enter", "\t": "tab"}
"""Keys that are given as what they write."""
_TWO_WORDS = re.compile(
    "|".join(rf"\b{name.replace('_', ' +')}\b" for name in SAME_KEY if "_" in name), re.IGNORECASE
)
_NAME = re.compile(r"\+|[^\s+]+")
_JOINED = re.compile(r"\s*\+\s*(?=\S)|\s+(?=\S)")


def split_keys(text: str) -> list[str]:
    """Return the canonical names in a text such as `ctrl+a`, `ctrl a` or `ctrl++`, whose last key is +.

    A capital is shift and its letter, as pyautogui presses it. Raises ActionError for what is no name.
    """
    return read_keys([text])


def is_capital(name: str) -> bool:
    """Return True if a key is named by a capital letter, which is written with shift."""
    return len(name) == 1 and "A" <= name <= "Z"


def _names(text: str) -> Iterator[str]:
    """Yield the names as they are written. A + between two names joins them; elsewhere it is the key."""
    if text in _WHITE:
        yield _WHITE[text]
        return
    text = _TWO_WORDS.sub(lambda found: re.sub(" +", "_", found[0]), text.strip())
    place = 0
    while place < len(text):
        name = _NAME.match(text, place)
        assert name is not None  # no name begins with a blank, and none is empty
        yield name[0]
        place = name.end()
        joined = _JOINED.match(text, place)
        if place < len(text) and joined is None:
            raise ActionError(f"{text[:24]!r} does not say which keys are pressed")
        place = joined.end() if joined else place


def one_key(text: str) -> str:
    """Return the one name in a text. Raises ActionError for several."""
    return one_of_keys(split_keys(text))


def join_keys(keys: Sequence[str], separator: str) -> str:
    """Return the text that `split_keys` reads as `keys`. Raises ActionError if there is none."""
    return separator.join("plus" if key == "+" else key for key in write_keys(keys))


def _checked(keys: Sequence[str]) -> Sequence[str]:
    if not keys:
        raise ActionError("no key is given")
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ActionError(f"{key[:24]!r} is not a key's name")
    return keys


def read_keys(names: Sequence[str]) -> list[str]:
    """Return canonical names of keys that stand alone or together, e.g. ["Ctrl", "c"], ["ctrl+c"], [" "].

    A capital is read as in `split_keys`. Raises ActionError for what is no name.
    """
    keys: list[str] = []
    for name in (each for text in names for each in _names(text)):
        if is_capital(name) and "shift" not in keys:
            keys.append("shift")
        keys.append(name.lower() if is_capital(name) else canonical(name))
    return list(_checked(keys))


def write_keys(keys: Sequence[str]) -> list[str]:
    """Return the names that `read_keys` reads as `keys`. Raises ActionError if there are none."""
    if read_keys(_checked(keys)) != list(keys):
        raise ActionError(
            f"keys {list(keys)!r} are not the names used here (see SAME_KEY in envs/tools/inputs.py)"
        )
    return list(keys)


def one_press(names: Sequence[str]) -> list[str]:
    """Return the keys of a press of one key: of a capital, shift and its letter. Raises ActionError for several."""
    keys = read_keys(names)
    if len(keys) > 1 and not (len(names) == 1 and is_capital(names[0].strip())):
        one_of_keys(keys)
    return keys


def one_of_keys(keys: Sequence[str]) -> str:
    """Return the one key of a list. Raises ActionError for several."""
    if len(keys) != 1:
        raise ActionError(f"one key is held or pressed at a time, got {', '.join(keys)[:40]}")
    return keys[0]

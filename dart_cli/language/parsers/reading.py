"""The parts that action parsers share: an LALR grammar, calls with literal arguments, names of keys.

    refuse_long      raises an error for a text that is too long for an action
    as_action_errors turns errors in a call's arguments into ActionError
    text_of          returns an argument that is a text
    object_once      makes an object of JSON, and raises an error for a key that is there twice
    Verb, at_point, verb_of, verb_and_pixel   read and write calls that act at a point, such as click
    not_expressed    makes the error for an action that a language has no call for
    cut_lines        cuts a completion of several actions before each of them
    first_read       tries several readings of a text, and returns the first that succeeds
    Grammar          parses a whole text, with readable errors
    statements_of    the statements of a few lines of code, read by Python's own parser and never run
    does_nothing     tells whether a statement is no call: an import, or a text
    Call, calls_of   the calls in a few lines of code
    places_of        returns where expressions or statements are in their code
    quote            writes a text as a literal of one line
    split_keys, read_keys, one_key, one_of_keys, one_press   read names of keys: one per key, in lower case
    join_keys, write_keys                                    write names of keys
    is_capital       tells whether the name of a key is a capital letter

In code a call's name is `name` or `module.name`. An argument is a text, a number, True, False, None, or a
list of them. Everything else raises ActionError: other expressions, other statements, names as values.
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
from dart_cli.language.parsers.base import Part
from envs.contract.actions import Action
from envs.tools.inputs import SAME_KEY, canonical

LONGEST = 16_384  # characters; a longer completion is refused without parsing
_SHOWN = 24  # characters of the offending text that a message shows
_MOST_SHOWN = 80  # characters that these take at most after escaping
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
def as_action_errors(call: str) -> Iterator[None]:
    """Turn an error of the block, which reads the arguments of `call`, into an ActionError that names it.

    KeyError, TypeError, ValueError and OverflowError are turned.
    """
    try:
        yield
    except KeyError as missing:
        raise ActionError(f"{call} lacks {missing}") from None
    except (TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ActionError(f"{call} is not understood: {reason}") from None


def text_of(arguments: Mapping[str, Any], key: str) -> str:
    """Return an argument that is a text.

    Raises ActionError for another type, KeyError if it is missing, and ValueError for half a surrogate pair.
    """
    text = arguments[key]
    if not isinstance(text, str):
        raise ActionError(f"{key} must be a text, got {json.dumps(text)[:60]}")
    text.encode()  # JSON can have half a surrogate pair, but messages cannot
    return text


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError for a key that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


Verb = tuple[Callable[..., Action], str]
"""The class of a call's action, and the mouse button; "" for a class without one."""


def at_point(verb: Verb, point: tuple[int, int], modifiers: Sequence[str] = ()) -> Action:
    """Return the action of a call at a pixel, with `modifiers` as the keys held during it."""
    kind, button = verb
    fields: dict[str, Any] = {"button": button} if button else {}
    if modifiers:
        fields["modifiers"] = tuple(modifiers)
    return kind(x=point[0], y=point[1], **fields)


def verb_of(verbs: Mapping[str, Verb], action: Action) -> str | None:
    """Return the name of the first call that does the action, or None if no call does."""
    action_verb = type(action), getattr(action, "button", "")
    return next((name for name, verb in verbs.items() if verb == action_verb), None)


def verb_and_pixel(verbs: Mapping[str, Verb], action: Any) -> tuple[str, int, int] | None:
    """Return (name, x, y): the call that does the action, and the action's pixel.

    None if no call does the action, or if keys are held during it.
    """
    name = None if getattr(action, "modifiers", ()) else verb_of(verbs, action)
    return (name, action.x, action.y) if name else None


def not_expressed(language: str, action: Action, limits: Mapping[str, str]) -> ActionError:
    """Return the error for an action that the language cannot express."""
    return ActionError(f"{language} cannot express {action!r}: {limits[action.kind]}")


def first_read(candidates: Iterable[Candidate], read: Callable[[Candidate], Read]) -> Read:
    """Return the result of `read` for the first candidate for which it raises no ActionError.

    Raises the last of these errors if it raises for all of them. Each candidate is read in full, so there
    should be few.
    """
    refusal = ActionError("there is no call")
    for candidate in candidates:
        try:
            return read(candidate)
        except ActionError as error:
            refusal = error
    raise refusal


def cut_lines(text: str, gap: re.Pattern[str], begin: int, lead: str = "") -> list[Part]:
    """Return the parts of a text between the matches of `gap` from character `begin` on.

    `lead` is what the language needs before an action that is not the first.
    """
    gaps = list(gap.finditer(text, begin))
    starts = [0, *(match.end() for match in gaps)]
    ends = [*(match.start() for match in gaps), len(text)]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        before = lead if start else ""
        parts.append(Part(before + text[start:end], start, end, len(before)))
    return parts


class Match(NamedTuple):
    """The match of a rule: characters [start, end), from its first token in the tree to its last."""

    start: int
    end: int
    tree: Tree[Token]


class _UncheckedLexer(ContextualLexer):
    """A lexer without lark's validation of terminals.

    If the package interegular is installed, which comes with vLLM, lark searches for terminals that collide.
    This takes seconds in each process that makes an action parser, and yields one line of lark's debug log.
    The other half of the validation, that no terminal is empty, is done by a test.
    """

    def __init__(self, conf: LexerConf, *args: Any, **options: Any) -> None:
        conf.skip_validation = True
        super().__init__(conf, *args, **options)


class Grammar:
    """Parses a whole text, or raises ActionError with the position and the expected terminals."""

    def __init__(self, rules: str, readable: dict[str, str]) -> None:
        """Make the parser of `rules`; `readable` names terminals that are patterns, for messages."""
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
        """Return the parse tree of the whole `text`. Raises ActionError if it does not fit the grammar."""
        refuse_long(text)
        try:
            return self._parser.parse(text)
        except UnexpectedInput as error:
            raise ActionError(self._explain(error, text)) from None

    def matches(self, text: str, rule: str) -> list[Match]:
        """Return the matches of `rule` in `text`, in order. Raises ActionError as `parse` does."""
        trees = self.parse(text).find_data(rule)
        return sorted(map(_match, trees), key=lambda match: match.start)

    def _explain(self, error: UnexpectedInput, text: str) -> str:
        """Return the message for a text that does not fit: what is out of place, and what was expected."""
        expected: set[str] = set()
        if isinstance(error, UnexpectedCharacters):
            expected = set(error.allowed or ())
        elif isinstance(error, UnexpectedToken):
            expected = set(error.expected)
        position = error.pos_in_stream or 0
        if isinstance(error, UnexpectedToken) and error.token.type == "$END":
            problem = "the text ends too early" if text else "the text is empty"
        else:
            rest = text[position : position + _SHOWN]
            problem = f"{rest!r:.{_MOST_SHOWN}} at character {position} is out of place"
        names = sorted(self._readable.get(name, "the end") for name in expected)
        return f"{problem}; expected {' or '.join(names)}" if names else problem


def _match(tree: Tree[Token]) -> Match:
    """Return a tree as a Match, with the characters of its tokens."""
    tokens = list(tree.scan_values(lambda _: True))
    return Match(tokens[0].start_pos or 0, tokens[-1].end_pos or 0, tree)


# --- Python calls


@dataclass(frozen=True)
class Call:
    """One call. Its arguments by position have the names of the signature that `calls_of` takes."""

    name: str
    arguments: Mapping[str, Any]
    rest: Sequence[Any]  # arguments by position beyond the signature: for hotkey, all
    # characters [start, end) of the code that write x and y, and ignored arguments after them
    point: Span | None


def statements_of(code: str) -> list[ast.stmt]:
    """Return the statements of code, in their order. Raises ActionError if it is no Python."""
    refuse_long(code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for invalid escape sequences
            return ast.parse(code).body
    except SyntaxError as error:
        raise ActionError(f"line {error.lineno or 1} is no Python: {error.msg}"[:200]) from None
    except (ValueError, RecursionError, MemoryError):
        raise ActionError("the code is no Python") from None


def does_nothing(node: ast.stmt) -> bool:
    """Return True for an import, and for a text as a statement."""
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def places_of(code: str, nodes: Iterable[ast.stmt | ast.expr]) -> list[Span]:
    """Return the characters [start, end) of nodes of the code [N], in their order."""
    places = _Places(code)
    return [
        (
            places.of(node.lineno, node.col_offset),
            places.of(node.end_lineno or 0, node.end_col_offset or 0),
        )
        for node in nodes
    ]


def calls_of(
    code: str, signatures: Mapping[str, Sequence[str]], ignored: Sequence[str]
) -> list[Call]:
    """Return the calls of `code`, in their order. Raises ActionError.

    `signatures` has the names that exist, with their arguments by position; `ignored` arguments are dropped.
    Imports, and texts as statements, do nothing and are skipped.
    """
    statements = statements_of(code)
    if len(statements) > MOST_CALLS:
        raise ActionError(f"{len(statements)} lines are too many for one action")
    places = _Places(code)
    calls = []
    for node in statements:
        if does_nothing(node):
            continue
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            raise ActionError(f"line {node.lineno} is no call")
        calls.append(_call(node.value, signatures, ignored, places))
    return calls


class _Places:
    """Converts a line and a column, which Python's parser counts in bytes, to a character of the code."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._starts = [0, *(match.end() for match in _LINES.finditer(code))]

    def of(self, line: int, column: int) -> int:
        """Return the character at a line, counted from 1, and a column in bytes."""
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
    arguments = {key: value for key, value in arguments.items() if key not in ignored}
    return Call(name, arguments, rest, point)


def _name(node: ast.expr) -> str:
    """Return the name of a call, with its module if it has one. Raises ActionError for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    raise ActionError("a call is NAME(...) or MODULE.NAME(...)")


def _literal(node: ast.expr) -> Any:
    """Return the value of an argument: a text, a number, None, or a list. Raises ActionError for others."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            return -node.operand.value if isinstance(node.op, ast.USub) else node.operand.value  # type: ignore[attr-defined]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if not any(
            isinstance(part, ast.List | ast.Tuple) for part in parts
        ):
            return list(map(_literal, parts))
    raise ActionError("an argument is a text, a number or a list of them")


def _point(
    node: ast.Call, names: Sequence[str], ignored: Sequence[str], places: _Places
) -> Span | None:
    """Return the characters of x and y; None unless y follows x.

    If they are passed by position, ignored arguments after them are included, because a point that is written
    by name cannot be followed by arguments by position. Raises ActionError if others follow by position.
    """
    named_nodes: list[tuple[str, ast.expr | ast.keyword]] = [
        *zip(names, node.args, strict=False),
        *((keyword.arg or "", keyword) for keyword in node.keywords),
    ]
    order = [name for name, _ in named_nodes]
    if "x" not in order or order[order.index("x") + 1 : order.index("x") + 2] != ["y"]:
        return None
    first = order.index("x")
    last = first + 1
    while last + 1 < len(node.args) and order[last + 1] in ignored:
        last += 1
    if last + 1 < len(node.args) and first < len(node.args):
        raise ActionError(f"write {order[last + 1]} by its name, after x and y")
    start, end = named_nodes[first][1], named_nodes[last][1]
    assert end.end_lineno is not None
    assert end.end_col_offset is not None
    return places.of(start.lineno, start.col_offset), places.of(end.end_lineno, end.end_col_offset)


def quote(text: str, unwritten: Sequence[str]) -> str:
    """Return a literal of one line for `text` that contains none of the texts in `unwritten`."""
    literal = repr(text)
    for mark in unwritten:
        literal = literal.replace(mark, f"\\x{ord(mark[0]):02x}{mark[1:]}")
    return literal


# --- names of keys: envs/tools/inputs.py has the table

_KEY = re.compile(r"[a-z0-9_]+|[!-/:-@\[-`{-~]")
_WHITE = {" ": "space", "\n": "enter", "\r": "enter", "\r\n": "enter", "\t": "tab"}
"""Keys that are named by the character that they write."""
_TWO_WORDS = re.compile(
    "|".join(rf"\b{name.replace('_', ' +')}\b" for name in SAME_KEY if "_" in name), re.IGNORECASE
)
_NAME = re.compile(r"\+|[^\s+]+")
_JOINED = re.compile(r"\s*\+\s*(?=\S)|\s+(?=\S)")


def split_keys(text: str) -> list[str]:
    """Return the canonical names of the keys in a text such as `ctrl+a`, `ctrl a`, or `ctrl++` (ctrl and +).

    A capital is read as shift and its letter, as pyautogui presses it. Raises ActionError for an unknown
    name.
    """
    return read_keys([text])


def is_capital(name: str) -> bool:
    """Return True if the name of a key is a capital letter, which is typed with shift."""
    return len(name) == 1 and "A" <= name <= "Z"


def _names(text: str) -> Iterator[str]:
    """Yield the names of keys as they are written.

    A + between two names joins them; elsewhere it is the key +.
    """
    if text in _WHITE:
        yield _WHITE[text]
        return
    text = _TWO_WORDS.sub(lambda match: re.sub(" +", "_", match[0]), text.strip())
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
    """Return the canonical name of the one key in a text. Raises ActionError for several keys."""
    return one_of_keys(split_keys(text))


def join_keys(keys: Sequence[str], separator: str) -> str:
    """Return a text that `split_keys` reads as `keys`. Raises ActionError if there is none."""
    return separator.join("plus" if key == "+" else key for key in write_keys(keys))


def _checked(keys: Sequence[str]) -> Sequence[str]:
    """Return `keys` unchanged. Raises ActionError if there are none, or if one is not the name of a key."""
    if not keys:
        raise ActionError("no key is given")
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ActionError(f"{key[:24]!r} is not a key's name")
    return keys


def read_keys(names: Sequence[str]) -> list[str]:
    """Return the canonical names of keys in one text or in several: ["Ctrl", "c"], ["ctrl+c"], [" "].

    A capital is read as in `split_keys`. Raises ActionError for an unknown name.
    """
    keys: list[str] = []
    for name in (name for text in names for name in _names(text)):
        if is_capital(name) and "shift" not in keys:
            keys.append("shift")
        keys.append(name.lower() if is_capital(name) else canonical(name))
    return list(_checked(keys))


def write_keys(keys: Sequence[str]) -> list[str]:
    """Return names that `read_keys` reads as `keys`. Raises ActionError if there are none."""
    if read_keys(_checked(keys)) != list(keys):
        raise ActionError(
            f"keys {list(keys)!r} are not the names used here (see SAME_KEY in envs/tools/inputs.py)"
        )
    return list(keys)


def one_press(names: Sequence[str]) -> list[str]:
    """Return the keys of one press: one key, or shift and a letter for a capital.

    Raises ActionError for several.
    """
    keys = read_keys(names)
    if len(keys) > 1 and not (len(names) == 1 and is_capital(names[0].strip())):
        one_of_keys(keys)
    return keys


def one_of_keys(keys: Sequence[str]) -> str:
    """Return the only key of a list. Raises ActionError for several keys."""
    if len(keys) != 1:
        raise ActionError(f"one key is held or pressed at a time, got {', '.join(keys)[:40]}")
    return keys[0]

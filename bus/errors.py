"""Every error that `dart` raises on purpose, in one tree.

The user can fix `UserError` and its children (exit code 2); the others are faults of the run (exit code 1;
`AttentionError` 3). Each message has the place and the fix, in one line.
"""

from __future__ import annotations

import errno
import re


def first_line(error: BaseException) -> str:
    """Return the text of another library's error, shortened to one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on its disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to it"),
    errno.EROFS: "its file system can only be read: name a place on another",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`: too many files are open"),
    errno.EIO: "its disk fails: copy it to another",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def cure_of(error: BaseException, otherwise: str) -> str:
    """Return the fix for a failure of the file system, by its number; `otherwise` for any other failure.

    Libraries in Rust, such as safetensors, have the number only in their text.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    return _FIXES.get(number or 0, otherwise)


_NO_MEMORY = ("can't allocate memory", " error: out of memory")
"""Texts of torch's errors on a CPU, and of a GPU's driver that refuses a context or pinned memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if Python or torch could not allocate memory. It does not import torch."""
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    is_driver = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    return is_torch or is_driver or isinstance(error, MemoryError)


class DartError(Exception):
    """Root of all errors raised on purpose; `exit_code` is the command line's exit code."""

    exit_code = 1


class UserError(DartError):
    """The user's input cannot work; the message says what to change."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file or `--set` override is wrong; the message has file, key and fix."""


class TaskError(UserError):
    """A task or suite does not exist or is malformed."""


class ModelError(UserError):
    """A model folder is missing, incomplete or of an unsupported class."""


class LogprobCheckError(UserError):
    """Engine and trainer give the same tokens different log-probabilities; a restart does not fix it."""


class ExchangeError(UserError):
    """Files of trajectories cannot be written or read; the message has file, row, column and fix."""


class MissingPartError(UserError):
    """An optional package, program or device is not installed; the message names the install step."""


class RunDirectoryError(UserError):
    """A run directory cannot be used: wrong owner or mode, another schema, already in use."""


class AttentionError(DartError):
    """A run has ended in order after it needed attention for train.attention_minutes."""

    exit_code = 3


class DiskError(DartError):
    """A file of the run cannot be written: its disk is full or broken."""


class BusError(DartError):
    """A fault on the wire."""


class DeadlineError(BusError):
    """A wait ran past its deadline; the message says what waited for what, and how long."""


class ProtocolError(BusError):
    """A message was refused: its kind, protocol version or fields are wrong."""


class OversizeError(ProtocolError):
    """A message is larger than a limit of the wire; the error has its size and the limit."""


class RefusedError(BusError):
    """The other side answered a request with an error, whose text is the message."""


class EnvError(DartError):
    """An environment broke; the episode is invalid, never failed."""


class ActionCausedError(EnvError):
    """The policy's own action broke the environment; the episode has failed, and is trained on.

    An environment raises it in `step` or `evaluate` if the action is the cause. Raised in `reset` it counts
    like any other EnvError, since there was no action yet.
    """


class NoOracleError(EnvError):
    """An environment has no solution of its task."""


class NotSolvableError(NoOracleError):
    """An environment has no oracle, for none of its tasks."""


class ActionError(DartError):
    """A model's text is no action for the action parser; this is an ordinary outcome of a step."""


class EngineError(DartError):
    """An inference engine could not serve a request."""


class PromptError(EngineError):
    """A request does not fit the model, e.g. it is too long or has a broken image; the engine is intact."""


class NoAnswerError(EngineError):
    """A server with a model gave no answer to a request."""

    def __init__(self, text: str, *, is_worth_repeating: bool = True, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.is_worth_repeating = is_worth_repeating  # False: the same request would fail again
        self.after_s = after_s  # seconds that the server asks to wait before the next request


class RefusalError(NoAnswerError):
    """A model behind a server refused to answer; the same request would be refused again."""

    def __init__(self, text: str, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        super().__init__(text, is_worth_repeating=False)
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


class EngineGoneError(EngineError):
    """An inference engine can serve no more requests; its worker ends."""


class WeightsError(DartError):
    """A weight set was refused: it is truncated, or has wrong names, shapes, dtypes or a wrong digest."""


class StoreError(DartError):
    """The database could not be read or written."""


class CheckpointError(DartError):
    """A trainer checkpoint cannot be written or resumed."""


class RankError(DartError):
    """A rank of the trainer ended or does not answer; the message has its task and its log."""

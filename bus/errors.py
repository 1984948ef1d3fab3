"""Every error `dart` raises on purpose, in one tree.

`UserError` and its children are the user's to fix (exit code 2); the others are faults of the
run (exit code 1; `AttentionError` 3). Each message names the place and the cure in one line.
"""

from __future__ import annotations

import errno
import re


def first_line(error: BaseException) -> str:
    """Another library's error text, shortened to one line that fits into ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on its disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to it"),
    errno.EROFS: "its file system can only be read: name a place on another",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`: too many files are open"),
    errno.EIO: "its disk fails: copy it to another",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def cure_of(error: BaseException, otherwise: str) -> str:
    """Return the cure of a failure of the file system, by its number; `otherwise` for any other failure.

    Libraries in Rust, such as safetensors, have the number in their text alone.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    return _CURES.get(number or 0, otherwise)


_NO_MEMORY = ("can't allocate memory", " error: out of memory")
"""What torch says on a CPU, and where a GPU's driver itself refuses: a context on a full GPU, or pinned memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True where Python, or torch on a GPU or a CPU, could not allocate memory. Does not import torch."""
    of_torch = any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__)
    refused = isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)
    return of_torch or refused or isinstance(error, MemoryError)


class DartError(Exception):
    """Root of all errors raised on purpose; `exit_code` is the command line's exit code."""

    exit_code = 1


class UserError(DartError):
    """The user gave something that cannot work; the message says what to change."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file or `--set` override is wrong: file, key and cure in one line."""


class TaskError(UserError):
    """A task or suite does not exist or is malformed."""


class ModelError(UserError):
    """A model folder is missing, incomplete or of an unsupported class."""


class LogprobCheckError(UserError):
    """Engine and trainer give the same tokens other log-probabilities; no restart fixes it."""


class ExchangeError(UserError):
    """Files of trajectories cannot be written or read: file, row, column and cure in one line."""


class MissingPartError(UserError):
    """An optional package, program or device is not installed; the message names the install step."""


class RunDirectoryError(UserError):
    """A run directory cannot be used: wrong owner or mode, another schema, already in use."""


class AttentionError(DartError):
    """A run has needed attention for so long that it has ended, in order: train.attention_minutes."""

    exit_code = 3


class DiskError(DartError):
    """A file of the run cannot be written: its disk is full or broken."""


class BusError(DartError):
    """A fault on the wire."""


class DeadlineError(BusError):
    """A wait ran past its deadline; the message names what waited for what and how long."""


class ProtocolError(BusError):
    """A message was refused: unknown kind, other protocol version, wrong, missing or unknown fields."""


class OversizeError(ProtocolError):
    """A message is over a limit of the wire; the message names its size and the limit."""


class RefusedError(BusError):
    """The other side answered the request with an error; the message carries its text."""


class EnvError(DartError):
    """An environment broke; the episode is invalid, never failed."""


class ActionCausedError(EnvError):
    """The policy's own action broke the environment: the episode has failed, and is trained on.

    Raised by an environment's `step` or `evaluate` that knows the action to be the cause. From
    `reset` it is an EnvError as any other: there was no action yet.
    """


class NoOracleError(EnvError):
    """An environment has no known solution of the task it plays."""


class ActionError(DartError):
    """A model's text is not an action of the action parser's grammar; an ordinary step outcome."""


class EngineError(DartError):
    """An inference engine could not serve a request."""


class PromptError(EngineError):
    """A request that this model cannot take, e.g. too long, or with a broken image; its engine is sound."""


class EngineGoneError(EngineError):
    """An inference engine can serve no more requests; its worker ends."""


class WeightsError(DartError):
    """A weight set was refused: truncated, wrong names, shapes, dtypes or digest."""


class StoreError(DartError):
    """The database could not be read or written."""


class CheckpointError(DartError):
    """A trainer checkpoint cannot be written or resumed."""


class RankError(DartError):
    """A rank of the trainer ended or does not answer: which one, what it was doing, where its log is."""

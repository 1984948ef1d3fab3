"""Ask a model at an address without blocking, within deadlines, and again after a failure.

answer      sends one request within the deadline of its server
ask_again   calls a function that asks until there is an answer, with growing pauses
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from bus.errors import EngineError, NoAnswerError
from dart_cli.chat.server import ChatReply, ChatServer, Messages, Sampled
from dart_cli.runtime.background import in_daemon_thread

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
LONGEST_WISH_S = 120.0
"""Most seconds that a server may ask to wait (Retry-After); if it asks for more, the request has failed."""


async def answer(server: ChatServer, messages: Messages, sampled: Sampled) -> ChatReply:
    """Send a request in another thread and return the answer.

    Raises UserError if another request would fail as well, else EngineError, also after `server.answer_s`.
    """
    try:
        async with asyncio.timeout(server.answer_s):
            return await in_daemon_thread(lambda: server.ask(messages, sampled))
    except TimeoutError:
        raise NoAnswerError(f"{server.url}: no answer in {server.answer_s:g} s") from None


async def ask_again(
    ask: Callable[[], Awaitable[ChatReply]], *, attempts: int, back_off_s: float, name: str
) -> ChatReply:
    """Return the answer of `ask`, which is called at most `attempts` times.

    The pause after the first failure is `back_off_s`, and doubles after each further one up to
    LONGEST_PAUSE_S; a longer pause that the server asks for is kept. `name` is the model's, for the log.
    Raises the last EngineError, with the number of requests, and everything else that `ask` raises.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await ask()
        except EngineError as error:
            wish_s = error.after_s if isinstance(error, NoAnswerError) else 0.0
            is_last = attempt == attempts or wish_s > LONGEST_WISH_S
            if isinstance(error, NoAnswerError) and not error.is_worth_repeating:
                raise
            if is_last:
                requests = f"{attempt} {'request' if attempt == 1 else 'requests'}"
                raise EngineError(f"no answer to {requests}; the last: {error}") from None
            logger.debug("%s, attempt %d: %s", name, attempt, error)
            await asyncio.sleep(max(wish_s, min(LONGEST_PAUSE_S, back_off_s * 2 ** (attempt - 1))))
    raise AssertionError

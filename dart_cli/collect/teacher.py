"""A teacher that plays: a better model, whose actions become the steps of the policy that learns.

open_teacher    yields the policies of episodes, while the teacher's model is loaded or its server is asked
probe_teacher   checks that the teacher's server is there, before anything starts
TeacherPolicy   asks the teacher about its own prompt, and returns the policy's completion of the same action
ChatTeacher     a teacher behind a server
FolderTeacher   a teacher in this process

The teacher is prompted as [teacher.policy] says, with its own history, and acts in its own language. What is
stored is what the policy would have seen and written: its prompt as [policy] shows it, and the action in its
language and coordinates. The environment performs the action as the policy's text means it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bus.errors import ActionError, EngineError, NoAnswerError, PromptError, RefusalError, UserError
from bus.messages import ActRequest, Completion, SampledTokens, Sampling
from bus.packed import int32s
from dart_cli.chat.asking import LONGEST_WISH_S, answer, ask_again
from dart_cli.chat.server import (
    MOST_FAILED,
    ChatReply,
    ChatServer,
    Messages,
    Sampled,
    SettingNames,
    chat_server,
)
from dart_cli.collect.policies import ActionWriter, UnwritableError
from dart_cli.collect.teacher_record import BudgetSpentError, TeacherRecord
from dart_cli.config.schema import MODEL_ENGINES, Config, TeacherConfig
from dart_cli.config.teacher import teacher_config
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import hinted
from dart_cli.env.step_prompts import ActionSpec, StepPrompts, action_spec_of
from dart_cli.language.thoughts import thought_and_words
from dart_cli.player.chosen_model import loaded_model
from dart_cli.player.episodes import PlannedEpisode, PolicyOf
from dart_cli.rollout.worker import load_prompt_encoder
from dart_cli.runtime.waits import OpenWaits

if TYPE_CHECKING:  # a refusal must not wait for torch
    from dart_cli.policy.prompt import PromptRenderer
from envs.contract.actions import Click

ATTEMPTS = 4
"""Most requests for one answer."""
BACK_OFF_S = 2.0
"""Seconds of the first pause between them."""
_SEEDS = 2**31
_SIDE = 1000  # pixels of a screen, to try the action language with

REFUSED, MALFORMED, CUT_OFF = "refused", "malformed", "cut off at teacher.max_tokens"
UNWRITABLE, TOO_LONG = "not in the policy's language", "longer than rollout.max_tokens"
UNREADABLE = "with a prompt that the teacher cannot read"
NO_ANSWER, NO_BUDGET = "without an answer", "at the end of the budget"
LASTING = frozenset({REFUSED, MALFORMED, CUT_OFF, UNWRITABLE, TOO_LONG, UNREADABLE})
"""Reasons that another start would meet again, so that it does not play the seed again."""


class UnusableError(EngineError):
    """An answer of the teacher that is no step of the policy; `kind` is the reason that is counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class TeacherReply:
    """What a teacher answered: a completion of its own prompt, and a thought that its server took out."""

    completion: Completion
    thought: str = ""


class Teacher(Protocol):
    """Something that answers the teacher's prompts."""

    async def answer(self, request: ActRequest) -> TeacherReply:
        """Return the answer. Raises UnusableError, and UserError if no further question has an answer."""
        ...


class TeacherPolicy:
    """A policy that acts as the teacher does, in the prompts and the action language of the policy."""

    def __init__(
        self,
        env: AsyncEnv,
        teacher: Teacher,
        specs: tuple[ActionSpec, ActionSpec],
        writer: ActionWriter,
        options: TeacherConfig,
        *,
        hints: bool,
        on_unusable: Callable[[str], None],
    ) -> None:
        """Begin an episode. `specs` are the teacher's and the policy's; `on_unusable` is told the reason."""
        self._env = env
        self._teacher = teacher
        self._own_spec, self._spec = specs
        self._prompts = StepPrompts(self._own_spec)
        self._writer = writer
        self._options = options
        self._hints = hints
        self._on_unusable = on_unusable

    async def act(self, request: ActRequest) -> Completion:
        """Return the policy's completion of the teacher's action. Raises UnusableError, EnvError, UserError."""
        try:
            return await self._act(request)
        except UnusableError as error:
            self._on_unusable(error.kind)
            raise

    async def _act(self, request: ActRequest) -> Completion:
        # 1. Ask the teacher about the same screen, in its own prompt.
        screen = self._env.screen
        assert screen is not None
        instruction = request.instruction
        if self._hints:
            instruction = await hinted(self._env, request, self._own_spec) or instruction
        question = self._prompts.request(
            request.trajectory_id, request.step, instruction, screen, self._sampling(request)
        )
        reply = await self._teacher.answer(question)
        # 2. Read its actions.
        text = reply.completion.text
        actions, problem = self._prompts.read(text, screen)
        if not actions and reply.completion.stop == "length":
            raise UnusableError(CUT_OFF, f"the teacher's answer was cut off: {text[-60:]!r}")
        if not actions:
            raise UnusableError(
                MALFORMED, f"the teacher's answer {text[:60]!r} is no action: {problem}"
            )
        # 3. Write them as the policy would.
        thought, words = thought_and_words(text) if self._options.keep_thoughts else ("", "")
        if self._options.keep_thoughts and reply.thought:
            thought = reply.thought.strip()
        try:
            completion = self._writer.completion(
                actions, request, "teacher's action", thought=thought, words=words
            )
        except UnwritableError as error:
            raise UnusableError(TOO_LONG if error.is_long else UNWRITABLE, str(error)) from None
        own_actions, problem = self._spec.read(completion.text, screen, self._prompts.pointer)
        if not own_actions:
            raise UnusableError(UNWRITABLE, f"the policy cannot read its own action: {problem}")
        # 4. Both histories go on from the actions that are performed.
        self._prompts.remember(reply.completion, screen)
        for action in own_actions:
            self._prompts.move_pointer(action)
        return completion

    def _sampling(self, request: ActRequest) -> Sampling:
        return Sampling(
            temperature=self._options.temperature or 0.0,
            max_tokens=self._options.max_tokens,
            seed=request.sampling.seed,
        )


class FolderTeacher:
    """A teacher in this process."""

    def __init__(self, responder: Responder, record: TeacherRecord) -> None:
        self._responder = responder
        self._record = record

    async def answer(self, request: ActRequest) -> TeacherReply:
        """See Teacher."""
        self._record.begin_request()
        try:
            images = await self._responder.preload_images(request)  # held until the answer
            completion = await self._responder.answer(request)
            del images
        except PromptError as error:
            raise UnusableError(
                UNREADABLE, f"the teacher cannot read its prompt: {error}; see teacher.policy"
            ) from None
        except EngineError as error:
            raise UnusableError(NO_ANSWER, f"the teacher gave no answer: {error}") from None
        self._record.end_request(len(completion.prompt_token_ids), len(completion.sampled))
        return TeacherReply(completion)


class ChatTeacher:
    """A teacher behind a server. As many requests are under way as episodes are played."""

    def __init__(
        self,
        server: ChatServer,
        renderer: PromptRenderer,
        options: TeacherConfig,
        template: Mapping[str, Any],
        record: TeacherRecord,
        waits: OpenWaits,
    ) -> None:
        self._server = server
        self._renderer = renderer
        self._options = options
        self._template = template  # options of its chat template
        self._record = record
        self._waits = waits
        self._resume_at = 0.0  # monotonic seconds; the server asked to wait until then
        self._failed = 0  # questions in a row without an answer

    async def answer(self, request: ActRequest) -> TeacherReply:
        """See Teacher."""
        messages = await asyncio.to_thread(self._renderer.chat, request)
        options, temperature = self._options, self._options.temperature
        seed = request.sampling.seed % _SEEDS if temperature else None
        sampled = Sampled(options.max_tokens, temperature, seed, self._template)
        try:
            reply = await ask_again(
                lambda: self._ask(messages, sampled, request),
                attempts=ATTEMPTS,
                back_off_s=BACK_OFF_S,
                name=f"teacher {options.name}",
            )
        except RefusalError as error:
            self._failed = 0
            tokens = error.prompt_tokens, error.completion_tokens
            self._record.end_request(*tokens, is_refusal=True)
            raise UnusableError(REFUSED, str(error)) from None
        except BudgetSpentError as error:
            raise UnusableError(NO_BUDGET, str(error)) from None
        except EngineError as error:
            self._count_failure(error)
            raise UnusableError(NO_ANSWER, f"no answer of the teacher: {error}") from None
        self._failed = 0
        self._record.end_request(reply.prompt_tokens, reply.completion_tokens)
        return TeacherReply(_completion(reply), reply.thought)

    async def _ask(self, messages: Messages, sampled: Sampled, request: ActRequest) -> ChatReply:
        """Send one request, after a pause that the server asked any of them for."""
        longest_s = self._options.answer_s + LONGEST_WISH_S
        what = (
            f"teacher {self._options.name} to answer step {request.step} of {request.trajectory_id}"
        )
        with self._waits.waiting(what, longest_s):
            await asyncio.sleep(max(0.0, self._resume_at - time.monotonic()))
            self._record.begin_request()
            try:
                return await answer(self._server, messages, sampled)
            except NoAnswerError as error:
                pause_s = min(error.after_s, LONGEST_WISH_S)
                self._resume_at = max(self._resume_at, time.monotonic() + pause_s)
                raise

    def _count_failure(self, error: EngineError) -> None:
        """Count a question without an answer. Raises UserError if there were too many in a row."""
        self._failed += 1
        if self._failed >= MOST_FAILED:
            raise UserError(
                f"{self._failed} questions in a row had no answer of the teacher: {error}; "
                "what was collected is kept, start again when it answers"
            )


def _completion(reply: ChatReply) -> Completion:
    """Return a server's reply as a completion whose tokens are unknown."""
    return Completion(
        prompt_token_ids=int32s([]),
        sampled=SampledTokens(token_ids=[], behaviour_logprobs=[], entropies=[], version_spans=[]),
        text=reply.text,
        stop="length" if reply.is_cut_off else "end",
        queue_s=0.0,
        engine_s=0.0,
    )


# --- opening -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_teacher(
    config: Config, record: TeacherRecord, writer: ActionWriter, waits: OpenWaits, *, hints: bool
) -> AsyncIterator[PolicyOf]:
    """Yield a function that returns the policy of an episode. A model folder stays loaded during the block.

    Raises ModelError, UserError if the model cannot write its action language, and what `loaded_model` raises.
    """
    own = teacher_config(config)
    specs = action_spec_of(own), action_spec_of(config)

    def policies(teacher: Teacher) -> PolicyOf:
        def policy_of(env: AsyncEnv, episode: PlannedEpisode) -> TeacherPolicy:
            def on_unusable(kind: str) -> None:
                record.note(episode.name, kind, lasts=kind in LASTING)

            return TeacherPolicy(
                env,
                teacher,
                specs,
                writer,
                config.teacher,
                hints=hints,
                on_unusable=on_unusable,
            )

        return policy_of

    if config.teacher.url:
        from dart_cli.policy.loader import load_policy
        from dart_cli.policy.prompt import make_renderer, template_options

        # The server has the teacher's chat template; a small model's parts write the messages for it.
        light = await asyncio.to_thread(load_policy, "builtin:tiny", weights=False)
        renderer = make_renderer(light, own.policy)
        template = template_options(own.policy)
        server = _server(config.teacher)
        yield policies(ChatTeacher(server, renderer, config.teacher, template, record, waits))
        return
    if own.rollout.engine in MODEL_ENGINES:
        with waits.waiting("the teacher's tokenizer to load"):
            _check_words(await asyncio.to_thread(load_prompt_encoder, own), own)
    async with loaded_model(own, None, -1, waits=waits) as model:
        yield policies(FolderTeacher(model.responder, record))


def probe_teacher(teacher: TeacherConfig) -> None:
    """Raise UserError if the teacher's server is not there, refuses the key or answers with a page."""
    _server(teacher).probe()


def _server(teacher: TeacherConfig) -> ChatServer:
    return chat_server(
        teacher.url,
        teacher.name,
        key_variable=teacher.key_env,
        answer_s=teacher.answer_s,
        names=SettingNames("teacher.url", "teacher.name", "teacher.key_env"),
    )


def _check_words(encoder: PromptEncoder, own: Config) -> None:
    """Raise UserError if the teacher's tokenizer cannot write its action language."""
    spec = action_spec_of(own)
    coordinates = spec.coordinate_map_of(_SIDE, _SIDE)
    request = ActRequest(
        trajectory_id="words",
        step=0,
        instruction="",
        turns=[],
        screenshot=b"",
        width=_SIDE,
        height=_SIDE,
        sampling=Sampling(temperature=0.0, max_tokens=1, seed=0),
    )
    try:
        text = encoder.closed_thought() + spec.action_parser.format(Click(x=1, y=1), coordinates)
        encoder.encode_completion(text, request)
    except ActionError:
        return  # a language without clicks
    except EngineError as error:
        raise UserError(
            f"teacher.model = {own.model.path!r} cannot write teacher.policy.action_parser = "
            f"{own.policy.action_parser!r}: {error}; set the family that it was trained for"
        ) from None

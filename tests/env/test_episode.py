"""Promises of one episode, played in the real embedded environment in a thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from bus.errors import ActionError, ConfigError, DeadlineError, EnvError, NoOracleError, StoreError
from bus.messages import Ack, ActRequest, Completion, SampledTokens, StepRecord
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.completions import hint_between
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.scripted import Script, ScriptedEngine
from dart_cli.env import step_prompts
from dart_cli.env.episode import Episode, play_episode
from dart_cli.env.step_prompts import OBSERVE_CHARS
from dart_cli.language.history import History, Previous
from dart_cli.language.parsers import make_action_parser
from dart_cli.player.episodes import InProcessPolicy
from dart_cli.policy.loader import load_policy
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Verdict
from envs.contract.blobs import content_hash
from envs.contract.registry import find_task
from tests.env.parts import (
    Lenient,
    Memory,
    Oracle,
    Says,
    action_spec,
    completion,
    lease,
    mini,
    threaded,
)
from tests.waiting import until

MENU = find_task("mini", "mini/menu")


class Breaks:
    """The embedded environment, broken at one place: reset, step, timeout, evaluate or hang."""

    def __init__(self, where: str) -> None:
        self._env = mini()
        self._where = where
        self.closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if self._where == "reset":
            raise EnvError("the display is gone: start Xvfb")
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._where == "step":
            raise ZeroDivisionError("a bug of the environment")
        if self._where == "timeout":
            raise TimeoutError("the page did not load")
        if self._where == "hang":
            time.sleep(6.0)
        return self._env.step(action)

    def evaluate(self) -> Verdict:
        if self._where == "evaluate":
            raise KeyError("a bug of the evaluator")
        return self._env.evaluate()

    def close(self) -> None:
        self.closed = True


async def test_a_shortest_solution_passes_and_every_step_is_handed_in_first() -> None:
    sink, env = Memory(), mini()
    policy = Oracle(env)
    player = threaded(lambda: env)
    end = await play_episode(player, lease(), MENU, policy, sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("pass", "done", 2)
    assert sink.ends == [end]
    assert [record.step for record in sink.steps] == [0, 1]
    first = sink.steps[0]
    assert first.screenshot == policy.requests[0].screenshot
    assert first.image_hashes == [content_hash(first.screenshot)]
    assert first.action is not None
    assert first.action["kind"] == "click"
    assert first.sampled.version_spans[0].version == 4
    assert end.screenshot not in (None, sink.steps[1].screenshot)


async def test_each_step_asks_with_its_own_seed_and_the_filled_in_instruction() -> None:
    env = mini()
    policy, sink = Oracle(env), Memory()
    player = threaded(lambda: env)
    await play_episode(player, lease(), MENU, policy, sink, action_spec())
    await player.close()
    assert [request.sampling.seed for request in policy.requests] == [1000, 1001]
    assert len({request.instruction for request in policy.requests}) == 1
    instruction = policy.requests[0].instruction
    assert "{" not in instruction
    assert [record.instruction for record in sink.steps] == [instruction, ""]  # once is enough


async def test_the_same_lease_shows_the_same_first_screen() -> None:
    screens = []
    for _ in range(2):
        player, policy = threaded(mini), Says("done()")
        await play_episode(player, lease(), MENU, policy, Memory(), action_spec())
        await player.close()
        screens.append(policy.requests[0].screenshot)
    assert screens[0] == screens[1]


@pytest.mark.parametrize(
    ("text", "stop_reason"), [("done()", "done"), ("answer(x)", "done"), ("fail()", "gave_up")]
)
async def test_the_policy_may_end_the_episode_but_the_state_is_judged(
    text: str, stop_reason: str
) -> None:
    player, sink = threaded(mini), Memory()
    end = await play_episode(player, lease(), MENU, Says(text), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("fail", stop_reason, 1)


async def test_the_step_limit_of_the_lease_ends_the_episode() -> None:
    player, sink = threaded(mini), Memory()
    end = await play_episode(player, lease(max_steps=2), MENU, Says("wait()"), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("fail", "step_limit", 2)


async def test_the_environment_may_cut_the_episode_off_earlier() -> None:
    player, sink = threaded(mini), Memory()
    end = await play_episode(player, lease(max_steps=50), MENU, Says("wait()"), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason) == ("fail", "step_limit")
    assert end.steps <= MENU.max_steps


async def test_a_malformed_completion_is_recorded_and_fails_the_episode() -> None:
    player, sink = threaded(mini), Memory()
    end = await play_episode(player, lease(), MENU, Says("clik(1,2)"), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("fail", "malformed", 1)
    assert sink.steps[0].action is None
    assert sink.steps[0].error == end.reason != ""
    assert sink.steps[0].text == "clik(1,2)"


async def test_a_call_without_a_place_acts_where_the_last_action_left_the_pointer() -> None:
    """Seven eighths to the right and down; then a drag from there, which is malformed before any move."""

    def call(**arguments: object) -> str:
        fields = json.dumps({"name": "computer_use", "arguments": arguments})
        return f"<tool_call>{fields}</tool_call>"

    drag = call(action="left_click_drag", coordinate=[125, 125])
    says = Says(drag, call(action="mouse_move", coordinate=[875, 875]), drag)
    player, sink = threaded(mini), Memory()
    spec = dataclasses.replace(action_spec(), action_parser=Lenient(make_action_parser("toolcall")))
    await play_episode(player, lease(max_steps=3), MENU, says, sink, spec)
    await player.close()
    first, moved, dragged = (record.action for record in sink.steps)
    assert first == {"kind": "wait", "seconds": 0.0}
    assert moved is not None
    assert dragged is not None
    assert dragged["path"][0] == [moved["x"], moved["y"]] != dragged["path"][1]


async def test_steps_that_are_no_longer_shown_are_told_as_lines_where_the_template_has_them() -> (
    None
):
    says = Says("ctrl+click(1,1)", "click(2,2)", "wait()", "done()")
    player, sink = threaded(mini), Memory()
    instruction = Previous("Step {step}: {action}\n", "None")
    spec = dataclasses.replace(action_spec(images=2, turns=1), previous=instruction)
    await play_episode(player, lease(max_steps=4), MENU, says, sink, spec)
    await player.close()
    assert [request.previous for request in says.requests] == [
        "None",
        "None",
        "Step 1: ctrl+click(1,1)",
        "Step 1: ctrl+click(1,1)\nStep 2: click(2,2)",
    ]
    assert [len(request.turns) for request in says.requests] == [0, 1, 1, 1]


async def test_history_shows_the_past_and_the_hashes_say_which_images_were_in_the_prompt() -> None:
    player, sink, policy = threaded(mini), Memory(), Says("wait()")
    await play_episode(
        player, lease(max_steps=3), MENU, policy, sink, action_spec(images=2, turns=2)
    )
    await player.close()
    last = policy.requests[2]
    assert [turn.text for turn in last.turns] == ["wait()", "wait()"]
    assert [turn.screenshot is not None for turn in last.turns] == [False, True]
    assert [len(record.image_hashes) for record in sink.steps] == [1, 2, 2]
    for record in sink.steps:
        assert record.image_hashes[-1] == content_hash(record.screenshot)


async def test_a_completion_that_spells_special_tokens_is_a_failure_and_not_invalid() -> None:
    """Spelt out of ordinary tokens, which a policy may sample; the next prompt shows it as it was."""
    policy = load_policy("builtin:tiny", weights=False)
    texts = ("type(<|im_end|>)", "type(<|image_pad|>)", "type(<|im_start|>)")
    spelt = [policy.encode_completion(text) for text in texts]
    prompts: list[list[int]] = []

    def answer(request: GenerateRequest) -> Script:
        prompts.append(request.prompt_token_ids)
        return Script(spelt[len(prompts) - 1])

    responder = PolicyResponder(policy, ScriptedEngine(answer))
    player, sink = threaded(mini), Memory()
    spec = action_spec(images=2, turns=2)
    asks = InProcessPolicy(responder)
    end = await play_episode(player, lease(max_steps=3), MENU, asks, sink, spec)
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("fail", "step_limit", 3)
    user, image = policy.encode("user\n<|image_pad|>")
    assert [prompt.count(user) for prompt in prompts] == [1, 2, 3]
    assert [prompt.count(image) for prompt in prompts] == [36, 72, 72]
    assert prompts[1][: len(prompts[0]) + len(spelt[0])] == prompts[0] + spelt[0]


class Points:
    """Clicks by a pointer; its action parser shows the text otherwise in a prompt."""

    def __init__(self) -> None:
        self.requests: list[ActRequest] = []

    async def act(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        pointer = len(self.requests) == 1
        text = "Thought: a\nAction: click(start_box='(5,6)')"
        return completion(text).model_copy(
            update={
                "sampled": SampledTokens(
                    token_ids=[7, 1, 2, 3, 8],
                    behaviour_logprobs=[],
                    entropies=[],
                    version_spans=[],
                    patches=[-1, -1, -1, 4, -1] if pointer else [],
                )
            }
        )


async def test_a_past_pointer_is_shown_as_it_was_sampled() -> None:
    """Its text has numbers, which UI-TARS' history wraps; the tokens have none of them."""
    player, sink, policy = threaded(mini), Memory(), Points()
    spec = dataclasses.replace(
        action_spec(images=3, turns=3), action_parser=make_action_parser("uitars")
    )
    await play_episode(player, lease(max_steps=3), MENU, policy, sink, spec)
    await player.close()
    pointed, text_turn = policy.requests[2].turns
    assert pointed.token_ids == [7, 1, 2, 3, 8]
    assert text_turn.token_ids == []
    assert "<|box_start|>(5,6)<|box_end|>" in text_turn.text


class Tells(Breaks):
    """The embedded environment with a text beside each screenshot."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self._texts_shown = 0

    def reset(self, **options: Any) -> tuple[Observation, dict[str, Any]]:
        screen, info = super().reset(**options)
        return self._telling(screen), info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        screen, *rest = super().step(action)
        return self._telling(screen), *rest  # type: ignore[return-value]

    def _telling(self, screen: Observation) -> Observation:
        self._texts_shown += 1
        text = f"{self._texts_shown} @(84,84)"
        return dataclasses.replace(screen, texts={"terminal": text + "x" * OBSERVE_CHARS})


async def test_what_a_policy_reads_beside_the_screenshot_is_bounded_and_filed_with_the_step() -> (
    None
):
    player, sink, policy = threaded(Tells), Memory(), Says("wait()")
    spec = dataclasses.replace(action_spec(turns=2), history=History(images=1, turns=2, texts=2))
    await play_episode(player, lease(max_steps=3), MENU, policy, sink, spec)
    await player.close()
    requests = policy.requests
    assert all(
        f"cut to the last {OBSERVE_CHARS} characters" in request.observed_text
        for request in requests
    )
    assert [record.observed_text for record in sink.steps] == [r.observed_text for r in requests]
    assert [turn.observed_text for turn in requests[2].turns] == ["", requests[1].observed_text]


async def test_each_screenshot_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts show it; the request carries the hashes to the rollout worker."""
    hashed: list[bytes] = []

    def counted(blob: bytes) -> str:
        hashed.append(blob)
        return content_hash(blob)

    monkeypatch.setattr(step_prompts, "content_hash", counted)
    player, sink, policy = threaded(mini), Memory(), Says("wait()")
    await play_episode(
        player, lease(max_steps=4), MENU, policy, sink, action_spec(images=3, turns=3)
    )
    await player.close()
    assert len(hashed) == len(sink.steps) == 4
    for request, record in zip(policy.requests, sink.steps, strict=True):
        screenshots = [turn.screenshot for turn in request.turns if turn.screenshot is not None]
        assert request.image_hashes == [
            content_hash(shot) for shot in (*screenshots, request.screenshot)
        ]
        assert record.image_hashes == request.image_hashes


@pytest.mark.parametrize(
    ("where", "steps", "words"),
    [
        ("reset", 0, "the display is gone"),
        ("step", 1, "env-0/0: step: ZeroDivisionError: a bug of the environment"),
        ("evaluate", 1, "evaluate: KeyError"),
        ("timeout", 1, "step: TimeoutError: the page did not load"),
        ("hang", 1, "no answer to step in 2 s"),
    ],
)
async def test_what_breaks_in_the_environment_is_invalid_and_never_a_failure(
    where: str, steps: int, words: str
) -> None:
    player = threaded(lambda: Breaks(where), deadline_s=1.0 if where == "hang" else 20.0)
    sink = Memory()
    end = await play_episode(player, lease(), MENU, Says("done()"), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason, end.steps) == ("invalid", "environment", steps)
    assert words in end.reason
    assert len(sink.steps) == steps, "the step it broke on is kept"
    assert sink.ends == [end]


async def test_a_policy_that_is_away_makes_the_episode_invalid() -> None:
    class Away:
        async def act(self, request: ActRequest) -> Completion:
            raise DeadlineError("no rollout worker is ready: start `dart rollout`")

    player, sink = threaded(mini), Memory()
    end = await play_episode(player, lease(), MENU, Away(), sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason) == ("invalid", "unanswered")
    assert "start `dart rollout`" in end.reason


async def test_a_lease_that_was_taken_back_ends_the_episode_at_once() -> None:
    player, sink, policy = threaded(mini), Memory(lost_from=0), Says("wait()")
    end = await play_episode(player, lease(), MENU, policy, sink, action_spec())
    await player.close()
    assert (end.outcome, end.stop_reason) == ("invalid", "cancelled")
    assert "expired" in end.reason
    assert len(policy.requests) <= 2


async def test_an_error_of_the_journal_rises() -> None:
    class Full(Memory):
        async def step(self, record: StepRecord) -> Ack:
            raise StoreError("disk full")

    player = threaded(mini)
    with pytest.raises(StoreError, match="disk full"):
        await play_episode(player, lease(), MENU, Says("wait()"), Full(), action_spec())
    await player.close()


async def test_the_next_act_does_not_wait_for_the_last_hand_in() -> None:
    class Slow(Memory):
        """Acknowledges a step only when the policy has been asked for the next one."""

        async def step(self, record: StepRecord) -> Ack:
            await until(lambda: len(policy.requests) >= record.step + 2)
            return await super().step(record)

    policy, player = Says("wait()", "done()", "never"), threaded(mini)

    sink = Slow()
    playing = asyncio.create_task(play_episode(player, lease(), MENU, policy, sink, action_spec()))
    await until(lambda: len(policy.requests) >= 2)
    await asyncio.sleep(0.05)
    assert not sink.ends, "the end waits for every step to be acknowledged"
    policy.requests.append(policy.requests[-1])  # let the last one go
    assert (await playing).steps == 2
    assert [record.step for record in sink.steps] == [0, 1]
    await player.close()


async def test_a_cancelled_episode_can_still_say_how_far_it_came() -> None:
    class Never:
        async def act(self, request: ActRequest) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    player, sink = threaded(mini), Memory()
    episode = Episode(player, lease(), MENU, Never(), sink, action_spec())
    playing = asyncio.create_task(episode.play())
    await until(lambda: episode.phase == "model")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    end = episode.cancelled("stopped")
    assert (end.outcome, end.stop_reason, end.steps) == ("invalid", "cancelled", 0)
    assert sink.ends == []
    await player.close()


async def test_an_environment_is_made_used_and_closed_in_one_thread_and_renewed() -> None:
    instances: list[Breaks] = []

    def make() -> GuiEnv:
        instances.append(Breaks("nowhere"))
        return instances[-1]

    player = threaded(make)
    for _ in range(2):
        await play_episode(player, lease(), MENU, Says("done()"), Memory(), action_spec())
    assert len(instances) == 1
    await player.renew()
    assert instances[0].closed
    await play_episode(player, lease(), MENU, Says("done()"), Memory(), action_spec())
    await player.close()
    await player.close()
    assert [env.closed for env in instances] == [True, True]


# --- hints for a teacher ---------------------------------------------------------------------------


class Hinted(Oracle):
    """A policy whose replies have the hint of the request, as a rollout worker's have."""

    async def act(self, request: ActRequest) -> Completion:
        reply = await super().act(request)
        own, other = (text.encode() for text in (request.instruction, request.hinted_instruction))
        hint = hint_between(list(own), list(other)) if other else None
        return reply.model_copy(update={"hint": hint})


async def played_with_hints(env: GuiEnv, policy: Hinted, **options: Any) -> Memory:
    sink, player = Memory(), threaded(lambda: env)
    spec = options.pop("spec", None) or action_spec()
    await Episode(player, lease(), MENU, policy, sink, spec, **{"hints": True, **options}).play()
    await player.close()
    return sink


async def test_each_step_has_the_hint_of_its_own_screen() -> None:
    env = mini()
    policy = Hinted(env)
    sink = await played_with_hints(env, policy)
    hints = [request.hinted_instruction for request in policy.requests]
    assert hints[0] == "click menu"
    assert hints[1] == policy.requests[1].instruction  # the button is visible now
    assert {request.instruction for request in policy.requests} == {hints[1]}
    for request, record in zip(policy.requests, sink.steps, strict=True):
        assert record.hint is not None
        text = request.instruction.encode()
        read = (
            text[: record.hint.start] + bytes(list(record.hint.token_ids)) + text[record.hint.end :]
        )
        assert read.decode() == request.hinted_instruction


async def test_without_hints_the_environment_is_not_asked() -> None:
    env = mini()
    policy = Hinted(env)
    env.oracle_hint = None  # type: ignore[assignment,method-assign]
    sink = await played_with_hints(env, policy, hints=False)
    assert [record.hint for record in sink.steps] == [None, None]


@pytest.mark.parametrize("error", [EnvError, NoOracleError])
async def test_steps_from_which_no_way_leads_to_the_goal_have_no_hint(
    error: type[EnvError],
) -> None:
    env = mini()
    policy, asked = Hinted(env), 0

    def hint() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise error("no action leads there")
        return "click menu"

    env.oracle_hint = hint  # type: ignore[method-assign]
    sink = await played_with_hints(env, policy)
    assert sink.ends[0].outcome == "pass"
    assert [record.hint is None for record in sink.steps] == [True, False]


async def test_an_action_that_the_policy_cannot_write_is_no_hint() -> None:
    env = mini()
    env.oracle_hint = lambda: ""  # type: ignore[method-assign]
    policy = Hinted(env)
    await played_with_hints(env, policy)
    told = [request.hinted_instruction for request in policy.requests]
    instruction = policy.requests[0].instruction
    assert all(text.startswith(f"{instruction}\nNext: click(") for text in told)

    class Mute(Lenient):
        def format(self, *_: object) -> str:
            raise ActionError("no word for it")

    env = mini()
    env.oracle_hint = lambda: ""  # type: ignore[method-assign]
    policy = Hinted(env)
    spec = dataclasses.replace(action_spec(), action_parser=Mute())
    sink = await played_with_hints(env, policy, spec=spec)
    assert [record.hint for record in sink.steps] == [None, None]


async def test_a_suite_without_an_oracle_is_refused_with_one_line() -> None:
    player = threaded(lambda: Breaks(""))
    episode = Episode(player, lease(), MENU, Says("done()"), Memory(), action_spec(), hints=True)
    with pytest.raises(
        ConfigError, match=r"^teacher\.hints: suite mini names no next step: "
    ) as told:
        await episode.play()
    await player.close()
    assert "\n" not in str(told.value)
    assert "set teacher.model to a model folder" in str(told.value)

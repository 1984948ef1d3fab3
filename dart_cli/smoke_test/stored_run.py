"""What only a rehearsal sees, of the steps and verdicts that it stored: mistakes that a plan cannot find.

Seen            counts and lengths of what was played
look            them, from the run's database
language_unnamed, prompt_too_long, reward_constant   one line each, empty where there is nothing to tell
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.doctor.plan import HEADER, Plan
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers import make_action_parser
from dart_cli.smoke_test.coin_suite import judged
from dart_cli.suite_check.probes import Probed
from envs.contract.actions import Click

_WORD = re.compile(r"\b[a-z_]{4,}\b")


@dataclass(frozen=True)
class Seen:
    """What was played until the run was ended."""

    episodes: int
    steps: int
    malformed: int  # episodes that a text ended that is no action
    invalid: int
    longest: int  # tokens of a prompt
    header: int  # of them, in the prompt of a first step, that are no screen's
    judged: dict[str, int]  # the suite's own outcomes, beside the coin's
    prompt: str  # the text of a first step's prompt
    version_bytes: int


def look(config: Config) -> Seen:
    """Read it from the run's database. Raises RunDirectoryError, StoreError."""
    from dart_cli.player.chosen_model import newest_announced
    from dart_cli.policy.loader import load_policy

    policy = load_policy(config.model.path, weights=False)
    outcomes = Counter[str]()
    episodes = steps = malformed = invalid = longest = header = 0
    prompt: list[int] = []
    with open_reader(config.run.dir) as reader:
        for each in reader.trajectories():
            if each.outcome is None or each.stop_reason in ("cancelled", "unanswered"):
                continue  # the end of the run took it back
            episodes += 1
            invalid += each.outcome == "invalid"
            malformed += each.stop_reason == "malformed"
            if own := judged(each.verdict_reason or ""):
                outcomes[own] += 1
            for step in reader.steps(each.id):
                steps += 1
                longest = max(longest, len(step.prompt_token_ids))
                if step.step == 0:
                    prompt = list(step.prompt_token_ids)
                    texts = [token for token in prompt if token != policy.image_token_id]
                    header = max(header, len(texts))
    shown = [token for token in prompt if token != policy.image_token_id]
    published = newest_announced(config)
    return Seen(
        episodes,
        steps,
        malformed,
        invalid,
        longest,
        header,
        dict(outcomes),
        policy.decode(shown),
        0 if published is None else published.size_bytes,
    )


def language_unnamed(config: Config, prompt: str) -> str:
    """Return an action language whose words the prompt does not have; a model that ships was trained without them."""
    if config.model.path in BUILTIN:
        return ""
    action_parser = make_action_parser(config.policy.action_parser)
    text = action_parser.format(Click(x=1, y=1), CoordinateMap(1000, 1000, 1000, 1000))
    missing = [word for word in dict.fromkeys(_WORD.findall(text)) if word not in prompt]
    if not missing:
        return ""
    return (
        f'policy.action_parser = "{config.policy.action_parser}" reads {" ".join(text.split())!r}, and no prompt has '
        f"{', '.join(missing)}: tell the actions in policy.template or policy.system_prompt, or set policy.family"
    )


def prompt_too_long(config: Config, plan: Plan | None, seen: Seen) -> str:
    """Prompts of the configured history, with the text as it was seen, beyond what the engine takes."""
    completion = config.rollout.max_tokens
    longest = seen.longest + completion
    if plan is not None:
        longest = max(longest, plan.longest - HEADER + seen.header)
    limit = config.vllm.max_model_len or (plan.positions if plan else 0)
    if not limit or longest <= limit:
        return ""
    return (
        f"vllm.max_model_len = {limit}, and prompt and completion have up to {longest} tokens ({seen.header} of "
        f"text before the first screen's, {completion} of rollout.max_tokens): the engine refuses such prompts; "
        "raise it, or lower policy.history_images or policy.history_turns"
    )


def reward_constant(suite: str, probed: Sequence[Probed], own: dict[str, int]) -> str:
    """Verdicts that are all the same, a solution's too."""
    outcomes: list[str] = [each.outcome for each in probed if each.outcome in ("pass", "fail")]
    solved = [each for each in probed if each.probe == "oracle" and each.outcome is not None]
    outcomes += [name for name, count in own.items() for _ in range(count)]
    if not outcomes or len(set(outcomes)) > 1:
        return ""
    if outcomes[0] == "fail" and not solved:
        return ""  # nothing is known that would pass
    also = ", that of the suite's own solution too" if solved else ""
    return (
        f"suite {suite}: all {len(outcomes)} verdicts are {outcomes[0]}{also}: no group has a gradient; correct "
        f"its evaluator: `dart env check {suite}`"
    )

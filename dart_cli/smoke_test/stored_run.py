"""Read the run that a smoke test played, and find the mistakes that a plan cannot find.

StoredRun         counts and lengths of the run's steps and verdicts
read_stored_run   reads them from the run's database
find_problems     the errors; each of the three checks below gives the text of one, empty if all is well:
                  unnamed_actions, too_long_prompts, constant_reward
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.doctor.plan import HEADER, Plan
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers import make_action_parser
from dart_cli.runtime.findings import error
from dart_cli.smoke_test.coin_suite import suite_outcome
from dart_cli.suite_check.probes import ProbeEpisode
from envs.contract.actions import Click

_WORD = re.compile(r"\b[a-z_]{4,}\b")


@dataclass(frozen=True)
class StoredRun:
    """Counts and lengths of what was played until the run ended."""

    episodes: int
    steps: int
    malformed: int  # episodes that ended because a completion was no action
    invalid: int
    longest: int  # tokens of the longest prompt
    header: int  # most tokens of a first step's prompt that do not belong to its screen
    suite_outcomes: dict[str, int]  # outcome -> how often the suite itself gave it
    prompt: str  # the text of a first step's prompt
    version_bytes: int


def read_stored_run(config: Config) -> StoredRun:
    """Read the run of `config` from its database. Raises RunDirectoryError, StoreError."""
    from dart_cli.player.chosen_model import newest_announced
    from dart_cli.policy.loader import load_policy

    policy = load_policy(config.model.path, weights=False)
    outcomes = Counter[str]()
    episodes = steps = malformed = invalid = longest = header = 0
    prompt: list[int] = []
    with open_reader(config.run.dir) as reader:
        for trajectory in reader.trajectories():
            # The end of the run cancels the episodes that are being played.
            if trajectory.outcome is None or trajectory.stop_reason in ("cancelled", "unanswered"):
                continue
            episodes += 1
            invalid += trajectory.outcome == "invalid"
            malformed += trajectory.stop_reason == "malformed"
            if outcome := suite_outcome(trajectory.verdict_reason or ""):
                outcomes[outcome] += 1
            for step in reader.steps(trajectory.id):
                steps += 1
                longest = max(longest, len(step.prompt_token_ids))
                if step.step == 0:
                    prompt = [
                        token for token in step.prompt_token_ids if token != policy.image_token_id
                    ]
                    header = max(header, len(prompt))
    published = newest_announced(config)
    return StoredRun(
        episodes=episodes,
        steps=steps,
        malformed=malformed,
        invalid=invalid,
        longest=longest,
        header=header,
        suite_outcomes=dict(outcomes),
        prompt=policy.decode(prompt),
        version_bytes=0 if published is None else published.size_bytes,
    )


def find_problems(
    config: Config, plan: Plan | None, run: StoredRun, probes: Sequence[ProbeEpisode]
) -> Iterator[Finding]:
    """Yield an error for each mistake that the stored run shows.

    `config` is the user's own configuration and `plan` the doctor's plan of it, None if there is none.
    `probes` are episodes of the suite that were played without a model.
    """
    problems = {
        "prompts": unnamed_actions(config, run.prompt),
        "vllm.max_model_len": too_long_prompts(config, plan, run),
        "rewards": constant_reward(config.env.suite, probes, run.suite_outcomes),
    }
    for subject, text in problems.items():
        if text:
            problem, _, fix = text.partition("; ")
            yield error(subject, problem, fix)


def unnamed_actions(config: Config, prompt: str) -> str:
    """Return an error if `prompt` lacks words of the action language, else an empty text.

    Models that ship with dart were trained without these words, so they are not checked.
    """
    if config.model.path in BUILTIN:
        return ""
    action_parser = make_action_parser(config.policy.action_parser)
    text = action_parser.format(Click(x=1, y=1), CoordinateMap(1000, 1000, 1000, 1000))
    missing = [word for word in dict.fromkeys(_WORD.findall(text)) if word not in prompt]
    if not missing:
        return ""
    return (
        f'policy.action_parser = "{config.policy.action_parser}" reads {" ".join(text.split())!r}, but no prompt '
        f"has {', '.join(missing)}; describe the actions in policy.template or policy.system_prompt, or set "
        "policy.family"
    )


def too_long_prompts(config: Config, plan: Plan | None, run: StoredRun) -> str:
    """Return an error if the longest prompt exceeds the engine's limit, else an empty text.

    The prompt is computed from the configured history and the length of this run's text.
    """
    completion = config.rollout.max_tokens
    longest = run.longest + completion
    if plan is not None:
        longest = max(longest, plan.longest - HEADER + run.header)
    limit = config.vllm.max_model_len or (plan.positions if plan else 0)
    if not limit or longest <= limit:
        return ""
    return (
        f"vllm.max_model_len = {limit}, but prompt and completion have up to {longest} tokens ({run.header} of "
        f"text before the first screen, {completion} of rollout.max_tokens), and the engine refuses such prompts; "
        "raise it, or lower policy.history_images or policy.history_turns"
    )


def constant_reward(suite: str, probes: Sequence[ProbeEpisode], outcomes: dict[str, int]) -> str:
    """Return an error if all verdicts are the same, a solution's included, else an empty text.

    Failures alone are no error as long as no solution is known: nothing shows that a pass is possible.
    """
    verdicts: list[str] = [probe.outcome for probe in probes if probe.outcome in ("pass", "fail")]
    has_solution = any(probe.probe == "oracle" and probe.outcome is not None for probe in probes)
    verdicts += [outcome for outcome, count in outcomes.items() for _ in range(count)]
    if not verdicts or len(set(verdicts)) > 1:
        return ""
    if verdicts[0] == "fail" and not has_solution:
        return ""
    also = ", the suite's own solution included" if has_solution else ""
    return (
        f"suite {suite}: all {len(verdicts)} verdicts are {verdicts[0]}{also}, so no group has a gradient; correct "
        f"its evaluator: `dart env check {suite}`"
    )

"""Supervised training of a model folder: the `dart tune` verb.

run_tune      reads the data, trains, writes the folder whole or not at all
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.console import Console

from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import read_json, screens_of
from dart_cli.config.schema import Config
from dart_cli.grounding.formats import folder_of
from dart_cli.hardware.device import pick_device
from dart_cli.language.parsers import action_parser_identity
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.runtime.work_folder import refuse_other
from dart_cli.tune.data import ActionData, ItemData, read_data
from dart_cli.tune.defaults import Chosen, chosen
from dart_cli.tune.episodes import ActionExamples
from dart_cli.tune.examples import Asked, Examples, Learned, acting, answers_of, prompts_of
from dart_cli.tune.held_out import Measured, Meter, Outcome, Pointed, Split, fallen, split_rows
from dart_cli.tune.output import Tuned, described, tell, tell_stopped, write_tuned
from dart_cli.tune.pace import HeldOutWatch
from dart_cli.tune.settings import TuneSettings, configured, part_of
from dart_cli.tune.stages import interruptible, train_stages
from dart_cli.tune.training_set import ExampleSet, LearnedRows, StepSet, TrainingSet
from dart_cli.tune.training_state import KeptTraining
from dart_cli.tune.trajectories import Trajectories
from dart_cli.weights.folder import folder_digest


def run_tune(
    config: Config, *, fresh: bool = False, as_json: bool = False, dry_run: bool = False
) -> Tuned | None:
    """Train as a checked configuration says; None for a dry run.

    Raises UserError, ConfigError and ModelError before anything starts, and KeyboardInterrupt where a
    signal asked it to end: a second start goes on from there.
    """
    with ExitStack() as held:
        data = read_data(config)
        if isinstance(data, Trajectories):
            held.callback(data.close)
            return _tune(config, _Plan(config, data, None, "completions"), fresh, as_json, dry_run)
        if isinstance(data, ActionData):
            plan = _Plan(acting(config), data, None, "actions")
            return _tune(config, plan, fresh, as_json, dry_run)
        asked = prompts_of(config, data.verifier)
        return _tune(
            config, _Plan(asked.config, data, asked, asked.learned), fresh, as_json, dry_run
        )


@dataclass(frozen=True)
class _Plan:
    """What is trained."""

    config: Config  # with the [policy] of the prompts
    data: ItemData | ActionData | Trajectories
    asked: (
        Asked | None
    )  # how items are asked; what acts is asked by [policy], or was when it was played
    learned: Learned

    @property
    def pointed(self) -> Pointed | None:
        """The items whose places shall be hit, where the model learns to name places."""
        if isinstance(self.data, ItemData) and self.asked and self.learned in ("pointer", "text"):
            return Pointed(self.data.items, self.asked.answers)
        return None

    def training_set(self, policy: LoadedPolicy) -> TrainingSet:
        config, data = self.config, self.data
        if isinstance(data, Trajectories):
            return StepSet(policy, data, config.train)
        micro_batch = config.tune.micro_batch
        if isinstance(data, ActionData):
            acts = ActionExamples(policy, config, data.demonstrations)
            return ExampleSet(policy, acts, micro_batch)
        assert self.asked is not None
        examples = Examples(policy, config, data.items, answers_of(self.asked, policy))
        return ExampleSet(policy, examples, micro_batch)


def _tune(config: Config, plan: _Plan, fresh: bool, as_json: bool, dry_run: bool) -> Tuned | None:
    split = split_rows(plan.data.names, config.tune.held_out, config.run.seed)
    use = chosen(
        config.tune,
        rows=len(split.learned),
        parameters=shape_of(read_json(folder_of(config.model.path), "config.json")).parameters,
        lora=config.model.lora is not None,
        points=plan.learned == "pointer",
    )
    settings = _settings(plan, use, split)
    console = Console(markup=False, highlight=False)
    out = config.tune.out
    assert out is not None
    part = part_of(out)
    if not fresh:
        refuse_other(part, settings)
    if dry_run:
        for subject, text in described(plan.config, use, plan.learned, plan.data.told, split):
            console.print(f"{subject + ':':<10} {text}", soft_wrap=True)
        if use.line:
            console.print(use.line, soft_wrap=True)
        console.print("valid; nothing was started")
        return None
    torch.manual_seed(config.run.seed)
    policy = load_policy(
        config.model.path,
        "float32",
        pick_device(config.train.device),
        lora=config.model.lora,
        seed=config.run.seed,
        pointing=config.policy.pointing,
        adapters=config.model.adapters,
    )
    training_set = plan.training_set(policy)
    with KeptTraining(part, settings, fresh=fresh) as kept:
        if use.line:
            sys.stderr.write(f"{use.line}\n")
        meter = Meter(plan.config, policy, training_set, split.held, use.batch, plan.pointed)
        watch = HeldOutWatch(meter.measure, len(split.held))
        before: Measured | None = None
        try:
            with interruptible():
                before = kept.measured(watch.measure_first) if split.held else None
                learned = LearnedRows(training_set, split.learned)
                train_stages(config, use, plan.learned, policy, learned, kept, watch)
                after = watch.measure() if split.held else None
        except KeyboardInterrupt:
            tell_stopped(console, kept, before, watch, as_json=as_json)
            raise
        curve = kept.curve()
        outcome = Outcome(
            len(split.held), split.groups, plan.pointed is not None, before, after, *fallen(curve)
        )
        trained = Tuned(
            out,
            len(plan.data),
            sum(updates for updates, _ in kept.progress.stages),
            sum(seconds for _, seconds in kept.progress.stages),
            curve,
            use,
            outcome,
        )
        verifier = plan.data.verifier if isinstance(plan.data, ItemData) else None
        write_tuned(config, policy, settings, trained, verifier)
        kept.remove()
    if as_json:
        sys.stdout.write(f"{json.dumps(trained.summary())}\n")
    else:
        tell(console, trained, plan.data.told)
    return trained


def _settings(plan: _Plan, use: Chosen, split: Split) -> TuneSettings:
    config, asked = plan.config, plan.asked
    is_prompted = plan.learned != "completions"
    policy = config.policy
    name = asked.answers.name if asked else policy.action_parser
    by_policy = policy.model_dump_json() if plan.learned == "actions" else ""
    return TuneSettings(
        learned=plan.learned,
        data_digest=plan.data.digest,
        examples=len(plan.data),
        held_out=tuple(split.held),
        model_digest=folder_digest(folder_of(config.model.path), config.model.adapters),
        action_parser=action_parser_identity(name) if is_prompted else "",
        prompt=json.dumps([policy.system_prompt, policy.template, policy.part_order])
        if asked
        else by_policy,
        coordinates=policy.coordinates if is_prompted else "",
        max_pixels=screens_of(config).max_pixels if is_prompted else 0,
        epochs=use.epochs,
        batch=use.batch,
        lr=use.lr,
        lr_head=use.lr_head,
        device=pick_device(config.train.device).type,
        **configured(config, plan.learned),
    )

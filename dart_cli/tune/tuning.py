"""Supervised training of a model folder: `dart tune`.

run_tune      reads the data, trains, and writes the new folder
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
from dart_cli.tune.defaults import Hyperparameters, choose_hyperparameters
from dart_cli.tune.episodes import ActionExamples
from dart_cli.tune.examples import (
    AnswerKind,
    Examples,
    ItemPrompts,
    answers_of,
    demonstration_config,
    item_prompts,
)
from dart_cli.tune.held_out import (
    HeldOutMeter,
    Measurement,
    Outcome,
    PlaceItems,
    Split,
    first_and_last_loss,
    split_rows,
)
from dart_cli.tune.output import (
    TuneResult,
    dry_run_lines,
    print_result,
    print_stopped,
    write_model_folder,
)
from dart_cli.tune.pace import HeldOutWatch
from dart_cli.tune.settings import TuneSettings, part_of, settings_of_config
from dart_cli.tune.stages import interruptible, train_stages
from dart_cli.tune.training_set import ExampleSet, LearnedRows, StepSet, TrainingSet
from dart_cli.tune.training_state import TrainingFolder
from dart_cli.tune.trajectories import Trajectories
from dart_cli.weights.folder import folder_digest


def run_tune(
    config: Config, *, fresh: bool = False, as_json: bool = False, dry_run: bool = False
) -> TuneResult | None:
    """Train as a checked configuration says. Return None for a dry run.

    Raises UserError, ConfigError and ModelError before anything starts, and KeyboardInterrupt if a signal
    asked the process to end; a second start continues from there.
    """
    with ExitStack() as stack:
        data = read_data(config)
        if isinstance(data, Trajectories):
            stack.callback(data.close)
            plan = _Plan(config, data, None, "completions")
        elif isinstance(data, ActionData):
            plan = _Plan(demonstration_config(config), data, None, "actions")
        else:
            prompts = item_prompts(config, data.verifier)
            plan = _Plan(prompts.config, data, prompts, prompts.kind)
        return _tune(config, plan, fresh=fresh, as_json=as_json, dry_run=dry_run)


@dataclass(frozen=True)
class _Plan:
    """What is learned, and with which prompts."""

    config: Config  # with the [policy] of the prompts
    data: ItemData | ActionData | Trajectories
    prompts: ItemPrompts | None  # how items are asked; None for other data
    kind: AnswerKind

    @property
    def places(self) -> PlaceItems | None:
        """The items whose places the model should hit, where it learns to name places."""
        if isinstance(self.data, ItemData) and self.prompts and self.kind in ("pointer", "text"):
            return PlaceItems(self.data.items, self.prompts.answers)
        return None

    def training_set(self, policy: LoadedPolicy) -> TrainingSet:
        """Return the examples as forward passes of a loaded model."""
        config, data = self.config, self.data
        if isinstance(data, Trajectories):
            return StepSet(policy, data, config.train)
        micro_batch = config.tune.micro_batch
        if isinstance(data, ActionData):
            acts = ActionExamples(policy, config, data.demonstrations)
            return ExampleSet(policy, acts, micro_batch)
        assert self.prompts is not None
        examples = Examples(policy, config, data.items, answers_of(self.prompts, policy))
        return ExampleSet(policy, examples, micro_batch)


def _tune(
    config: Config, plan: _Plan, *, fresh: bool, as_json: bool, dry_run: bool
) -> TuneResult | None:
    """Carry out a plan, and print and return the result; return None for a dry run."""
    # 1. Choose what is held out and with which hyperparameters the rest is learned.
    split = split_rows(plan.data.names, config.tune.held_out, config.run.seed)
    hyperparameters = choose_hyperparameters(
        config.tune,
        rows=len(split.learned_rows),
        parameters=shape_of(read_json(folder_of(config.model.path), "config.json")).parameters,
        lora=config.model.lora is not None,
        points=plan.kind == "pointer",
    )
    settings = _settings(plan, hyperparameters, split)
    console = Console(markup=False, highlight=False)
    out = config.tune.out
    assert out is not None
    part = part_of(out)
    if not fresh:
        refuse_other(part, settings)
    if dry_run:
        lines = dry_run_lines(plan.config, hyperparameters, plan.kind, plan.data.description, split)
        for subject, text in lines:
            console.print(f"{subject + ':':<10} {text}", soft_wrap=True)
        if hyperparameters.line:
            console.print(hyperparameters.line, soft_wrap=True)
        console.print("valid; nothing was started")
        return None
    # 2. Load the model.
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
    # 3. Measure, train, and measure again.
    with TrainingFolder(part, settings, fresh=fresh) as training_folder:
        if hyperparameters.line:
            sys.stderr.write(f"{hyperparameters.line}\n")
        meter = HeldOutMeter(
            plan.config,
            policy,
            training_set,
            split.heldout_rows,
            batch=hyperparameters.batch,
            places=plan.places,
        )
        watch = HeldOutWatch(meter.measure, len(split.heldout_rows))
        before: Measurement | None = None
        try:
            with interruptible():
                if split.heldout_rows:
                    before = training_folder.first_measurement(watch.measure_first)
                train_stages(
                    config,
                    hyperparameters,
                    plan.kind,
                    policy,
                    LearnedRows(training_set, split.learned_rows),
                    training_folder,
                    watch,
                )
                after = watch.measure() if split.heldout_rows else None
        except KeyboardInterrupt:
            print_stopped(console, training_folder, before, watch, as_json=as_json)
            raise
        # 4. Write the new folder, and remove the folder of the training.
        curve = training_folder.curve()
        first_loss, last_loss = first_and_last_loss(curve)
        outcome = Outcome(
            rows=len(split.heldout_rows),
            groups=split.heldout_groups,
            names_places=plan.places is not None,
            before=before,
            after=after,
            first_loss=first_loss,
            last_loss=last_loss,
        )
        result = TuneResult(
            out=out,
            examples=len(plan.data),
            updates=sum(updates for updates, _ in training_folder.progress.stages),
            seconds=sum(seconds for _, seconds in training_folder.progress.stages),
            curve=curve,
            hyperparameters=hyperparameters,
            outcome=outcome,
        )
        verifier = plan.data.verifier if isinstance(plan.data, ItemData) else None
        write_model_folder(config, policy, settings, result, verifier)
        training_folder.remove()
    if as_json:
        sys.stdout.write(f"{json.dumps(result.summary())}\n")
    else:
        print_result(console, result, plan.data.description)
    return result


def _settings(plan: _Plan, hyperparameters: Hyperparameters, split: Split) -> TuneSettings:
    """Return everything that the trained weights will depend on."""
    config, prompts = plan.config, plan.prompts
    is_prompted = plan.kind != "completions"
    policy = config.policy
    name = prompts.answers.name if prompts else policy.action_parser
    by_policy = policy.model_dump_json() if plan.kind == "actions" else ""
    return TuneSettings(
        learned=plan.kind,
        data_digest=plan.data.digest,
        examples=len(plan.data),
        held_out=tuple(split.heldout_rows),
        model_digest=folder_digest(folder_of(config.model.path), config.model.adapters),
        action_parser=action_parser_identity(name) if is_prompted else "",
        prompt=json.dumps(
            [policy.system_prompt, policy.template, policy.part_order, policy.thinking, policy.date]
        )
        if prompts
        else by_policy,
        coordinates=policy.coordinates if is_prompted else "",
        max_pixels=screens_of(config).max_pixels if is_prompted else 0,
        epochs=hyperparameters.epochs,
        batch=hyperparameters.batch,
        lr=hyperparameters.lr,
        lr_head=hyperparameters.lr_head,
        device=pick_device(config.train.device).type,
        **settings_of_config(config, plan.kind),
    )

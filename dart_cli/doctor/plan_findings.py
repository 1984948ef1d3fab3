"""Compare the plan of a configuration with this host, for the doctor and for `--dry-run`.

plan            yields a finding for each line of the plan, for `dart doctor`
absent_gpus     yields errors for GPUs that [up] names and this host lacks
refuse_misfit   yields the lines of the plan, and raises ConfigError if the run cannot fit
refuse_full     raises ConfigError if the disk is too full for the run
plan_on_host    makes the plan of a run on this host: a PlanOnHost
plan_lines      yields the plan as text, a line for each subject
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bus.errors import ConfigError, DartError, ModelError, UserError
from dart_cli.config.devices import gpus_here, listed_gpus
from dart_cli.config.model_folder import (
    BUILTIN,
    model_problem,
)
from dart_cli.config.published import small_files
from dart_cli.config.rules import Finding
from dart_cli.config.schema import MODEL_ENGINES, Config, TrainConfig, UpConfig
from dart_cli.config.screens import screen_of, screen_of_suite, screens_in_play
from dart_cli.config.task_split import training_tasks
from dart_cli.config.teacher import teacher_config, teachers_words
from dart_cli.doctor.fit import HostCapacity, gb, problems, together_at_most
from dart_cli.doctor.host_memory import HostPart, screen_caches
from dart_cli.doctor.machine import gpu_kinds, main_memory
from dart_cli.doctor.plan import H100, HEADER, STEPS, Plan, make_plan, passes
from dart_cli.runtime.findings import error, error_of, ok, sentence, warning

if TYPE_CHECKING:
    from bus.messages import Role

SHARED = Path("/dev/shm")  # noqa: S108 - measured, not written to
LEAST_SHOWN = 50_000_000
"""Bytes from which on a part is named. Smaller parts are only in the sum."""


class PlanOnHost(NamedTuple):
    """The plan of a run, and the host on which it is to run."""

    plan: Plan
    room: HostCapacity
    steps_from: str  # where the steps of its episodes come from
    published: str  # the checkpoint whose shape is used; empty if the model's folder is here

    def lines(self, config: Config, role: Role | None) -> dict[str, str]:
        """Return the lines of the plan: subject -> text. `role` limits them to one role; None means all."""
        texts = dict(plan_lines(self.plan, config, self.room, role, self.steps_from))
        if self.published:
            shape = f"the published shape of {self.published}, as {config.model.path} is not here"
            texts["plan for"] = f"{shape}; {texts['plan for']}"
        return texts


def plan(config: Config, steps: int | None = None) -> Iterator[Finding]:
    """Yield a finding for each line of the plan: whether what the run takes fits this host.

    Yield nothing for a model that ships with dart or a run without a model, nor for a model error that
    run_checks.configuration reports. `steps` is the length of an episode; None means what the tasks allow.
    The plan needs only the model's small files, or the published shape of its class.
    """
    # If NVML lists the GPUs, rules/machine.py reports this as a mistake of the configuration.
    if gpus_here() is None and listed_gpus() is None:
        yield from absent_gpus(config.up, len(gpu_kinds()))
    try:
        planned = plan_on_host(config, steps)
    except ModelError as fault:
        problem, _, fix = str(fault).partition("; ")
        if problem not in model_problem(config.model.path):
            yield warning("plan", f"there is none: {problem}", fix)
        return
    except ConfigError as fault:
        yield error_of("plan", fault)
        return
    if planned is None:
        return
    findings = list(problems(planned.plan, config, planned.room))
    for subject, text in planned.lines(config, None).items():
        own = [finding for finding in findings if finding.subject == subject]
        if not own:
            yield ok("plan", f"{subject}: {text}")
        for finding in own:
            # The first one repeats the line of the plan.
            yield _as_plan(finding, f"; planned: {text}" if finding is own[0] else "")
    yield from (_as_plan(finding) for finding in findings if finding.subject == "gpus")
    yield from _playing_teacher(config, steps)


def _playing_teacher(config: Config, steps: int | None) -> Iterator[Finding]:
    """Yield the room that a teacher's folder has to play in; a warning if its own prompts are too long for it."""
    if not config.teacher.model or config.teacher.url:
        return
    try:
        own = teacher_config(config)
        own = own.model_copy(update={"up": UpConfig(), "train": TrainConfig()})
        planned = plan_on_host(own, steps)
    except UserError:  # reported by run_checks.teacher, or above
        return
    if planned is None or planned.plan.engine is None:
        return
    text = f"teacher that plays: {_engine(planned.plan, own, planned.room, 'rollout')}"
    misfits = [
        finding
        for finding in problems(planned.plan, own, planned.room, "rollout")
        if (finding.subject, finding.level) == ("engine", "error")
    ]
    if not misfits:
        yield ok("plan", text)
    for finding in misfits:  # the run itself is not concerned: its teacher may only score
        problem = f"{text.partition(':')[0]}: {teachers_words(finding.text)}"
        yield warning("plan", problem, teachers_words(finding.cure))


def _as_plan(finding: Finding, plan_text: str = "") -> Finding:
    """Return a finding with the subject `plan`, its own subject in front of its text."""
    fits = "does not fit: " if finding.level == "error" else ""
    text = f"{finding.subject}: {fits}{finding.text}{plan_text}"
    return Finding("plan", finding.level, text, finding.cure)


def absent_gpus(up: UpConfig, there: int) -> Iterator[Finding]:
    """Yield an error for each list of [up] with a GPU that is not among the `there` GPUs of this host."""
    for key, listed in (("up.train_gpus", up.train_gpus), ("up.rollout_gpus", up.rollout_gpus)):
        if beyond := [gpu for gpu in listed if gpu >= there]:
            available = f"nvidia-smi lists 0 to {there - 1}" if there else "nvidia-smi lists none"
            yield error(
                "gpus",
                f"{key} names GPU {', '.join(map(str, beyond))}, {available}",
                f"name GPUs that exist, or leave {key} empty",
            )


def refuse_misfit(config: Config, role: Role | None = None) -> Iterator[tuple[str, str]]:
    """Yield (subject, text) of each line of the plan, for `--dry-run`.

    `role` limits them to one role; None means the whole run. A role without a model has no lines. Raises ConfigError, with the fix, if something cannot fit.
    """
    try:
        planned = plan_on_host(config)
    except ModelError:  # what loads the model has refused it before
        return
    if planned is None:
        return
    yield from planned.lines(config, role).items()
    for finding in problems(planned.plan, config, planned.room, role):
        if finding.level == "error":
            raise ConfigError(f"the run does not fit: {sentence(finding)}")
        yield "warning", sentence(finding)


def refuse_full(config: Config) -> None:
    """Raise ConfigError, with the fix, if the disk of run.dir has no room for the run."""
    from dart_cli.doctor.run_checks import check_room, existing  # late: sqlite

    place = existing(config.run.dir)
    findings = [check_room(shutil.disk_usage(place).free, config.data.max_gb, place)]
    with contextlib.suppress(ModelError):  # what loads the model refuses it
        if (planned := plan_on_host(config)) is not None:
            findings += [
                finding
                for finding in problems(planned.plan, config, planned.room)
                if finding.subject == "disk"
            ]
    for finding in findings:
        if finding.level == "error":
            raise ConfigError(f"the disk is too full for the run: {sentence(finding)}")


def plan_on_host(config: Config, steps: int | None = None) -> PlanOnHost | None:
    """Return the plan of a run on this host; None if the run loads no model, or one that ships with dart.

    `steps` is the length of an episode; None means what the tasks allow. Raises ModelError if the model's
    small files cannot be read and its shape is not published, ConfigError for an invalid size of a screen.
    """
    loaded = config.rollout.engine in MODEL_ENGINES or config.train.learner == "torch"
    if not loaded or config.model.path in BUILTIN:
        return None
    tree, cut, published = small_files(config)
    room = _capacity(config)
    average, most, steps_from = _steps(config, steps)
    screen = screen_of(config) or screen_of_suite(config)
    planned = make_plan(
        config,
        tree,
        cut,
        room.gpu,
        steps=average,
        most_steps=most,
        screen=screen,
        on_cpu=room.on_cpu,
    )
    return PlanOnHost(planned, room, steps_from, published)


def _steps(config: Config, steps: int | None) -> tuple[float, int, str]:
    """Return (steps of an average episode, steps of the longest, where they come from)."""
    try:
        limits = [task.max_steps for task in training_tasks(config)]
    except DartError:
        limits = []
    if steps is not None:
        return steps, max([steps, *limits]), "--steps"
    if not limits:
        return STEPS, STEPS, "assumed: the tasks cannot be listed"
    return sum(limits) / len(limits), max(limits), "the tasks' limits, on average"


def _capacity(config: Config) -> HostCapacity:
    """Measure what this host has for a run of `config`."""
    listed, host, names = gpu_kinds(), main_memory(), listed_gpus()
    if names == []:
        listed = []
    devices = {config.rollout.device, config.train.device}
    names_gpus = bool(config.up.train_gpus or config.up.rollout_gpus)
    on_cpu = devices == {"cpu"} or (not listed and devices <= {"cpu", "auto"} and not names_gpus)
    here = bool(listed) or on_cpu  # else the plan is for another machine
    shm = shutil.disk_usage(SHARED) if here and SHARED.is_dir() else None
    return HostCapacity(
        gpu=min(listed, key=lambda gpu: gpu.memory) if listed else H100,
        gpus=len(listed if names is None else names),
        is_gpu_here=bool(listed),
        on_cpu=on_cpu,
        memory=host[0] if host and here else None,
        shared=None if shm is None else shm.free,
        shared_taken=0 if shm is None else shm.used,
        disk=_disk(config.run.dir) if here else None,
    )


def _disk(run_dir: Path) -> int:
    """Return the bytes for run.dir: free space, plus what its checkpoints and weight sets use already."""
    whole = run_dir.absolute()
    place = next(folder for folder in (whole, *whole.parents) if folder.exists())
    used = 0
    for part in ("checkpoints", "weights"):
        for folder, _, names in os.walk(whole / part):
            for name in names:
                try:
                    used += (Path(folder) / name).lstat().st_size
                except OSError:  # removed meanwhile
                    continue
    return shutil.disk_usage(place).free + used


# --- its text -------------------------------------------------------------------------------


def plan_lines(
    plan: Plan, config: Config, room: HostCapacity, role: Role | None = None, steps_from: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (subject, text) for each line of the plan; `steps_from` is the origin of the number of steps."""
    yield "plan for", _assumed(plan, room, steps_from)
    if plan.trainer is not None and role in (None, "train"):
        yield "trainer", _trainer(plan, room)
        if plan.setup.teacher is not None:
            yield "teacher", _teacher(plan)
        yield "pack", _pack(plan, config)
    if plan.engine is not None and role in (None, "rollout"):
        yield "engine", _engine(plan, config, room, role)
    yield "host", _host(plan, role)
    if role is None or role == "train":
        yield "disk", _disk_line(plan)


def _assumed(plan: Plan, room: HostCapacity, steps_from: str) -> str:
    """Return for which GPUs and episodes the plan is made."""
    if room.on_cpu:
        where = "the CPU"
    elif room.is_gpu_here:
        where = f"{room.gpus} x {room.gpu.name} of {gb(room.gpu.memory)}"
    else:
        where = (
            f"{room.gpu.name} of {gb(room.gpu.memory)}, assumed, because no GPU is here: the plan is for another "
            "machine, whose main memory and disk are not known"
        )
    steps = f"{plan.form.steps} step{'' if plan.form.steps == 1 else 's'}"
    return (
        f"{where}; episodes of {steps}{f' ({steps_from})' if steps_from else ''}, completions of "
        f"{plan.form.completion} tokens"
    )


def _trainer(plan: Plan, room: HostCapacity) -> str:
    """Return the memory of the trainer's ranks, with its larger parts."""
    assert plan.trainer is not None
    ranks = plan.setup.ranks
    prefix = "" if ranks == 1 else f"{ranks} ranks, each "
    need = plan.trainer.peak if room.on_cpu else plan.trainer.total
    where = "" if room.on_cpu else f" of {gb(room.gpu.memory)}"
    return f"{prefix}{gb(need)}{where}: {_parts(plan, on_cpu=room.on_cpu)}"


def _teacher(plan: Plan) -> str:
    """Return the size of the teacher that scores tokens, and how much its pass adds to an update."""
    teacher, memory = plan.setup.teacher, plan.trainer
    assert teacher is not None
    assert memory is not None
    whose = f"the published shape of {plan.teacher_published}, " if plan.teacher_published else ""
    share = passes(plan.shape, plan.setup) / passes(plan.shape, replace(plan.setup, teacher=None))
    text = (
        f"{whose}{teacher.parameters / 1e9:.1f} billion parameters, {gb(memory.permanent['teacher'])} of each rank; "
        f"its forward pass makes the layers of an update take {share:.2f} times as long"
    )
    return text + (f"; it has {plan.teacher_positions} positions" if plan.teacher_positions else "")


def _parts(plan: Plan, *, on_cpu: bool) -> str:
    """Return the larger parts of a trainer rank's memory."""
    memory = plan.trainer
    assert memory is not None
    permanent, passing = memory.permanent, memory.passing
    trained = permanent["masters"] + permanent["gradients"] + permanent["moments"]
    listed = {
        "masters, gradients, moments": trained,
        "LoRA's base" if plan.setup.adapters else "frozen vision tower": permanent["frozen"],
        "the model that the run began with": permanent["reference"],
        "the teacher": permanent["teacher"],
        "activations with recompute" if plan.setup.recompute else "activations": passing.get(
            "activations", 0
        ),
        "activations of the vision tower": passing.get("tower", 0),
        "features of screens": passing["features"],
        "gathered layers and head": passing.get("gathered", 0),
        "head, and gradients being summed": passing.get("head", 0) + passing.get("reduced", 0),
        "context and fragments": 0 if on_cpu else memory.total - memory.peak,
    }
    return _listed(listed)


def _pack(plan: Plan, config: Config) -> str:
    """Return the size of the trainer's forward passes, and how the longest sequence is composed."""
    form, width = plan.form, plan.screen
    how = (
        _count(form.images, "screen") if not form.most else f"{form.images} to {form.most} screens"
    )
    text = (
        f"forward passes of up to {plan.setup.tokens} tokens; the longest sequence has {plan.longest}: "
        f"{how} of {width[0]}x{width[1]} ({form.screen} tokens each), {HEADER} of text, "
        f"{plan.past} turns of {form.completion}, a completion of {config.rollout.max_tokens}; {_count(len(plan.episode.chains), 'chain')} an episode"
    )
    if config.train.pack_tokens < plan.longest:
        text += (
            f"; longer than train.pack_tokens = {config.train.pack_tokens}, so it is computed alone"
        )
    return text


def _engine(plan: Plan, config: Config, room: HostCapacity, role: Role | None) -> str:
    """Return the memory of the engines, and how many prompts fit into it."""
    assert plan.engine is not None
    engine = plan.engine
    share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    count = 1 if role == "rollout" else config.up.rollouts
    prefix = "" if count == 1 else f"{count} engines, each "
    prefix += "" if share == 1 else f"on {share} GPUs, each of these "
    where = "" if room.on_cpu else f" of {gb(room.gpu.memory)}"
    screens = screens_in_play(config)
    text = (
        f"{prefix}{gb(engine.total)}{where}: weights {gb(engine.weights)}, activations and graphs "
        f"{gb(engine.passing)}, keys and values {gb(engine.cache)}, room for {engine.prompts:.1f} prompts of "
        f"{plan.longest} tokens, of which at most {together_at_most(config)} come at once"
    )
    if engine.features:
        text += f"; features of {engine.screens} screens {gb(engine.features)}"
    text += f"; {gb(screen_caches(config))} of main memory for the {screens} screens in play"
    if plan.shape.experts is not None and config.train.replay_routing:
        each, tokens = plan.shape.routing_bytes, plan.episode.alone
        text += (
            f"; which experts were chosen takes {each} bytes a token, at most {each * tokens / 1e6:,.1f} MB an "
            "episode (train.replay_routing)"
        )
    if plan.positions >= plan.longest:
        past = plan.past
        left = plan.positions - plan.longest + past * plan.form.completion
        turns = f": {past} past turns of up to {left // past} tokens on average" if past else ""
        text += f"; it accepts {plan.positions} tokens{turns}"
    return text


def _host(plan: Plan, role: Role | None) -> str:
    """Return the main memory and the shared memory that the processes take."""
    parts = plan.host.parts_of(role)
    is_shared = role != "rollout" and plan.host.shared >= LEAST_SHOWN
    shared = gb(plan.host.shared) if is_shared else ""
    text = f"main memory {gb(plan.host.memory_of(role))}: {_by_holder(parts)}"
    return text + (f"; and {shared} of /dev/shm for weight sets" if shared else "")


def _by_holder(parts: Sequence[HostPart]) -> str:
    """Return parts of main memory, summed by the role that holds them."""
    names = {
        "train": "trainer",
        "rollout": "engines",
        "env": "environments",
        "data": "data service",
    }
    texts = []
    for holder, name in names.items():
        own = {part.name: part.size for part in parts if part.holder == holder}
        if own:
            listed = _listed(own)
            inner = f" ({listed})" if ", " in listed else ""
            texts.append(f"{name} {gb(sum(own.values()))}{inner}")
    return ", ".join(texts)


def _disk_line(plan: Plan) -> str:
    text = f"checkpoints {gb(plan.host.checkpoints)}"
    if plan.host.sets:
        text += f", weight sets {gb(plan.host.sets)}"
    return text


def _listed(sizes: dict[str, int]) -> str:
    """Return the names and sizes of the parts of at least LEAST_SHOWN bytes."""
    return ", ".join(f"{name} {gb(size)}" for name, size in sizes.items() if size >= LEAST_SHOWN)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"

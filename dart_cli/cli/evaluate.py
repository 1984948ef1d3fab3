"""`dart eval`: held-out tasks by a configuration, and grounding sets by a folder.

run         success on held-out tasks; its name may be left out
compare     evaluations over the episodes that they share
row         an evaluation as a row of a leaderboard
worker      a process that plays along; hidden
grounding   hit rates on a grounding set, of a model folder
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dart_cli.cli.options import (
    ConfigPath,
    ProcessOrTool,
    load_checked,
    print_dry_run,
)
from dart_cli.runtime.options import DryRun, Overrides

if TYPE_CHECKING:
    from dart_cli.evaluation.results import Evaluation


class _EvalGroup(ProcessOrTool):
    """`dart eval CONFIG` plays held-out tasks; `dart eval COMMAND ...` is another evaluation."""

    verb, process = "eval", "run"


evaluate = typer.Typer(
    cls=_EvalGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@evaluate.callback()
def _eval() -> None:
    """Judge a policy: held-out tasks, or a grounding set; compare what was found.

    `dart eval CONFIG` plays held-out tasks; `dart eval CONFIG --help` shows its options. Needs no
    other process. Write a configuration file that is named like a command as ./grounding.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --codec uitars
    """


@evaluate.command("run")
def run_(
    config_path: ConfigPath,
    overrides: Overrides = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A published weight set, e.g. one of RUN/weights."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A model as it is, without the run's weights.")
    ] = "",
    episodes: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Episodes per mode; default eval.episodes."),
    ] = None,
    mode: Annotated[
        Literal["sampled", "greedy", "both", "random", "all"],
        typer.Option(
            help="How actions are chosen. `random`: clicks anywhere, the baseline, without a model; "
            "`all`: these, too."
        ),
    ] = "both",
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="Play only this task, or those of a pattern: mini/popup*, !mini/click; may be "
            "given again.",
        ),
    ] = None,
    attempts: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Episodes of each task and seed, for pass@k; default eval.attempts.",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Set what a benchmark publishes, and tell what deviates: osworld-verified, miniwob, "
            "webarena, androidworld.",
        ),
    ] = "",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="Processes that play, each with a model of its own, on the GPUs of up.rollout_gpus; 0: this one.",
        ),
    ] = 0,
    keep_as: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the result in RUN/eval; default its version."),
    ] = "",
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Set an older evaluation of this name aside and begin anew."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Play held-out tasks, sampled and greedily; success by task with 95 % intervals.

    Plays the newest weights of the run, or the model as it is where the run has none. Needs no other
    process. Episodes are kept in RUN/eval as they end: a second start goes on. The word `run` may be
    left out.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy

    Example: dart eval configs/quickstart.toml --mode sampled --attempts 8 --workers 2
    """
    from bus.errors import ConfigError

    if model and weights is not None:
        raise ConfigError("--model plays a model without the run's weights: leave out --weights")
    changes = [*_of_protocol(protocol, config_path, overrides), *(overrides or [])]
    if model:
        changes.append(f"model.path={model}")
    if episodes is not None:
        changes += [f"eval.episodes={episodes}", f"eval.random_episodes={episodes}"]
        changes.append("eval.per_task=0")
    if attempts is not None:
        changes.append(f"eval.attempts={attempts}")
    config = load_checked(config_path, changes, "env" if mode == "random" else "eval")
    from dart_cli.evaluation.held_out import MODES, EvalOptions, plan_eval, run_eval

    options = EvalOptions(
        weights=weights,
        as_it_comes=bool(model),
        modes=MODES[mode],
        tasks=tasks or [],
        name=keep_as,
        fresh=fresh,
        workers=workers,
        arguments=[str(config_path), *(part for each in changes for part in ("--set", each))],
        as_json=as_json,
    )
    if dry_run:
        print_dry_run(config, "eval", plan_eval(config, options))
        return
    run_eval(config, options)


def _of_protocol(name: str, config_path: Path, given: list[str] | None) -> list[str]:
    """What `--protocol NAME` changes. Raises ConfigError for an unknown one."""
    if not name:
        return []
    from bus.errors import ConfigError
    from dart_cli.config.load import load_config
    from dart_cli.evaluation.protocols import overrides, protocols
    from envs.own_code import did_you_mean

    if name not in protocols():
        raise ConfigError(
            f"--protocol {name!r}: unknown{did_you_mean(name, list(protocols()))}; there are "
            f"{', '.join(protocols())}"
        )
    return overrides(name, load_config(config_path, given).env.suite)


EvalFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A result in RUN/eval: NAME.json, or without its ending."),
]


@evaluate.command()
def compare(
    first: EvalFile,
    others: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Others, each compared with the first.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each comparison as one line of JSON.")
    ] = False,
) -> None:
    """Compare evaluations over the tasks and seeds that they share, with a test of pairs.

    McNemar's exact test where each task and seed was played once, else a test by random signs; the
    interval of the difference is a bootstrap over tasks. Nothing is corrected for several comparisons.

    Example: dart eval compare runs/quickstart/eval/before.json runs/quickstart/eval/after.json
    """
    from rich.console import Console

    from dart_cli.evaluation.compare import compare as compared
    from dart_cli.evaluation.compare import comparison_table, difference_lines, told

    console = Console(markup=False, highlight=False)
    for other in others:
        found = compared(_read(first), _read(other))
        if as_json:
            typer.echo(found.model_dump_json())
            continue
        for each in found.modes:
            console.print(comparison_table(found, each))
            console.print(told(found, each), soft_wrap=True)
        for line in difference_lines(found):
            console.print(f"differs: {line}", soft_wrap=True)


@evaluate.command()
def row(
    file: EvalFile,
    mode: Annotated[
        Literal["sampled", "greedy", "random"] | None,
        typer.Option(help="Default the first that was played.", show_default=False),
    ] = None,
    compositions: Annotated[
        bool, typer.Option("--compositions", help="Of the compositions instead of the tasks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one line of JSON.")] = False,
) -> None:
    """Print an evaluation as a row of a leaderboard, with all that a repetition needs.

    Example: dart eval row runs/quickstart/eval/after.json --mode greedy
    """
    import json

    from dart_cli.evaluation.leaderboard import as_markdown, row_of

    found = row_of(_read(file), mode, composed=compositions)
    typer.echo(json.dumps(found) if as_json else as_markdown(found), nl=as_json)


def _read(path: Path) -> Evaluation:
    """The evaluation in a file. Raises RunDirectoryError, UserError where there is none."""
    from bus.errors import UserError
    from dart_cli.evaluation.results import read_file

    found = path if path.is_file() else path.with_name(f"{path.name}.json")
    if not found.is_file():
        raise UserError(
            f"{path}: no such result; those of a run are in RUN/eval, e.g. RUN/eval/after.json"
        )
    return read_file(found)


@evaluate.command(hidden=True)
def worker(
    config_path: ConfigPath,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="The evaluation in RUN/eval.")] = "",
    worker: Annotated[str, typer.Option(help="Name of this process.")] = "eval-0",
) -> None:
    """Play along with an evaluation that `dart eval --workers` leads."""
    from dart_cli.config.load import load_config
    from dart_cli.evaluation.held_out import run_worker

    run_worker(load_config(config_path, overrides), name, worker)


@evaluate.command()
def grounding(
    folder: Annotated[
        Path, typer.Argument(metavar="SET_FOLDER", help="A grounding set as it is published.")
    ],
    model: Annotated[str, typer.Option(metavar="FOLDER", help="A model folder, or builtin:tiny.")],
    codec: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How it is asked and answers: compact, uitars, toolcall, pyautogui, ... (docs/families.md), point, file.py:MyCodec; default "
            "compact for models with its words.",
        ),
    ] = "",
    overrides: Overrides = None,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="NAME",
            help="Layout of the set; default the one that its files show.",
        ),
    ] = "",
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A published weight set of a run in place of the model's own."
        ),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Answers to an item: the greedy one, the others sampled, or from the same pass of a model "
            "that points; 3 or more for hit@3.",
        ),
    ] = 1,
    verifier: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="A verifier that judges the candidates, of `dart tune`.",
        ),
    ] = "",
    verifier_threshold: Annotated[
        float,
        typer.Option(min=0, max=1, help="The first candidate that it is so sure of is taken."),
    ] = 0.8,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Of a screenshot as the model sees it; default its folder's.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Ask so many items, spread evenly over the set."
        ),
    ] = None,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Leave malformed rows out, and tell how many.")
    ] = False,
    misses: Annotated[int, typer.Option(min=0, help="Misses on the page, at most.")] = 60,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Answers, report and page; default runs/grounding/SET-MODEL.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an older evaluation aside and begin anew.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Does a model point at what an instruction names? hit@1 with 95 % intervals, by trait.

    Reads ScreenSpot, ScreenSpot-v2, ScreenSpot-Pro, OSWorld-G, UI-Vision and MMBench-GUI L2 from
    local folders; nothing is fetched. Answers are kept as they come: a second start goes on.
    Prompt, max_pixels and coordinates are told with every figure. Misses are pictures on a page.

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --codec uitars

    Example: dart eval grounding sets/made/test --model builtin:tiny --candidates 3 --json
    """
    from dart_cli.evaluation.grounding.run import GroundingOptions, run_grounding

    run_grounding(
        GroundingOptions(
            folder=folder,
            model=model,
            layout=layout,
            codec=codec,
            weights=weights,
            overrides=list(overrides or []),
            out=out,
            fresh=fresh,
            candidates=candidates,
            verifier=verifier,
            verifier_threshold=verifier_threshold,
            limit=limit or 0,
            max_pixels=max_pixels or 0,
            skip_malformed=skip_malformed,
            misses=misses,
            as_json=as_json,
            dry_run=dry_run,
        )
    )

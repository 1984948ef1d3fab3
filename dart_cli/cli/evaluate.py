"""`dart eval`: held-out tasks by a configuration, and grounding sets by a folder.

run         success on held-out tasks; its name may be left out
compare     evaluations over the episodes that they share
row         an evaluation as a row of a leaderboard
grounding   hit rates on a grounding set, of a model folder
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dart_cli.cli.options import ConfigPath, ProcessOrTool, load_checked, print_dry_run
from dart_cli.evaluation import EvalOptions
from dart_cli.grounding import GroundingOptions
from dart_cli.runtime.options import AsJson, command_of

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

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --action-parser uitars
    """


@evaluate.command("run")
@command_of(EvalOptions)
def run_(config_path: ConfigPath, options: EvalOptions) -> None:
    """Play held-out tasks, sampled and greedily; success by task with 95 % intervals.

    Plays the newest weights of the run, or the model as it is where the run has none. Needs no other
    process. Episodes are kept in RUN/eval as they end: a second start goes on. The word `run` may be
    left out.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy

    Example: dart eval configs/quickstart.toml --mode sampled --attempts 8 --workers 2
    """
    from bus.errors import ConfigError
    from dart_cli.config.values import to_toml

    if options.model and options.weights is not None:
        raise ConfigError("--model plays a model without the run's weights: leave out --weights")
    overrides = options.overrides or []
    changes = [*_of_protocol(options.protocol, config_path, overrides), *overrides]
    if options.model:
        changes.append(f"model.path={to_toml(options.model)}")
    if options.attempts is not None:
        changes.append(f"eval.attempts={options.attempts}")
    config = load_checked(config_path, changes, "env" if options.mode == "random" else "eval")
    from dart_cli.evaluation.evaluate import plan_eval, run_eval

    if options.dry_run:
        print_dry_run(config, "eval", plan_eval(config, options))
        return
    run_eval(config, options, [str(config_path), *(w for each in changes for w in ("--set", each))])


def _of_protocol(name: str, config_path: Path, given: list[str] | None) -> list[str]:
    """Return what `--protocol NAME` changes. Raises ConfigError for an unknown one."""
    if not name:
        return []
    from bus.error_texts import did_you_mean
    from bus.errors import ConfigError
    from dart_cli.config.load import load_config
    from dart_cli.evaluation.protocols import overrides, protocols

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
    as_json: AsJson = False,
) -> None:
    """Compare evaluations over the tasks and seeds that they share, with a test of pairs.

    The test is about these tasks: McNemar's exact test where each task and seed was played once, else a test by
    random signs. The interval is about other tasks of this kind: a bootstrap over tasks, from ten tasks on. Nothing
    is corrected for several comparisons.

    Example: dart eval compare runs/quickstart/eval/before.json runs/quickstart/eval/after.json
    """
    from rich.console import Console

    from dart_cli.evaluation.compare import compare as compared
    from dart_cli.evaluation.compare import comparison_table, difference_lines, difference_text

    console = Console(markup=False, highlight=False)
    for other in others:
        found = compared(_read(first), _read(other))
        if as_json:
            typer.echo(found.model_dump_json())
            continue
        for each in found.modes:
            console.print(comparison_table(found, each))
            console.print(difference_text(found, each), soft_wrap=True)
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
    as_json: AsJson = False,
) -> None:
    """Print an evaluation as a row of a leaderboard, with all that a repetition needs.

    Example: dart eval row runs/quickstart/eval/after.json --mode greedy
    """
    import json

    from dart_cli.evaluation.leaderboard import as_markdown, row_of

    found = row_of(_read(file), mode, composed=compositions)
    typer.echo(json.dumps(found) if as_json else as_markdown(found), nl=as_json)


def _read(path: Path) -> Evaluation:
    """Return the evaluation in a file. Raises RunDirectoryError, UserError where there is none."""
    from bus.errors import UserError
    from dart_cli.evaluation.results import read_file

    found = path if path.is_file() else path.with_name(f"{path.name}.json")
    if not found.is_file():
        raise UserError(
            f"{path}: no such result; those of a run are in RUN/eval, e.g. RUN/eval/after.json"
        )
    return read_file(found)


@evaluate.command()
@command_of(GroundingOptions)
def grounding(options: GroundingOptions) -> None:
    """Test whether a model points at what an instruction names: hit@1 with 95 % intervals, by trait.

    Reads ScreenSpot, ScreenSpot-v2, ScreenSpot-Pro, OSWorld-G, UI-Vision and MMBench-GUI L2 from
    local folders; nothing is fetched. Answers are kept as they come: a second start goes on.
    Prompt, max_pixels and coordinates are told with every figure. Misses are pictures on a page.

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --action-parser uitars

    Example: dart eval grounding sets/made/test --model builtin:tiny --candidates 3 --json
    """
    from dart_cli.grounding.benchmark import run_grounding

    run_grounding(options)

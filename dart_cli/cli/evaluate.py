"""`dart eval`: evaluates a policy on held-out tasks, or a model folder on a grounding set.

run         success on held-out tasks; its name may be left out
compare     compares evaluations over the episodes that they share
row         prints an evaluation as a row of a leaderboard
grounding   hit rates of a model folder on a grounding set
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

    command, process = "eval", "run"


evaluate = typer.Typer(
    cls=_EvalGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@evaluate.callback()
def _eval() -> None:
    """Evaluate a policy on held-out tasks or on a grounding set; compare evaluations.

    `dart eval CONFIG` plays held-out tasks; `dart eval CONFIG --help` shows its options. No other process is
    needed. If your configuration file has the name of a command, write it as ./grounding.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --action-parser uitars
    """


@evaluate.command("run")
@command_of(EvalOptions)
def run_(config_path: ConfigPath, options: EvalOptions) -> None:
    """Play held-out tasks, sampled and greedily, and report success by task with 95 % intervals.

    It plays the newest weights of the run, or the model itself if the run has none. No other process is
    needed. Episodes are stored in RUN/eval as they end, so that a second start continues the first. The word
    `run` may be left out.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy

    Example: dart eval configs/quickstart.toml --mode sampled --attempts 8 --workers 2
    """
    from bus.errors import ConfigError
    from dart_cli.config.values import to_toml

    if options.model and options.weights is not None:
        raise ConfigError("--model plays a model without the run's weights; leave out --weights")
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
    arguments = [str(config_path), *(part for change in changes for part in ("--set", change))]
    run_eval(config, options, arguments)


def _of_protocol(name: str, config_path: Path, changes: list[str] | None) -> list[str]:
    """Return the overrides that `--protocol NAME` makes; `changes` are the user's. Raises ConfigError."""
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
    return overrides(name, load_config(config_path, changes).env.suite)


EvalFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A result in RUN/eval: NAME.json or NAME."),
]


@evaluate.command()
def compare(
    first: EvalFile,
    others: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Other results; each is compared with the first."),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare evaluations over the tasks and seeds that they share, with a paired test.

    The test is about these tasks: McNemar's exact test if each task and seed was played once, otherwise a
    test with random signs. The interval is about other tasks of this kind: a bootstrap over tasks, from ten
    tasks on. There is no correction for multiple comparisons.

    Example: dart eval compare runs/quickstart/eval/before.json runs/quickstart/eval/after.json
    """
    from rich.console import Console

    from dart_cli.evaluation.compare import compare as compared
    from dart_cli.evaluation.compare import comparison_table, difference_lines, difference_text

    console = Console(markup=False, highlight=False)
    for other in others:
        comparison = compared(_read(first), _read(other))
        if as_json:
            typer.echo(comparison.model_dump_json())
            continue
        for mode in comparison.modes:
            console.print(comparison_table(comparison, mode))
            console.print(difference_text(comparison, mode), soft_wrap=True)
        for line in difference_lines(comparison):
            console.print(f"differs: {line}", soft_wrap=True)


@evaluate.command()
def row(
    file: EvalFile,
    mode: Annotated[
        Literal["sampled", "greedy", "random"] | None,
        typer.Option(help="By default the first that was played.", show_default=False),
    ] = None,
    heldout: Annotated[
        bool,
        typer.Option("--heldout", help="The row of the tasks that are never trained on."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print an evaluation as a row of a leaderboard, with all one needs to repeat it.

    Example: dart eval row runs/quickstart/eval/after.json --mode greedy
    """
    import json

    from dart_cli.evaluation.leaderboard import as_markdown, row_of

    cells = row_of(_read(file), mode, heldout=heldout)
    typer.echo(json.dumps(cells) if as_json else as_markdown(cells), nl=as_json)


def _read(path: Path) -> Evaluation:
    """Return the evaluation in a file.

    Raises UserError if there is none, RunDirectoryError if it cannot be read.
    """
    from bus.errors import UserError
    from dart_cli.evaluation.results import read_file

    file = path if path.is_file() else path.with_name(f"{path.name}.json")
    if not file.is_file():
        raise UserError(
            f"{path}: no such result; the results of a run are in RUN/eval, e.g. RUN/eval/after.json"
        )
    return read_file(file)


@evaluate.command()
@command_of(GroundingOptions)
def grounding(options: GroundingOptions) -> None:
    """Test whether a model points at what an instruction names: hit@1 with 95 % intervals.

    It reads ScreenSpot, ScreenSpot-v2, ScreenSpot-Pro, OSWorld-G, UI-Vision and MMBench-GUI L2 from local
    folders, and downloads nothing. Answers are stored as they come, so that a second start continues the
    first. Every figure is reported with prompt, max_pixels and coordinates, and by platform, application and
    the like. A page shows the misses as pictures.

    Example: dart eval grounding sets/ScreenSpot-Pro --model models/UI-TARS-1.5-7B --action-parser uitars

    Example: dart eval grounding sets/made/test --model builtin:tiny --candidates 3 --json
    """
    from dart_cli.grounding.benchmark import run_grounding

    run_grounding(options)

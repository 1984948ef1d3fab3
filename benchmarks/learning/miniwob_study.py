"""Plays one run of the study of MiniWoB++: evaluates, trains, evaluates; each part resumes where it was.

    Study      what all runs have in common
    play_run   plays one run of an arm and a seed, and resumes what an earlier start left
    metered    runs a child process and stores its CPU seconds, children included
    curve_of   success while training, from the ledger

Files, in the study's folder:
runs/ARM-SEED      the run, and its evaluation `after`
before/SEED        the base's own evaluation, shared by arms
cpu/NAME.json      CPU seconds by part, which a kill leaves to the last seconds
logs/NAME.log      what the parts print
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from benchmarks.learning.miniwob_pages import page_of, pix2act_pages, task_of
from benchmarks.learning.study import Cell, Result, dart, overrides
from benchmarks.run_times import outcomes
from dart_cli.config.load import load_config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.store.open import open_reader
from dart_cli.evaluation.results import Evaluation, read_evaluation
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.role import PARENT_VARIABLE
from dart_cli.runtime.supervisor import ChildError
from dart_cli.runtime.work_folder import write_whole

BEFORE, AFTER = "before", "after"
FLAT_SHARE = 0.1
"""Of the hours of a run at rate 0, whose weights stay as they are."""

WINDOW = 40
"""Newest trajectories of a page that a point of the curve is the mean of."""
POINTS = 60

_LOOK_S = 1.0
_WRITE_S = 10.0
_END_S = 90.0
"""How long the processes of an earlier start may take to end."""


@dataclass(frozen=True)
class Study:
    """The settings that all runs of the study have in common."""

    root: Path  # of the repository
    config: Path
    work: Path
    model: str
    hours: float  # of training, each run
    pages: tuple[str, ...] = ()  # () for all of the configuration
    episodes: int = 50  # of each page and evaluation
    workers: int = 1  # processes of an evaluation
    sets: tuple[str, ...] = ()

    def sets_of(self, cell: Cell) -> list[str]:
        """Return the `--set` values of one run, without its folder."""
        share = FLAT_SHARE if cell.arm == "flat" else 1.0
        overrides = [
            f"model.path={json.dumps(self.model)}",
            f"train.max_minutes={60 * share * self.hours:g}",
            f"run.seed={cell.seed}",
            "eval.around=false",
        ]
        if self.pages:
            overrides.append(f"env.tasks={json.dumps([task_of(page) for page in self.pages])}")
        if cell.arm == "flat":
            overrides.append("train.lr=0")
        return [*overrides, *self.sets]

    def trained(self) -> list[str]:
        """Return the pages that a run trains on."""
        config = load_config(self.config, self.sets_of(Cell("rl", 0)))
        return [page_of(task.id) for task in training_tasks(config)]

    def evaluated(self) -> list[str]:
        """Return the trained pages and, in a study of all pages, the other pages of Pix2Act's table."""
        trained = self.trained()
        if self.pages:
            return trained
        return [*trained, *(page for page in pix2act_pages() if page not in trained)]


def play_run(study: Study, cell: Cell, tell: Callable[[str], None]) -> Result:
    """Evaluate the base, train, evaluate the end. Raises ChildError where a part fails."""
    run_dir = study.work / "runs" / cell.name
    before = _evaluate(study, cell, BEFORE, tell)
    over = study.work / "runs" / f"{cell.name}.over"
    if not over.exists():
        tell(f"{cell.name}: training")
        command = [*dart("up", str(study.config)), *_options(study, cell, run_dir)]
        _wait_for_end_of_earlier(run_dir)
        metered(command, study, cell.name, "train")
        over.touch()
    after = _evaluate(study, cell, AFTER, tell)
    return _result(study, cell, run_dir, before, after)


def _options(study: Study, cell: Cell, run_dir: Path) -> list[str]:
    return overrides([*study.sets_of(cell), f"run.dir={run_dir}"])


def _evaluate(study: Study, cell: Cell, name: str, tell: Callable[[str], None]) -> Evaluation:
    """Return the evaluation of the base, or of a run's newest weights; episodes that are over are not played again."""
    is_base = name == BEFORE
    run_dir = study.work / "before" / str(cell.seed)
    if not is_base:
        run_dir = study.work / "runs" / cell.name
    if (evaluation := read_evaluation(run_dir, name)) is not None:
        return evaluation
    tell(f"{cell.name}: evaluating {name}")
    pages = study.evaluated()
    flags = ["--mode", "sampled", "--episodes", str(study.episodes * len(pages)), "--json"]
    flags += ["--keep-as", name, *(["--model", study.model] if is_base else [])]
    flags += ["--workers", str(study.workers)] if study.workers > 1 else []
    tasks = f"eval.tasks={json.dumps([task_of(page) for page in pages])}"
    # The arms share the base's evaluation, whose settings therefore are those of arm rl.
    options = _options(study, Cell("rl", cell.seed) if is_base else cell, run_dir)
    command = [*dart("eval", str(study.config)), *options, *overrides([tasks]), *flags]
    _wait_for_end_of_earlier(run_dir)
    metered(command, study, f"before-{cell.seed}" if is_base else cell.name, name)
    evaluation = read_evaluation(run_dir, name)
    assert evaluation is not None, "a finished evaluation is kept"
    return evaluation


def _wait_for_end_of_earlier(run_dir: Path) -> None:
    """Wait until the processes that a killed start of the study has left have ended."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        if not run_dir.exists() or all(worker.liveness == "gone" for worker in workers_of(run_dir)):
            return
        time.sleep(_LOOK_S)


# --- what a run gave ------------------------------------------------------------------------


def _result(
    study: Study, cell: Cell, run_dir: Path, before: Evaluation, after: Evaluation
) -> Result:
    with open_reader(run_dir) as reader:
        active_s = reader.run().active_s
        updates = sum(batch.state == "trained" for batch in reader.batches())
        judged = [(page_of(task), row.outcome == "pass") for task, row in outcomes(reader)]
    episodes_by_page = Counter(page for page, _ in judged)
    trained = set(study.trained())
    counts = {BEFORE: counts_of(before), AFTER: counts_of(after)}
    return {
        "pages": {
            page: {
                "before": counts[BEFORE].get(page, (0, 0, 0.0))[:2],
                "after": counts[AFTER].get(page, (0, 0, 0.0))[:2],
                "reward_after": counts[AFTER].get(page, (0, 0, 0.0))[2],
                "played": episodes_by_page[page],
                "trained": page in trained,
            }
            for page in study.evaluated()
        },
        "minutes": round(active_s / 60, 2),
        "trajectories": len(judged),
        "updates": updates,
        "curve": curve_of(judged),
        "cpu_s": {
            "before": _spent(study, f"before-{cell.seed}", BEFORE),
            "train": _spent(study, cell.name, "train"),
            "after": _spent(study, cell.name, AFTER),
        },
        "model": study.model,
        "seed": cell.seed,
        "arm": cell.arm,
        "run_dir": str(run_dir),
        "before_dir": str(study.work / "before" / str(cell.seed)),
    }


def counts_of(evaluation: Evaluation) -> dict[str, tuple[int, int, float]]:
    """Return passed, judged and mean reward of the sampled episodes, by page."""
    counts_by_page = {}
    for score in evaluation.modes["sampled"].tasks:
        reward = score.mean_reward
        counts = (score.passed, score.episodes, 0.0 if reward is None else reward)
        counts_by_page[page_of(score.task_id)] = counts
    return counts_by_page


def curve_of(judged: Sequence[tuple[str, bool]], points: int = POINTS) -> list[dict[str, Any]]:
    """Return success while training, from each page's outcomes in the order they ended.

    A point is the mean over the pages played so far of each page's newest WINDOW trajectories, so that
    pages that are played often count no more than others; `n` is how many trajectories that are. With
    data.early_stop it is a little low: groups that begin with passes alone are half as long.
    """
    newest: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=WINDOW))
    every = max(1, len(judged) // points)
    curve = []
    for number, (page, passed) in enumerate(judged, start=1):
        newest[page].append(passed)
        if number % every == 0 or number == len(judged):
            rates = [mean(each) for each in newest.values()]
            curve.append(
                {
                    "trajectories": number,
                    "success": round(mean(rates), 4),
                    "pages_090": sum(rate >= 0.9 for rate in rates),
                    "pages": len(rates),
                    "n": sum(len(each) for each in newest.values()),
                }
            )
    return curve


# --- CPU seconds ----------------------------------------------------------------------------


def metered(command: Sequence[str], study: Study, name: str, part: str) -> None:
    """Run a command to its end, add its output to a log, and store its CPU time.

    It ends with this process. Raises ChildError if it fails; a Ctrl-C stops it first.
    """
    log, account = study.work / "logs" / f"{name}.log", study.work / "cpu" / f"{name}.json"
    for path in (log, account):
        path.parent.mkdir(parents=True, exist_ok=True)
    variables = {"OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid())}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"+ {' '.join(command)}\n")
        file.flush()
        child = subprocess.Popen(
            command,
            cwd=study.root,
            env={**os.environ, "PYTHONPATH": str(study.root), **variables},
            stdout=file,
            stderr=file,
        )
        try:
            _watch(child, account, part)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
                child.wait(_END_S)
    if child.returncode:
        raise ChildError(
            f"{' '.join(command[1:4])} ended with {child.returncode}; see {log}", child.returncode
        )


def _watch(child: subprocess.Popen[bytes], account: Path, part: str) -> None:
    """Add up the CPU time of the process and its children until it has ended."""
    spent: dict[tuple[int, float], float] = {}
    account_before = _read(account)
    earlier, written_at = account_before.get(part, 0.0), time.monotonic()
    while child.poll() is None:
        spent |= dict(_cpu_times(child.pid))
        if time.monotonic() - written_at > _WRITE_S:
            write_whole(
                account,
                json.dumps({**account_before, part: earlier + sum(spent.values())}).encode(),
            )
            written_at = time.monotonic()
        time.sleep(_LOOK_S)
    write_whole(
        account, json.dumps({**account_before, part: earlier + sum(spent.values())}).encode()
    )


def _cpu_times(pid: int) -> Iterator[tuple[tuple[int, float], float]]:
    """Return the CPU seconds of the process and of all processes below it, by process."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return
    for process in family:
        try:
            times = process.cpu_times()
            yield (process.pid, process.create_time()), times.user + times.system
        except psutil.Error:  # it has just ended
            continue


def _read(account: Path) -> dict[str, float]:
    return json.loads(account.read_text(encoding="utf-8")) if account.exists() else {}


def _spent(study: Study, name: str, part: str) -> float:
    return round(_read(study.work / "cpu" / f"{name}.json").get(part, 0.0), 1)

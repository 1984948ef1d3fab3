"""Mistakes that no single field shows: one line with file, key and cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.errors import ConfigError
from bus.messages import Role
from dart_cli.config.devices import visible_gpus
from dart_cli.config.load import load_config
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.check import check_config, find_mistakes
from dart_cli.config.rules.policy import MODEL
from dart_cli.config.rules.tasks import unjudged_problem
from dart_cli.config.schema import Config, JudgeConfig, PolicyConfig
from envs.contract.base import Task
from tests.config.mistakes import Case, assert_one_line, mistakes_anywhere, write

ROOT = Path(__file__).parents[2]

CASES = [
    # combinations that cannot work
    Case(
        "replays without weights",
        '[train]\nreuse = 1\ncorrection = "none"\n',
        "train.reuse",
        'set train.correction = "truncated"',
    ),
    Case(
        "a critic without baselines",
        '[train]\ncritic = "gae"\n',
        "train.critic",
        'set data.advantage = "step_baseline" and data.group_size = 1',
    ),
    Case(
        "images without turns",
        "[policy]\nhistory_images = 5\n",
        "policy.history_images",
        "set policy.history_turns >= 4",
    ),
    Case(
        "a verifier of a policy that writes numbers",
        '[policy]\nverifier = "builtin:tiny"\n',
        "policy.verifier",
        'policy.pointing = "pointer"',
    ),
    Case(
        "pointing without a head",
        '[policy]\npointing = "pointer"\n',
        "policy.pointing",
        "dart model add-pointer builtin:tiny OUT",
    ),
    Case(
        "evictions that drop nothing",
        "[policy]\nhistory_images = 3\nhistory_images_most = 3\nhistory_turns = 2\n",
        "policy.history_images_most",
        "got 3; set e.g. 7",
    ),
    Case(
        "several actions in a language that has none",
        '[policy]\naction_parser = "glm"\nmax_actions = 2\n',
        "policy.max_actions",
        'must be 1 with policy.action_parser = "glm"',
    ),
    Case(
        "text of a suite that has none",
        '[env]\nobserve = ["screenshot", "accessibility"]\n',
        "env.observe",
        "suite mini gives no 'accessibility'; it gives screenshots alone",
    ),
    Case(
        "misspelt action parser",
        '[policy]\naction_parser = "uitar"\n',
        "policy.action_parser",
        "did you mean 'uitars'?",
    ),
    Case(
        "action parser of no file",
        '[policy]\naction_parser = "no.py:C"\n',
        "policy.action_parser",
        "no file no.py",
    ),
    Case(
        "action parser that is none",
        '[policy]\naction_parser = "json:loads"\n',
        "policy.action_parser",
        "lacks limits",
    ),
    Case("no screenshot", "[env]\nobserve = []\n", "env.observe", 'must have "screenshot"'),
    Case(
        "a screenshot twice",
        '[env]\nobserve = ["screenshot", "screenshot"]\n',
        "env.observe",
        "remove one",
    ),
    Case(
        "compact in pixels",
        '[policy]\ncoordinates = "resized"\n',
        "policy.coordinates",
        'must be "thousandths"',
    ),
    Case(
        "template without instruction",
        '[policy]\ntemplate = "do it"\n',
        "policy.template",
        "needs {instruction}",
    ),
    Case(
        "tiny speaks compact",
        '[policy]\naction_parser = "uitars"\n',
        "policy.action_parser",
        'must be "compact"',
    ),
    Case(
        "fewer open groups than a batch",
        "[data]\ngroups_per_batch = 32\nmax_open_groups = 8\n",
        "data.max_open_groups",
        "must be >= data.groups_per_batch (32)",
    ),
    Case(
        "a pool that never joins a group",
        "[data]\ngroup_size = 4\npool_ratio = 0.125\n",
        "data.pool_ratio",
        "must be 0 or >= 0.2, one success beside data.group_size = 4 failures",
    ),
    Case(
        "a pool that is off",
        '[data]\npool = ["demos"]\n',
        "data.pool_ratio",
        "must be > 0",
    ),
    Case(
        "warm-up past the end",
        "[train]\nupdates = 10\nwarmup = 50\n",
        "train.warmup",
        "must be <= train.updates (10)",
    ),
    Case(
        "evaluation of nothing",
        "[eval]\naround = true\nepisodes = 0\n",
        "eval.episodes",
        "must be >= 1",
    ),
    Case(
        "open to the world",
        '[bus]\nhost = "192.168.1.5"\n',
        "bus.host",
        "set bus.keys",
    ),
    Case("open by name", '[bus]\nhost = "gpu-box"\n', "bus.host", "set bus.keys"),
    Case(
        "keys that are not there",
        '[bus]\nhost = "127.0.0.1"\nkeys = "no/such/keys"\n',
        "bus.keys",
        "make it with `dart keys",
    ),
    Case("keys for ipc", '[bus]\nkeys = "."\n', "bus.keys", "bus.host is empty"),
    Case("run in a file", '[run]\ndir = "{file}"\n', "run.dir", "choose another"),
    Case("run around us", '[run]\ndir = "."\n', "run.dir", "choose one for this run alone"),
    Case("run above us", '[run]\ndir = "/"\n', "run.dir", "choose one for this run alone"),
    Case("weights in a file", '[weights]\ndirectory = "{file}"\n', "weights.directory", "choose"),
    # tasks
    Case("unknown suite", '[env]\nsuite = "minni"\n', "env.suite", "did you mean 'mini'"),
    Case("suite of no module", '[env]\nsuite = "no_mod:S"\n', "env.suite", "install it or add"),
    Case(
        "wrong option of a suite whose browser is missing",
        '[env]\nsuite = "miniwob"\ntasks = []\noptions = { chromium = "/no/chromium", scale = 99 }\n',
        "env.options",
        "scale must be less than or equal to 8, got 99",
    ),
    Case(
        "suite whose browser is missing",
        '[env]\nsuite = "miniwob"\ntasks = []\noptions = { chromium = "/no/chromium" }\n',
        "env.suite",
        "apt install chromium-headless-shell",
    ),
    Case("suite of no file", '[env]\nsuite = "no.py:S"\n', "env.suite", "no file no.py"),
    Case(
        "suite file that breaks", '[env]\nsuite = "{broken}:S"\n', "env.suite", "cannot be loaded"
    ),
    Case("suite file without it", '[env]\nsuite = "{file}:S"\n', "env.suite", "no 'S'"),
    Case("unknown task", '[env]\ntasks = ["mini/popp"]\n', "env.tasks", "did you mean 'mini/pop"),
    Case(
        "task twice",
        '[env]\ntasks = ["mini/popup", "mini/menu", "mini/popup"]\n',
        "env.tasks",
        "remove one",
    ),
    Case(
        "trained on held-out task",
        '[env]\ntasks = ["mini/popup+menu"]\n',
        "env.tasks",
        "`dart eval` plays it",
    ),
    Case("unknown task to evaluate", '[eval]\ntasks = ["mini/x"]\n', "eval.tasks", "no task"),
    Case("glob of nothing", '[env]\ntasks = ["mini/klick*"]\n', "env.tasks", "no task like"),
    Case("exclusion of nothing", '[env]\ntasks = ["!mini/x*"]\n', "env.tasks", "no task like"),
    Case("glob of the other split", '[env]\ntasks = ["mini/*+*"]\n', "env.tasks", "other split"),
    Case(
        "everything left out",
        '[env]\ntasks = ["mini/click", "!mini/*"]\n',
        "env.tasks",
        "nothing is left",
    ),
    Case(
        "held out and trained",
        '[env]\ntasks = ["mini/click"]\nheldout = ["mini/cl*"]\n',
        "env.heldout",
        "remove it from one",
    ),
    Case("seeds that end before they begin", "[env]\nseeds = [9, 3]\n", "env.seeds", "first < end"),
    Case("seeds of the evaluation", "[env]\nseeds = [0, 2000000]\n", "env.seeds", "1000000"),
    Case(
        "evaluated tasks of another suite",
        '[env]\nsuite = "desk"\n[eval]\ntasks = ["mini/popup+menu"]\n',
        "eval.tasks",
        "if they are another suite's, set eval.tasks=[] for all",
    ),
    *(
        Case(
            f"a reset shorter than {name}",
            f'[env]\nsuite = "{suite}"\nreset_deadline_s = {deadline_s}\n[env.options]\n{option}\n',
            "env.reset_deadline_s",
            f"must be > {longest_s}, the seconds that suite {suite} gives a reset",
        )
        for name, suite, option, longest_s, deadline_s in (
            ("a boot", "osworld", 'vm = "Ubuntu.qcow2"', 300, 300.0),
            ("its own boot", "osworld", 'vm = "Ubuntu.qcow2"\nboot_s = 90.0', 90, 60.0),
            ("a browser's start", "browsergym", "reset_s = 120.0", 120, 60.0),
        )
    ),
    Case("unknown option", "[env.options]\nsizes = 168\n", "env.options", "did you mean 'size'"),
    *(
        Case(f"{name} of {suite}", f'[env]\nsuite = "{suite}"\n[env.options]\n{option}\n', *said)
        for name, suite, option, *said in (
            ("size of no size", "mini", 'size = "large"', "env.options", "WIDTHxHEIGHT"),
            ("size of one number", "mini", "size = 168", "env.options", "WIDTHxHEIGHT"),
            (
                "unknown encoding",
                "mini",
                'encoding = "gif"',
                "env.options",
                "must be 'png' or 'jpeg'",
            ),
            ("text for a number", "mini", 'slack = "x"', "env.options", "valid integer"),
        )
    ),
    Case(
        "two lossy encodings",
        '[env]\nscreenshots = "webp"\n[env.options]\nencoding = "jpeg"\n',
        "env.screenshots",
        "remove that option",
    ),
    Case("a judge without a model", "[env.judge]\n", "env.judge.model", "which model judges"),
    Case(
        "a judge at no address",
        '[env.judge]\nmodel = "eyes"\nurl = "host:8000"\n',
        "env.judge.url",
        "such as http://localhost:8000/v1",
    ),
    Case(
        "a judge's key that is not there",
        '[env.judge]\nmodel = "eyes"\nurl = "http://host/v1"\nkey_env = "NO_SUCH_KEY"\n',
        "env.judge.key_env",
        "no such environment variable",
    ),
    Case(
        "a judge's folder that is not there",
        '[env.judge]\nmodel = "/nowhere/eyes"\n',
        "env.judge.model",
        "or set env.judge.url",
    ),
    Case("GPU that is not there", '[train]\ndevice = "cuda:99"\n', "train.device", "cuda:99"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_mistake_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(case, write(case, tmp_path, places), capsys)


def test_an_action_parser_that_changes_past_completions_is_refused_where_prompts_are_to_extend(
    tmp_path: Path,
) -> None:
    action_parser = (
        "class Own:\n"
        "    limits = {}\n"
        "    def parse(self, text, coordinates): ...\n"
        "    def format(self, action, coordinates, thought=''):\n"
        "        return f'{thought} {action.kind}'\n"
        "    def as_history(self, text): return text.rsplit(' ')[-1]\n"
    )
    (tmp_path / "own.py").write_text(action_parser)
    policy = {"action_parser": f"{tmp_path}/own.py:Own", "history_images_most": 5}
    told = list(find_mistakes(Config.model_validate({"policy": policy}), "env"))
    assert told[0].subject == "policy.action_parser"
    assert "its as_history turns 'Now this. click' into 'click'" in str(told[0])
    assert "set policy.history_images_most = 0, or let as_history return its text" in str(told[0])
    slide = policy | {"history_images_most": 0}
    others = find_mistakes(Config.model_validate({"policy": slide}), "env")
    assert not [each for each in others if "as_history" in str(each)]


def test_an_action_parser_that_does_not_tell_its_points_is_refused_where_the_model_points(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    limits = {}\n"
        "    def parse(self, text, coordinates): ...\n"
        "    def format(self, action, coordinates, thought=''): ...\n"
        "    def as_history(self, text): return text\n"
        "    def write_point(self, x, y): return f'{x} {y}'\n"
    )
    policy = {"action_parser": f"{tmp_path}/own.py:Own", "pointing": "pointer"}
    told = list(find_mistakes(Config.model_validate({"policy": policy}), "env"))
    [mine] = [each for each in told if "lacks find_points, which policy.pointing" in str(each)]
    assert mine.subject == "policy.action_parser"
    assert 'or set policy.pointing = "text"' in str(mine)
    text = Config.model_validate({"policy": policy | {"pointing": "text"}})
    assert not [each for each in find_mistakes(text, "env") if "find_points" in str(each)]


def test_an_action_parser_whose_parts_fail_is_told(tmp_path: Path) -> None:
    action_parser = (
        "class Own:\n    @property\n    def limits(self):\n        raise KeyError('no limits')\n"
    )
    (tmp_path / "own.py").write_text(action_parser)
    config = Config.model_validate({"policy": {"action_parser": f"{tmp_path}/own.py:Own"}})
    first = next(
        each for each in find_mistakes(config, "env") if each.subject == "policy.action_parser"
    )
    assert "cannot be used: KeyError: 'no limits'" in str(first)


OWN_SUITE = """
from pathlib import Path
from envs.contract.registry import load_suite

class Own:
    name = "mini"
    tasks = load_suite("mini").tasks

    def make_env(self, *, near=True):
        Path(__file__).with_name("made").touch()
        if not near:
            raise ConnectionError("the machine is away")
        return load_suite("mini").make_env(size=near)
"""


@pytest.mark.parametrize(
    ("env", "role", "made", "key"),
    [
        ({"options": {"near": "large"}}, "env", True, "env.options"),
        ({"options": {"near": "large"}}, "eval", True, "env.options"),
        ({"options": {"near": False}}, "env", True, None),  # it may be there when it is played
        ({"options": {"near": "large"}}, "data", False, None),
        ({"options": {"near": "large"}, "isolation": "process"}, "env", False, None),
        ({}, "env", False, None),
    ],
)
def test_options_are_tried_where_environments_are_played(
    tmp_path: Path, env: dict[str, Any], role: Role, made: bool, key: str | None
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_SUITE)
    config = Config.model_validate({"env": {"suite": f"{own}:Own", **env}})
    found = [
        mistake for mistake in find_mistakes(config, role) if mistake.subject.startswith("env")
    ]
    assert [mistake.subject for mistake in found] == ([key] if key else [])
    assert (tmp_path / "made").exists() == made


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 30", ""),
        ("return 1 / 0", "longest_reset_s() failed: ZeroDivisionError"),
        ("return 'long'", "longest_reset_s must return seconds from 0 on, got str 'long'"),
    ],
)
def test_a_suite_that_cannot_say_what_it_gives_a_reset_is_refused_before_a_run(
    tmp_path: Path, body: str, said: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"{OWN_SUITE}\n    def longest_reset_s(self):\n        {body}\n")
    options = {"near": "448x336"}
    config = Config.model_validate({"env": {"suite": f"{own}:Own", "options": options}})
    mistakes = [str(each) for each in find_mistakes(config, "env") if "env" in each.subject]
    assert len(mistakes) == bool(said)
    assert said in "".join(mistakes)


SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.name for path in SHIPPED])
def test_a_shipped_configuration_is_valid_as_far_as_this_machine_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mistakes_anywhere(load_config(path)) == []


def test_a_base_that_is_made_by_a_script_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(ROOT / "configs" / "history.toml"))
    cure = "python scripts/shipped_models/build_recall.py --out runs/recall-base"
    assert f"model.path is no folder: runs/recall-base; make it with `{cure}`, or set" in str(
        caught.value
    )


def test_each_role_asks_only_for_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "far.toml"
    path.write_text('[model]\npath = "on/another/host"\n')
    config = load_config(path)
    for role in ("env", "data"):
        check_config(config, role=role)
    for role in ("rollout", "train", "eval", None):
        with pytest.raises(ConfigError, match=r"model\.path is no folder"):
            check_config(config, role=role)


@pytest.mark.parametrize(
    "key", ["run.dir", "weights.directory", "bus.keys", "model.path", "data.pool"]
)
def test_a_path_that_the_system_will_not_look_at_is_a_mistake_of_its_key(key: str) -> None:
    section, _, name = key.partition(".")
    value: object = 300 * "a"
    config = Config.model_validate({section: {name: [value] if name == "pool" else value}})
    with pytest.raises(ConfigError, match=rf"^{key}.* cannot be read: File name too long; "):
        check_config(config)


def test_gpus_are_counted_as_cuda_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, count in (("", 0), ("-1", 0), ("0", 1), ("1,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == count


def test_a_folder_without_its_file_is_no_verifier() -> None:
    policy = PolicyConfig(pointing="pointer", verifier="builtin:tiny")
    [mistake] = (
        each
        for each in broken_rules(MODEL, Config(policy=policy))
        if each.subject == "policy.verifier"
    )
    assert "is no verifier: it has no verifier.json" in str(mistake)


def test_tasks_without_an_evaluator_need_a_judge() -> None:
    tasks = [Task("own/a", "own", "do it", 3), Task("own/b", "own", "do it", 3, evaluated=False)]
    assert "own/b without an evaluator: add [env.judge]" in unjudged_problem(None, tasks)
    assert unjudged_problem(None, tasks[:1]) == ""
    assert unjudged_problem(JudgeConfig(model="eyes"), tasks) == ""

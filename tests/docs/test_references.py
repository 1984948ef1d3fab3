"""What the pages name exists: modules, scripts, links, the lines of a configuration that they show."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from bus.messages import PROTOCOL_VERSION
from dart_cli.config.schema import Config, section_types

ROOT = Path(__file__).parents[2]
ROOMS = [ROOT / "dart_cli" / room / "README.md" for room in ("env", "rollout", "data", "train")]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in ROOMS if page.is_file()),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
KINDS = {".py", ".md", ".toml", ".sh", ".yml"}
CODE = ("bus", "envs", "dart_cli")
NO_KEYS = {"run.db", "run.toml", "data.ipc", "data.py", "model.py", "bus.errors"}
FOLDERS = "bus|envs|dart_cli|configs|scripts|benchmarks|tests|docs"
NAMED = re.compile(rf"(?<![\w/.~-])(?:{FOLDERS})/[\w./*-]*[\w/]")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=relative)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
    assert [path for path in sorted({*NAMED.findall(text)}) if not any(ROOT.glob(path))] == []


def test_pages_that_code_names_exist() -> None:
    """Messages and docstrings lead to pages; so do scripts and configurations."""
    places = [*CODE, "scripts", "benchmarks", "configs"]
    files = [path for place in places for path in (ROOT / place).rglob("*") if path.is_file()]
    missing = {
        f"{relative(path)}: {name}"
        for path in files
        if path.suffix in {".py", ".toml", ".sh", ".md", ""}
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/.])(?:dart_cli|envs)\.[\w.]*\w", text):
        place, parts = ROOT, name.split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        file = (
            place / f"{parts.pop(0)}.py" if parts and (place / f"{parts[0]}.py").exists() else None
        )
        source = (file or place / "__init__.py").read_text(encoding="utf-8")
        assert all(re.search(rf"\b{part}\b", source) for part in parts), name


PACKAGES = [init.parent for part in CODE for init in sorted((ROOT / part).rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_a_package_names_each_of_its_modules(package: Path) -> None:
    """In its docstring, or in its README."""
    told = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    if (readme := package / "README.md").is_file():
        told += readme.read_text(encoding="utf-8")
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    assert [name for name in sorted(modules) if not re.search(rf"\b{name}\b", told)] == []


@pytest.mark.parametrize("page", [page for page in ROOMS if page.is_file()], ids=relative)
def test_files_that_a_rooms_readme_names_exist(page: Path) -> None:
    listed = set(re.findall(r"`(\w+\.py)`", page.read_text(encoding="utf-8")))
    assert listed
    assert listed - {path.name for path in page.parent.rglob("*.py")} == set()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=relative)
def test_links_of_the_front_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path
        assert target.is_file(), link
        if anchor:
            assert anchor in headings(target), link


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("log.md", "results.md")], ids=relative
)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    """`train.lr`, `--set train.lr=...`; the log and the results keep what there was."""
    sections = {name: kind.model_fields for name, kind in section_types().items()}
    named = re.findall(
        rf"(?:`|--set '?)({'|'.join(sections)})\.([a-z_]+)(?=[`=\s.])",
        page.read_text(encoding="utf-8"),
    )
    unknown = {
        f"{section}.{key}"
        for section, key in named
        if key not in sections[section] and f"{section}.{key}" not in sections
    }
    assert unknown - NO_KEYS == set()


def test_every_extra_is_installed_from_the_checkout() -> None:
    """A package on PyPI has the same name as this one, and is another project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*")]
    named: set[str] = set()
    for path in [*files, *ROOT.glob("*.md")]:
        if path.suffix in KINDS and path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"dart-cli\\?\[", text), path
            for names in re.findall(r"pip install -e '\.\[([a-z,]+)\]'", text):
                named.update(names.split(","))
    assert named
    assert named <= {*extras}


def test_the_table_of_sections_is_whole() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `[")]
    told = [name for row in rows for name in re.findall(r"`\[(\w+)\]`", row)]
    assert sorted(told) == sorted(Config.model_fields)


def way_of_the_data() -> str:
    """Return the section of docs/architecture.md that lists the way of the data."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.split("## The way of the data, file by file")[1].split("\n## ")[0]


def files_on_the_way() -> dict[str, list[str]]:
    """Return the files of each of the section's numbered lists, by the heading of the list."""
    head, *lists = way_of_the_data().split("\n### ")
    assert not re.search(r"^\d+\. ", head, re.MULTILINE), "a list has no heading"
    return {
        part.partition("\n")[0]: re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.MULTILINE)
        for part in lists
    }


def test_the_way_of_the_data_counts_files_that_exist() -> None:
    lists = files_on_the_way()
    assert len(lists) == 5
    for heading, files in lists.items():
        assert heading.endswith(f": {len(files)} files")
        assert [file for file in files if not (ROOT / file).is_file()] == []
    items = re.findall(r"^\d+\. ", way_of_the_data(), re.MULTILINE)
    assert len(items) == sum(len(files) for files in lists.values()), "an item has no file"


def test_the_files_beside_the_way_of_the_data_exist() -> None:
    beside = re.findall(r"^Beside: (.*?)\n\n", way_of_the_data() + "\n\n", re.MULTILINE | re.DOTALL)
    assert len(beside) == 4
    for text in beside:
        for part in " ".join(text.split()).rstrip(".").split("; "):
            names, _, folder = part.rpartition(" of ")
            for name in re.findall(r"`([\w./]+)`", names):
                assert (ROOT / folder.strip("`") / name).exists(), f"{name} of {folder}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give the headings of a page."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in lines}


def test_the_configuration_in_the_readme_is_the_files_own() -> None:
    """Lines may be left out between, none may differ."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- lines of (\S+);.*-->\n```toml\n(.*?)```", text, re.DOTALL)
    assert [path for path, _ in shown] == ["configs/quickstart.toml"]
    for path, block in shown:
        lines = iter((ROOT / path).read_text(encoding="utf-8").splitlines())
        for line in filter(None, block.splitlines()):
            assert line in lines, line  # consumes `lines`, so the order is the file's, too
        whole = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))
        for section, keys in tomllib.loads(block).items():
            assert whole[section] | keys == whole[section]


def test_the_bus_page_has_the_present_protocol_version() -> None:
    text = (ROOT / "docs" / "bus.md").read_text(encoding="utf-8")
    assert re.findall(r"`PROTOCOL_VERSION`, now (\d+)", text) == [str(PROTOCOL_VERSION)]


def test_the_way_of_the_data_has_as_many_files_as_the_page_counts() -> None:
    named = {file for files in files_on_the_way().values() for file in files}
    assert sum(len(files) for files in files_on_the_way().values()) == len(named)
    assert f"gradient: {len(named)} files in four processes" in way_of_the_data()

"""What pages tell people to type exists, their settings and ids are the program's, and their links lead to files."""

import inspect
import re
import runpy
import shlex
import subprocess
import tomllib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pytest
from PIL import Image

import flows.queries
import flows.viewer
from configs.layers import presets
from configs.load import load
from configs.run import RunConfig
from flows import cli
from flows.cli.arguments import split_items
from flows.queries.row_lineage import __doc__ as ids_of_the_program

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUESTIONS = ROOT / "docs" / "questions.md"
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)")
"""The target of a relative link or picture, without a heading; addresses have a colon."""


def typed(document):
    """Return the command lines of a document's shell blocks, without comments."""
    text = "".join(BLOCK.findall(document.read_text(encoding="utf-8")))
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.strip() and line[0] != "#"]


COMMAND_LINES = [(document, line) for document in DOCUMENTS for line in typed(document)]
COMMANDS = [shlex.split(line.partition(" | ")[0])[1:] for _, line in COMMAND_LINES if line.split()[0] == "stagecoach"]
TARGETS = sorted({line.split()[1] for _, line in COMMAND_LINES if line.startswith("make ")})


QUERY = re.compile(r'stagecoach sql (?:--store \w+ )?"((?:[^"\\]|\\.)*)"')


def test_every_query_of_the_pages_parses():
    queries = [query.replace('\\"', '"') for page in DOCUMENTS for query in QUERY.findall(page.read_text("utf-8"))]
    assert len(queries) > 8
    for query in queries:
        assert duckdb.extract_statements(query), query


def test_every_page_has_its_place_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCUMENTS if page.is_relative_to(ROOT / "docs")}
    assert pages and not {page for page in pages if f"- {page}\n" not in navigation}


def test_the_foot_of_a_page_has_version_and_day_of_the_program():
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    foot = generate["on_config"](SimpleNamespace()).copyright
    assert re.fullmatch(rf"Stagecoach {re.escape(version('stagecoach-rl'))}, \d{{4}}-\d\d-\d\d", foot)


def test_the_changelog_is_newest_first_and_says_at_first_what_one_must_do():
    text = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    days = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert days == sorted(days, reverse=True) and all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days)
    firsts = re.findall(r"^## .+\n\n(.+)\n\n- ", text, re.MULTILINE)
    assert firsts == ["**What you must do**"] * len(days)


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_are_understood(arguments):
    command = cli.parse(arguments)
    assert isinstance(command, partial)
    takes_items = "items" in inspect.signature(command.func).parameters
    files, overrides = split_items(command.args if takes_items else ())
    files = [file for file in files if arguments[0] in ("run", "sft", "eval", "check") and file in presets()]
    if arguments[0] == "track":  # of what is tracked the command itself says the type
        overrides.insert(0, f"tracking.type={command.keywords['to']}")
    load(files or ["demo"], [*overrides, *command.keywords.get("overrides", ())])


def test_every_command_of_the_page_on_questions_is_one():
    commands = re.findall(r"^(?:\$ )?stagecoach (.*)$", QUESTIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 6 and all(cli.parse(shlex.split(command)) for command in commands)


def test_the_page_on_questions_and_the_program_read_the_same_ids():
    page = QUESTIONS.read_text(encoding="utf-8").split("An id is written as")[1].split("Keys and")[0]
    names = re.findall(r"`([A-Z]+(?:[:/][A-Z]+)*)`", page)
    assert names and [name for name in names if name not in (ids_of_the_program or "")] == []


def test_every_setting_of_the_page_on_evaluation_is_one():
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    sets, tables, external = (RunConfig.model_validate({"kind": "evaluate"} | block).evaluation for block in blocks)
    assert [(name, each.every) for name, each in tables.of_sets().items()] == [("benchmark", 50), ("lookup", 5)]
    assert list(sets.of_sets()) == ["hard", "all"] and sets.of_sets()["all"].every == 50
    assert external.external is not None and external.external.model == "NAME"


def pages():
    """Return the pages of this checkout; what begins with a dot (environments, caches) is not ours."""
    found = sorted(ROOT.rglob("*.md"))
    return [page for page in found if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)]


def targets(page):
    """Return the relative links of a page; what looks like one in a block of code is none."""
    return LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


LINKS = [(page.relative_to(ROOT), target) for page in pages() for target in targets(page)]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=str)
def test_links_lead_somewhere(page, target):
    assert (ROOT / page.parent / target).exists()


def test_links_are_found():
    """Of pages of every kind, so that the above is not vacuous."""
    assert (Path("README.md"), "docs/replay.md") in LINKS
    assert (Path("docs/prefect.md"), "images/prefect-form.png") in LINKS
    assert {page.parts[0] for page, _ in LINKS} >= {"README.md", "CONTRIBUTING.md", "docs"}


def test_each_cell_of_the_comparison_has_its_source():
    """A link to a page here, or to a file of the commit that was read."""
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    commits = r"^\[([\w-]+)\]: https://github.com/[\w-]+/[\w-]+/blob/[0-9a-f]{40}/\S+$"
    assert set(re.findall(r"\]\[([\w-]+)\]", page)) == set(re.findall(commits, page, re.MULTILINE))
    table = page.split("| | Stagecoach |")[1].split("---|\n")[1].split("\n\n")[0]
    assert set(re.findall(r"(?<!^)\| ([^\[|]+) (?=\|)", table, re.MULTILINE)) == {"not found"}


def test_recordings_move_and_are_small():
    files = [ROOT / "docs" / "images" / name for name in ("terminal.webp", "tour.webp")]
    assert sum(file.stat().st_size for file in files) <= 2 * 2**20
    assert all(Image.open(file).n_frames > 5 for file in files)


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_an_index_names_every_page(folder):
    index = ROOT / folder / "README.md"
    named = {(index.parent / target).resolve() for target in targets(index)}
    others = {page for page in index.parent.rglob("*.md") if page.parent.name != "decisions" or folder != "docs"}
    assert sorted(others - named - {index}) == []
    assert ROOT / "docs" / "decisions" / "README.md" in named | {index}


@pytest.mark.parametrize("package", [flows.viewer, flows.queries], ids=lambda package: package.__name__)
def test_every_file_has_its_place_in_the_list(package):
    folder = Path(str(package.__file__)).parent
    names = {path.stem for path in folder.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert len(names) >= 10
    words = set(re.findall(r"[a-z_]+", package.__doc__ or ""))
    assert sorted(names - words) == []

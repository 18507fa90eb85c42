"""The version of an environment: what of its code and data is in it, and that an edit of any is another version."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, content
from tasks.assignment.examples import STAGE
from tasks.inference.environments.packages import EnvironmentUnavailable, package_version, require_same_code
from tasks.inference.environments.servers import command
from tasks.runtime.run_context import StageKeys
from tests.fixtures.waiting import PATIENCE

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file below a directory that Python looks in."""
    monkeypatch.syspath_prepend(tmp_path / "here")

    def write(name, text):
        file = tmp_path / "here" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


def own(taskset="own_game", **others):
    """Return an environment whose harness comes with verifiers, so that the taskset's code alone is its own."""
    harness = others.pop("harness", {"id": "null"})
    return EnvironmentConfig(name="own", taskset={"id": taskset, **others}, harness=harness)


def examples_key(environment):
    version = package_version(environment)
    return StageKeys(RunConfig(environments=(environment.model_copy(update={"version": version}),)))(STAGE, 0, {})


def install(directory, module, code, requires="verifiers>=0.4.0,<0.5"):
    """Lay out a package as an installed wheel does, at version 0.1.0."""
    (directory / module).mkdir(parents=True, exist_ok=True)
    (directory / module / "__init__.py").write_text(code)
    facts = directory / f"{module}-0.1.0.dist-info"
    facts.mkdir(exist_ok=True)
    name = module.replace("_", "-")
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\nRequires-Dist: {requires}\n")
    (facts / "RECORD").write_text(f"{module}/__init__.py,,\n")


def versions_after_edits(environment, *files):
    """The versions of an environment, before and after each of these files got another line: all of them differ."""
    versions = [package_version(environment)]
    for file in files:
        file.write_text(f"{file.read_text()}# edited\n")
        versions.append(package_version(environment))
    assert len({*versions}) == 1 + len(files)
    return versions


def test_two_packages_of_one_name_and_version_share_no_key(tmp_path, monkeypatch):
    keys = []
    for code in ("DECK = 3\n", "DECK = 4\n"):
        place = tmp_path / code[-2]
        install(place, "twin_game", code)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place)
            assert package_version(own("twin-game")).startswith("twin-game 0.1.0 sha256:")
            keys.append(examples_key(own("twin-game")))
    assert keys[0] != keys[1]


def test_an_edit_is_another_version_and_the_same_code_elsewhere_is_not(write):
    prompt = write("own_game/__init__.py", "PROMPT = 'Say it.'\n")
    table = write("own_game/data/rows.csv", "1,2\n")
    first = examples_key(own())
    for junk in (".notes", "__pycache__/__init__.cpython-311.pyc", "data/x.pyc"):
        write(f"own_game/{junk}", "not code")
    assert examples_key(own()) == first
    prompt.write_text("PROMPT = 'Say it!'\n")
    edited = examples_key(own())
    table.write_text("1,3\n")
    assert len({first, edited, examples_key(own())}) == 3
    prompt.write_text("PROMPT = 'Say it.'\n")
    table.rename(table.with_name("renamed.csv")).write_text("1,2\n")
    assert examples_key(own()) != first, "a file's name is part of it: code opens it by that"


def test_a_wheel_and_a_checkout_of_the_same_code_are_one_version(tmp_path, monkeypatch):
    install(tmp_path / "wheel", "same_game", "import sys\n")
    checkout = tmp_path / "checkout"
    install(checkout / "facts", "same_game", "")
    # An editable install: the facts lie where packages are installed, the code in its checkout.
    (checkout / "facts" / "same_game" / "__init__.py").unlink()
    (checkout / "facts" / "same_game").rmdir()
    (checkout / "code" / "same_game").mkdir(parents=True)
    (checkout / "code" / "same_game" / "__init__.py").write_text("import sys\n")
    found = []
    for paths in ([tmp_path / "wheel"], [checkout / "facts", checkout / "code"]):
        with monkeypatch.context() as patch:
            for path in paths:
                patch.syspath_prepend(path)
            found.append(package_version(own("same-game")))
    assert found[0] == found[1] and "same-game 0.1.0 sha256:" in found[0]


def test_a_module_that_is_no_package_and_what_it_imports_beside_it(write):
    write("own_game.py", "import json\nfrom own_rules import RULES\ndef f():\n    import own_words\n")
    rules, words = write("own_rules.py", "RULES = 1\n"), write("own_words/__init__.py", "from . import more\n")
    more = write("own_words/more.py", "WORDS = 1\n")
    write("unrelated.py", "1\n")
    versions = versions_after_edits(own(), rules, words, more)
    named = {part.split(" sha256")[0] for part in versions[0].split(", ")}
    assert named == {*(f"own_{each} (not a package)" for each in ("game", "rules", "words")), "verifiers 0.4.0"}
    write("unrelated.py", "2\n")
    write("own_rules.py", "this is no Python\n")
    assert package_version(own()) not in versions, "and what does not parse is for its own process to say"


def test_what_is_installed_counts_where_it_is_built_on_verifiers(tmp_path, write):
    write("own_game.py", "import numpy, shared_rules, plain_rules\n")
    installed = tmp_path / "installed"
    install(installed, "shared_rules", "")
    install(installed, "plain_rules", "", requires="verifiers>=0.4 ; extra == 'rl'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        version = package_version(own())
        assert "shared-rules 0.1.0 sha256:" in version and "plain" not in version and "numpy" not in version
        install(installed, "shared_rules", "HANDS = 2\n")
        assert package_version(own()) != version


def test_functions_and_files_that_settings_name(write, tmp_path, monkeypatch):
    write("own_game.py", "")
    scores, plugged = write("own_scores.py", "half = 1\n"), tmp_path / "plugged.py"
    notes, rows = tmp_path / "notes.txt", tmp_path / "rows" / "deep" / "1.jsonl"
    rows.parent.mkdir(parents=True)
    for file in (plugged, notes, rows):
        file.write_text("f = 1\n")
    environment = own(
        task={"rewards": {"a": {"fn": "own_scores.half"}, "b": {"fn": f"{plugged}:f"}}, "scoring": "own_scores:half"},
        hints=[{"file": str(notes)}],
        path=str(rows.parent.parent),
        cache_dir=str(tmp_path),
        split="train",
    )
    first, *_, last = versions_after_edits(environment, scores, plugged, notes, rows)
    assert "rows/ sha256:" in first and "notes.txt sha256:" in first
    (tmp_path / "of no setting.txt").write_text("")
    (tmp_path / "train").write_text("a word of a setting that happens to be the name of a file")
    monkeypatch.chdir(tmp_path)
    assert package_version(environment) == last
    plugged.unlink()
    with pytest.raises(EnvironmentUnavailable, match=r"environment 'own': .*plugged\.py', which is no file here"):
        package_version(environment)


@pytest.mark.parametrize("place", ["own_scores", "no_package.own_scores"])
def test_functions_of_group_rewards_are_in_the_version_and_without_them_nothing_is_in_the_key(
    write, tmp_path, monkeypatch, place
):
    write("own_game.py", "")
    scores = write(f"{place.replace('.', '/')}.py", "import stagecoach\nhalf = 1\n")
    rewards = {"g": {"function": f"{place}:half"}}
    monkeypatch.chdir(tmp_path / "here")
    environment = EnvironmentConfig.model_validate(own().model_dump() | {"group_rewards": rewards})
    assert "stagecoach" not in versions_after_edits(environment, scores)[0]
    rewards["g"]["function"] += "s"
    with pytest.raises(EnvironmentUnavailable, match=r"did you mean half\?"):
        package_version(EnvironmentConfig.model_validate(own().model_dump() | {"group_rewards": rewards}))
    assert "group_rewards" not in content(own())


def test_a_function_that_its_module_does_not_have_is_refused_without_running_the_module(write):
    write("own_game.py", "")
    write("own_scores/__init__.py", "def inside(): ...")
    for code in ("raise SystemExit\ndef reward(reply): ...", "# reward2", "def reward(reward2): ..."):
        write("own_scores/deep.py", code)
        for place in ("own_scores.deep:reward2", "own_scores.deep:inside", "own_scores:reward2"):
            with pytest.raises(EnvironmentUnavailable, match="names no function"):
                package_version(own(task={"scoring": place}))
    for code in ("def reward2(): ...", "from a import b as reward2", "from a import *", "globals()['reward2'] = len"):
        write("own_scores/deep.py", code)
        assert "own_scores" in package_version(own(task={"scoring": "own_scores.deep:reward2"}))


def test_a_text_beside_an_installed_package_may_be_no_function(tmp_path, write, monkeypatch):
    write("own_game.py", "")
    install(tmp_path / "installed", "docker", "def from_env(): ...\n", requires="numpy")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert package_version(own(task={"image": "docker:dind"}))


def test_judges_and_harnesses_are_code_of_the_environment(write):
    write("own_game.py", "")
    judge, harness = write("own_judge.py", ""), write("own_harness.py", "")
    environment = own(task={"judges": [{"id": "own-judge"}]}, harness={"id": "own_harness"})
    versions_after_edits(environment, judge, harness)
    limited = own(harness={"id": "program", "harness": {"id": "own_harness"}})
    versions_after_edits(limited, harness)


def test_a_module_in_the_current_directory_goes_last_as_in_the_server(write, tmp_path, monkeypatch):
    write("own_game.py", "1")
    elsewhere = package_version(own())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_game.py").write_text("2")
    (tmp_path / "tasks.py").write_text("raise SystemExit('a file of a person stands in for ours')")
    assert package_version(own()) == elsewhere
    (tmp_path / "lonely_game.py").write_text("3")
    assert "lonely_game (not a package)" in package_version(own("lonely_game"))


def test_no_process_is_started_with_other_code_than_the_run_s(write):
    code = write("own_game.py", "1")
    begun = own().model_copy(update={"version": package_version(own())})
    require_same_code(begun)
    code.write_text("2")
    require_same_code(own())
    with pytest.raises(
        EnvironmentUnavailable, match=r"'own' was edited: the run began with own_game .* sha256:.*, here it is"
    ):
        require_same_code(begun)


def test_code_that_cannot_be_read_is_said(write, monkeypatch):
    write("own_game.py", "1")

    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(EnvironmentUnavailable, match=r"environment 'own': its code cannot be read: .*own_game\.py"):
        package_version(own())


@pytest.mark.engine
@pytest.mark.parametrize("options", [[], ["--grade", "rollouts"]])
def test_a_process_that_is_started_again_refuses_edited_code(options, tmp_path):
    environment = EnvironmentConfig(name="text", taskset={"id": "sample_reverse_text"})
    report = tmp_path / "report.json"
    argv, _ = command(environment, report, *options)
    begun = environment.model_copy(update={"version": "sample-reverse-text 0.1.0 sha256:aa"})
    report.with_suffix(".config.json").write_text(begun.model_dump_json())
    ended = subprocess.run(argv, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 3 and json.loads(report.read_text())["error"] == "EnvironmentUnavailable"
    assert "'text' was edited: the run began with sample-reverse-text 0.1.0 sha256:aa, here" in report.read_text()


@pytest.mark.engine
def test_a_worker_that_joins_later_refuses_edited_code(tmp_path):
    from tasks.inference.environments.host import set_up_worker

    begun = EnvironmentConfig(
        name="text", taskset={"id": "sample_reverse_text"}, version="sample-reverse-text 0.1.0 sha256:aa"
    )
    with pytest.raises(EnvironmentUnavailable, match="'text' was edited"):
        set_up_worker(begun.model_dump(mode="json"), tmp_path)

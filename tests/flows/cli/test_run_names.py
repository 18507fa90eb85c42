"""Runs of a store by their first characters, for every command that takes a run."""

import pytest

from flows import cli
from storage.store import open_store

RUNS = ("first", "first-again", "second", "latest-one", "fade")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("names") / "store"
    for run in RUNS:
        open_store(root).runs.record(run=run, event="started", kind="train", config={})
    return str(root)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("show sec", "second"),
        ("show sec:3", "second:3"),
        ("show fir", "fir"),
        ("show latest", "latest"),
        ("resume sec steps=3", "second steps=3"),
        ("diff first-a sec", "first-again second"),
        ("evals sec first-", "second first-again"),
        ("eval --policy sec:1", "second:1"),
        ("eval --policy fade1234", "fade1234"),
        ("sweep --from sec:1 --over seed=1,2", "seed=1,2 second:1"),
        ("view --run sec", "second"),
        ("gc --remove sec", "sec"),
    ],
)
def test_the_first_characters_are_enough_where_one_run_begins_so(root, typed, meant):
    call = cli.parse([*typed.split(), "--store", root])
    given = [*call.args, *(value for name, value in call.keywords.items() if name != "store")]
    flat = [text for value in given for text in ([value] if isinstance(value, str) else value)]
    assert flat == meant.split()


def test_several_runs_that_begin_so_are_named(root, capsys):
    assert cli.main(["show", "fir", "--store", root]) == 2
    assert "there is no run 'fir'" in (said := capsys.readouterr().err) and "first, first-again" in said

"""A hack of a run's model as its reader is warned of it: on its page, the first page, in `show`, with its rollouts."""

import json
from html import escape, unescape

import pytest

from flows import cli
from flows.queries.run_state import recorded_warnings
from flows.queries.store_reader import StoreReader
from storage.records import WARNING
from tests.fixtures.cheating import HACK, LEARNT, STEPS, spreading
from tests.fixtures.rehearsal import play, reported, session_for
from tests.flows.viewer.looking import answer

WHERE = f"contains(lower(reply), '{HACK}')"


def warned_store(root, steps, **changes):
    """Make a store with a run whose model begins to cheat at LEARNT; return what watchers are told."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        play(patch, rollout=spreading(0))
        reported(root, "base", lambda *event: told.append(event), steps=steps, **changes)
    return told


def test_a_warning_stands_where_a_run_is_looked_at(tmp_path, capsys):
    root = tmp_path / "store"
    warned_store(root, 2)
    for _ in range(2):  # the event of a step that was lost and done again
        message = f"phrase: {HACK!r} is in 29% of replies [where {WHERE}]"
        session_for(root, "base").record(WARNING, 1, message)
    session_for(root, "base").record(WARNING, 1, "entropy_falls: updates/entropy/mean fell from 1 to 0.1: why")
    reader = StoreReader.at(root)
    by_rule = {hit["rule"]: hit for hit in recorded_warnings(reader.store.runs, "base")}
    assert len(by_rule) == 2 and by_rule["phrase"]["where"] == WHERE
    page = answer(reader, "/runs/base")[1]
    assert "phrase at step 1</a>" in page and escape(HACK) in page
    address = unescape(page.split('id="warnings"')[1].split('href="')[2].split('"')[0])
    assert answer(reader, address)[0] == 200 and "/search?" in address and address.endswith("&step=1")
    assert "phrase at step 1" in answer(reader, "/")[1]
    assert cli.main(["show", "base", "--store", str(root)]) == 0
    assert "phrase at step 1: '<rev></rev>' is in 29% of replies" in " ".join(capsys.readouterr().out.split())
    cli.main(["show", "base", "--store", str(root), "--json"])
    assert [hit["rule"] for hit in json.loads(capsys.readouterr().out)["warnings"]] == ["entropy_falls", "phrase"]


@pytest.mark.nightly
def test_the_planted_hack_is_warned_of_within_three_steps(tmp_path):
    told = warned_store(tmp_path / "store", STEPS, assignment={"groups_per_step": 6, "group_size": 8})
    (warning,) = [facts for event, facts in told if event == "warning"]
    assert LEARNT <= warning["step"] < LEARNT + 3 and warning["where"] == WHERE
    steps = [facts for event, facts in told if event == "step"]
    assert [facts["values"]["", "warnings"] for facts in steps] == [float(n == warning["step"]) for n in range(STEPS)]

"""One set of questions, answered, debated and explained: two real steps of each preset with a small model."""

import pytest

from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import SMALL, stagecoach
from tests.fixtures.driving import rows

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS, GROUPS, SIZE = 2, 3, 2
PRESETS = {"questions_rlvr": "answer", "questions_debate": "debate", "questions_consultancy": "consultancy"}


@pytest.mark.parametrize("preset", PRESETS)
def test_two_steps_of_each_recipe(preset, tmp_path):
    from sample_questions.demonstrations import MODES, words

    settings = [f"model.path={tiny_qwen3(tmp_path / 'model', words=words())}", f"steps={STEPS}"]
    settings += [f"assignment.groups_per_step={GROUPS}", f"assignment.group_size={SIZE}", "rollout.max_tokens=16"]
    place, members = str(tmp_path / "store"), MODES[PRESETS[preset]]
    assert f"seats {', '.join(members)}; scores" in stagecoach("check", preset, SMALL, *settings, "--load")
    stagecoach("run", preset, SMALL, *settings, "--store", place, "--name", "run", "--plain")
    tables = rows(open_store(place))
    assert [row["error_message"] for row in tables["traces"] if row["error_class"]] == []
    assert {row["agent"] for row in tables["traces"]} == {*members}
    trained = {row["trace_id"] for row in tables["samples"]}
    names = {row["agent"] for row in tables["traces"] if row["trace_id"] in trained}
    assert names == {*members} - {"judge"} and len(tables["updates"]) == STEPS

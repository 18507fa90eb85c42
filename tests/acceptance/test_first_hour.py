"""The first hour of a new user: own data, a run, what is shown of it, mistakes.

tests/acceptance/test_documents.py types what the pages say, with the installed wheel.
"""

import json
import re

import polars as pl
import pytest

from tests.acceptance.lives import stagecoach
from tests.fixtures.warming import warmed

pytestmark = pytest.mark.engine

RUN = ("run", "config.toml", "--name", "first", "--plain", "model.path=../model", "seed=1", "rollout.max_tokens=40")


REWARDS = """

async def short(reply, answer, row):
    return int(row["level"]) * (len(reply) < 20)


def best(group):
    return [float(rollout.reward == max(each.reward for each in group)) for rollout in group]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project of a table of the sample's examples, whose first run has trained two steps on all kinds of rewards."""
    directory = tmp_path_factory.mktemp("first-hour")
    warmed(directory / "model", {}, num_updates=100)  # made in seconds, in place of the minutes of the model `demo`
    assert "stagecoach run config.toml" in stagecoach("init", "sample", cwd=directory)
    rows = pl.read_ndjson(directory / "sample/examples.jsonl").select(question="prompt", word="answer", level=pl.lit(1))
    rows.write_csv(directory / "words.csv")
    columns = ("--prompt", "question", "--answer", "word")
    said = stagecoach("init", "my-project", "--data", "words.csv", *columns, cwd=directory)
    assert said.count("user\n  Reverse inside <rev>: ") == 3
    place = directory / "my-project"
    (place / "my_reward.py").write_text((directory / "sample/my_reward.py").read_text() + REWARDS)
    # The config's own comments, as a user would take them.
    text = re.sub(r"^task = .*\n", "", (place / "config.toml").read_text(), flags=re.MULTILINE)
    text = re.sub(r"^# (?=task\.|\[environments\.group|function|weight)", "", text, flags=re.MULTILINE)
    (place / "config.toml").write_text(text)
    said = stagecoach(*RUN, "steps=2", cwd=place)
    assert "step 2/2" in said and "stagecoach show first" in said
    return place


def test_each_of_several_rewards_has_its_figure_and_its_weight(project):
    query = "select reward, rewards from traces"
    rows = json.loads(stagecoach("sql", query, "--json", cwd=project))
    for row in rows:
        parts = {name: (each["score"], each["weight"]) for name, each in json.loads(row["rewards"]).items()}
        assert {name: weight for name, (_, weight) in parts.items()} == {"right": 1.0, "short": 0.2, "best": 0.5}
        assert row["reward"] == pytest.approx(sum(score * weight for score, weight in parts.values()))
    # Graded: the functions were asked, and replies are not all worth the same.
    assert len({row["reward"] for row in rows}) > 2 and len(rows) == 256
    assert "rewards/right/mean" in stagecoach("sql", "select distinct name from metrics", cwd=project)


def test_a_project_trains_at_the_first_try_and_its_run_is_shown(project):
    said = stagecoach("check", "config.toml", cwd=project)
    assert "my_reward (not a package) sha256:" in said, "the reward's code is in keys"
    assert "first" in stagecoach("runs", cwd=project)
    said = stagecoach("show", "first", cwd=project)
    assert "first" in said and "reward" in said
    stagecoach("view", "--save", "/runs/first", "run.html", cwd=project)
    page = (project / "run.html").read_text(encoding="utf-8")
    assert "my_data" in page or "first" in page


def test_a_wrong_key_is_refused_with_the_right_one(project):
    said = stagecoach("run", "config.toml", "training.learning_rat=1e-5", cwd=project, status=2)
    assert "training.learning_rate" in said and "nothing was started" in said.lower()


def test_an_edited_reward_function_is_noticed(project):
    reward = project / "my_reward.py"
    reward.write_text(reward.read_text().replace("else 0.0", "else -0.1"))
    said = stagecoach(*RUN, "steps=3", cwd=project, status=2)
    assert "my_reward" in said and "first" in said

"""The first hour of a new user: own data, a run, what is shown of it, mistakes.

tests/acceptance/test_documents.py types what the pages say, with the installed wheel.
"""

import pytest

from tests.acceptance.lives import stagecoach
from tests.fixtures.warming import warmed

pytestmark = pytest.mark.engine

RUN = ("run", "config.toml", "--name", "first", "--plain", "model.path=../model", "seed=1", "evaluation.every=0")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A new project, whose first run has trained two steps."""
    directory = tmp_path_factory.mktemp("first-hour")
    warmed(directory / "model", {}, num_updates=100)  # made in seconds, in place of the minutes of the model `demo`
    assert "stagecoach run config.toml" in stagecoach("init", "my-project", cwd=directory)
    said = stagecoach(*RUN, "steps=2", cwd=directory / "my-project")
    assert "step 2/2" in said and "stagecoach show first" in said
    # Graded rewards: the sample's function was asked, and its replies are not all worth the same.
    rewards = [float(line.split("reward ")[1].split()[0]) for line in said.splitlines() if line.startswith("step ")]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)
    return directory / "my-project"


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

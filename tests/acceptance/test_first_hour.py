"""The first hour of a new user: own data, a run, what is shown of it, a mistake, configs of other trainers."""

from pathlib import Path

import pytest

from tests.acceptance.first_hour import MORE, FirstHour

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    """An hour that was played."""
    played = FirstHour(tmp_path_factory.mktemp("first-hour"))
    played.play()
    return played


def answer(hour: FirstHour, beginning: str, status: int = 0) -> str:
    """Return what the command that begins so printed, which ended with that status."""
    (found,) = [each for line, each in hour.answers.items() if line.startswith(beginning)]
    assert found.status == status, found.text[-3000:]
    return found.text


def test_a_project_trains_at_the_first_try(hour):
    assert "stagecoach run config.toml" in answer(hour, "init my-project")
    assert "my_reward (not a package) sha256:" in answer(hour, "check config.toml"), "the reward's code is in keys"
    said = answer(hour, "run config.toml --name first")
    assert "step 2/2" in said and "stagecoach show first" in said
    # Graded rewards: the sample's function was asked, and its replies are not all worth the same.
    rewards = [float(line.split("reward ")[1].split()[0]) for line in said.splitlines() if line.startswith("step ")]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)


def test_a_run_is_listed_shown_and_saved_as_a_page(hour):
    assert "first" in answer(hour, "runs")
    assert "first" in answer(hour, "show first") and "reward" in answer(hour, "show first")
    answer(hour, "view --save")
    page = (hour.project / "run.html").read_text(encoding="utf-8")
    assert "my_data" in page or "first" in page


def test_a_wrong_key_is_refused_with_the_right_one(hour):
    said = answer(hour, "run config.toml training.learning_rat=", status=2)
    assert "training.learning_rate" in said and "nothing was started" in said.lower()


def test_an_edited_reward_function_is_noticed(hour):
    said = answer(hour, "edited", status=2)
    assert "my_reward" in said and "first" in said


def test_published_configs_of_other_trainers_become_projects(hour):
    said = answer(hour, "init moved")
    assert "trainer.optim.lr = 1e-05 -> training.learning_rate" in said and "deployment.num_infer_gpus = 1" in said
    assert "'alphabet-sort' is not installed" in answer(hour, "check moved", status=2)
    origin = "orchestrator.batch_size = 128, orchestrator.group_size = 16"
    assert f"{origin} -> assignment.groups_per_step = 8\n" in answer(hour, "init parts")
    assert "sft_demo" in answer(hour, "init supervised", status=2) and not Path(hour.directory, "supervised").exists()
    assert 'importance_sampling_level = "sequence"' in answer(hour, "init from-trl")
    assert "key of step 0" in answer(hour, "check from-trl")
    assert Path(hour.directory, "from-trl", "my_reward.py").is_file()


@pytest.mark.nightly
def test_further_published_configs_become_projects_or_are_refused(tmp_path):
    hour = FirstHour(tmp_path)
    hour.translate(MORE)
    statuses = {label.removeprefix("init "): answer.status for label, answer in hour.answers.items()}
    assert statuses == {name: 2 if name in ("evals", "serving") else 0 for name in MORE}

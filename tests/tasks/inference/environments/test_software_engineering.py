"""The configs of docs/software-engineering.md, with a taskset that declares what the published ones do."""

import re
import tomllib
from pathlib import Path

import pytest

from configs.environments import EnvironmentConfig
from configs.load import load
from tasks.inference.environments.packages import EnvironmentUnavailable
from tests.fixtures.hosts import examples_of

PAGE = Path(__file__).parents[4] / "docs/software-engineering.md"
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SECTIONS = [each for block in BLOCKS for each in tomllib.loads(block)["environments"]]


def test_the_configs_of_the_page_are_some(tmp_path):
    for block in BLOCKS:
        (tmp_path / "swe.toml").write_text(block, encoding="utf-8")
        (environment,) = load(["qwen3_8b_node", tmp_path / "swe.toml"], ["name=swe"]).environments
        assert environment.harness == {"id": "bash"}
    assert [section["taskset"]["id"] for section in SECTIONS] == ["r2e-gym", "scaleswe"]


@pytest.mark.engine
@pytest.mark.usefixtures("plugins")
def test_tasks_that_need_a_container_are_refused_without_one():
    contained = [EnvironmentConfig(**section | {"taskset": {"id": "contained"}}) for section in SECTIONS]
    assert [examples_of(environment).num_rows for environment in contained] == [1, 1]
    without = contained[0].model_copy(update={"runtime": {"type": "subprocess"}})
    with pytest.raises(
        EnvironmentUnavailable, match=r"seat agent: ContainedTask needs a container.*`runtime` of the env"
    ):
        examples_of(without)

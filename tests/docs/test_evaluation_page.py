"""The page on evaluation: its commands are commands, and its settings are settings."""

import re
import shlex
import tomllib
from pathlib import Path

from configs.run import RunConfig
from flows.cli import parse
from flows.runtime.loops import plan_work
from flows.runtime.prepare import prepare
from flows.runtime.session import open_session

PAGE = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()


def test_every_command_of_the_page_is_one() -> None:
    commands = re.findall(r"^stagecoach (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        assert parse(shlex.split(command))


def test_every_setting_of_the_page_is_one() -> None:
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    sets, external = (RunConfig.model_validate({"kind": "evaluate"} | block).evaluation for block in blocks)
    assert list(sets.of_sets()) == ["hard", "all"] and sets.of_sets()["all"].every == 50
    assert external.external is not None and external.external.model == "NAME"


def test_a_model_of_others_needs_neither_weights_nor_an_engine(tmp_path: Path) -> None:
    settings = ["evaluation.external.url=http://127.0.0.1:1/v1", "evaluation.external.model=m"]
    config = prepare("evaluate", [], settings, name="of-others", store=str(tmp_path / "store"), seed=1)
    assert config.model.path == "" and config.external is not None and config.external.model == "m"
    with open_session(config) as session:
        stages = [piece.stage for piece in plan_work(session.context, session.source)]
    assert stages == ["examples", "evaluation_assignment", "rollout"], "no weights are brought in"

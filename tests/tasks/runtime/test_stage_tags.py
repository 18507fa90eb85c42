"""A stage's task run does not take over the tags of the flow run: each would cost a request before the stage starts."""

from typing import Any

from prefect import tags
from prefect.context import TagsContext

from tasks.runtime.prefect_task import StageTask
from tasks.training.stage import STAGE


def test_tags_of_the_flow_run_do_not_reach_the_task():
    seen: list[set[str]] = []
    task = StageTask(STAGE)
    task.__dict__["task"] = lambda *_: seen.append(set(TagsContext.get().current_tags))
    place: Any = None
    with tags("run:x", "host:y"):
        assert TagsContext.get().current_tags == {"run:x", "host:y"}
        task(place, 0)
        assert TagsContext.get().current_tags == {"run:x", "host:y"}
    assert seen == [set()]

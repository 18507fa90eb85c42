"""What stages are handed by keyword: services of the declared kinds, what an attempt has, parameters of the call."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from configs.run import RunConfig
from storage.store import open_store
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.exchange import trace_import
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.packing import stage as packing
from tasks.rollout import demonstration, regrade
from tasks.rollout import stage as rollout
from tasks.runtime.execute import OWN, perform
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import MOST_LOSSES, SERVICES, Services, retry_lost
from tasks.runtime.stage import Stage
from tasks.training import policy as policy_import
from tasks.training import stage as training

MODULES = (
    advantage,
    assignment,
    demonstration,
    examples,
    filtering,
    gate,
    packing,
    policy_import,
    reference,
    regrade,
    rollout,
    trace_import,
    training,
)
STAGES = [stage for module in MODULES for stage in vars(module).values() if isinstance(stage, Stage)]
OF_CALLS = {"source", "batch", "groups", "quarantined"}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.function.__name__)
def test_a_service_is_of_the_kind_that_is_handed_over(stage: Stage) -> None:
    assert set(stage.keywords) <= {*OWN, *SERVICES, *OF_CALLS}
    module = inspect.getmodule(stage.function)
    kinds = {field.name: field.type for field in fields(Services)}
    for name in stage.services:
        kind: Any = kinds[name]
        expected = getattr(module, kind.partition(" |")[0]) if isinstance(kind, str) else get_args(kind)[0]
        assert inspect.signature(stage.function).parameters[name].annotation is expected


def test_every_service_is_asked_by_a_stage() -> None:
    assert {name for stage in STAGES for name in stage.services} == set(SERVICES)


def test_a_service_that_is_missing_and_a_parameter_that_is_unknown_are_refused(tmp_path: Path) -> None:
    context = RunContext(open_store(tmp_path), "a", RunConfig(name="a"), {})
    with pytest.raises(AssertionError, match="stage examples asks the service example_source, and there is none"):
        perform(examples.STAGE, context, 0)
    with pytest.raises(TypeError, match="sources"):
        perform(examples.DEMONSTRATION_STAGE, context, 0, parameters={"sources": "a"})


@pytest.mark.parametrize("losses", [0, MOST_LOSSES])
def test_a_lost_service_is_asked_again(losses: int) -> None:
    left = [ConnectionError] * losses

    def attempt() -> str:
        if left:
            raise left.pop()
        return "done"

    assert retry_lost(attempt, ConnectionError) == "done"


def test_a_service_that_is_lost_too_often_and_another_error_end_it() -> None:
    tried = []

    def attempt() -> None:
        tried.append(1)
        raise ConnectionError(str(len(tried)))

    with pytest.raises(ConnectionError, match=f"^{MOST_LOSSES + 1}$"):
        retry_lost(attempt, ConnectionError)
    tried.clear()
    with pytest.raises(ConnectionError, match=r"^1$"):
        retry_lost(attempt, TimeoutError)

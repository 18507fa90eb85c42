"""Keys hold every field that may change rows, and none that may not: checked for all fields there are."""

from itertools import chain
from typing import get_args, get_origin

import pytest

from configs.algorithms import ChatTeacherConfig, CustomConfig, Overlong
from configs.environments import BindingConfig, EnvironmentConfig
from configs.evaluation import EvaluationEnvironment, EvaluationSet
from configs.fields import Section, in_key, is_elsewhere, is_operational, later, section_types
from configs.filters import CustomFilter
from configs.judges import JudgeConfig
from configs.losses import CustomLoss
from configs.run import RunConfig, View, content
from configs.sections import DifficultyPool
from configs.services import ExternalModelConfig
from configs.training import WsdSchedule

REQUIRED = {
    CustomFilter: {"name": "mine", "function": "package:function"},
    WsdSchedule: {"final_steps": 10},
    EnvironmentConfig: {"name": "a", "taskset": {"id": "x"}},
    EvaluationSet: {"name": "hard"},
    EvaluationEnvironment: {"name": "b", "taskset": {"id": "x"}},
    **{model: {"url": "http://host/v1", "model": "m"} for model in (ExternalModelConfig, ChatTeacherConfig)},
    DifficultyPool: {"name": "hard", "threshold": 0.5, "weight": 1.0},
    Overlong: {"max_tokens": 8, "buffer_tokens": 4},
    **{model: {"function": "package:function"} for model in (BindingConfig, CustomConfig)},
    CustomLoss: {"function": "package:function"},
    JudgeConfig: {"name": "kind"},
}
LITERALS = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: (value or 0.25) / 2}


def example(model):
    """Return an instance of `model`, with values for the fields that have no default."""
    return model(**REQUIRED.get(model, {}))


def other(value, field):
    """Return a value of the field that differs from `value`; it need not be a sensible one."""
    if get_origin(field.annotation) is not None and type(None) in get_args(field.annotation):
        return 3 if value is None else None
    if type(value) in LITERALS:
        return LITERALS[type(value)](value)
    if isinstance(value, dict):
        return {**value, "another": 1}
    return (*value, 1) if isinstance(value, tuple) else f"{value}-other"


def leaves(model, operational=False):
    """Yield (model, field, operational) for every field of `model` and of all that it may hold."""
    for name, field in model.model_fields.items():
        hidden = operational or is_operational(field)
        inner = section_types(field.annotation)
        if not inner or get_origin(field.annotation) is tuple:
            yield model, name, is_operational(field) or is_elsewhere(field)
        for member in inner:
            yield from leaves(member, hidden)


ALL = sorted({(m, n, o) for m, n, o in leaves(RunConfig)}, key=lambda leaf: (leaf[0].__name__, leaf[1]))
IDS = [f"{model.__name__}.{name}" for model, name, _ in ALL]


@pytest.mark.parametrize(("model", "name", "operational"), ALL, ids=IDS)
def test_a_field_is_in_keys_unless_it_is_operational(model, name, operational):
    before = example(model)
    value = getattr(before, name)
    after = before.model_copy(update={name: other(value, model.model_fields[name])})
    assert getattr(after, name) != value
    assert (content(after) == content(before)) == operational


def test_the_walk_reaches_every_section():
    reached = {model for model, _, _ in ALL}
    members = [section_types(field.annotation) for field in RunConfig.model_fields.values()]
    assert {*chain.from_iterable(members)} <= reached
    assert {operational for _, _, operational in ALL} == {True, False}


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_a_view_of_one_section_holds_it_unless_it_is_operational(name):
    view = View(RunConfig(), (name,), "some stage")
    held = in_key(RunConfig.model_fields[name], getattr(RunConfig(), name))
    assert held != is_operational(RunConfig.model_fields[name])
    assert list(view.content()) == ([name] if held else [])
    assert getattr(view, name) == getattr(RunConfig(), name)


def test_a_view_hides_what_the_stage_did_not_declare():
    view = View(RunConfig(), ("rollout",), "packing")
    with pytest.raises(AttributeError, match="stage 'packing' reads config section 'training'"):
        _ = view.training


def test_who_is_trained_is_in_keys_where_it_is_not_the_rule():
    environment = EnvironmentConfig(name="e", taskset={"id": "e"})
    assert RunConfig(environments=(environment,)).seat_rules == {}
    other_rule = RunConfig(environments=(environment.model_copy(update={"learner_seat": True}),))
    gathered = View(other_rule, ("seat_rules",), "filtering").content()
    assert gathered == {"seat_rules": {"e": {"drop_judge": True, "learner_seat": True}}}


def test_a_field_that_was_added_later_is_in_keys_only_where_it_differs_from_its_default():
    class Grown(Section):
        first: int = 1
        added: int = later(0)

    assert content(Grown()) == {"first": 1}
    assert content(Grown(added=2)) == {"first": 1, "added": 2}

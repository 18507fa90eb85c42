"""Configs with references and teachers: what is refused before anything starts, and what a run asks of whom."""

import pytest

from configs.run import RunConfig, View, needs_reference_scores, only_teachers_sample, policy_scores
from tasks.advantage import reference
from tasks.rollout import stage as rollout

OPD = {"type": "opd", "teacher": {"path": "/teacher"}}
SFT = {"type": "sft", "teacher": {"path": "/teacher"}}
OPSD = {"type": "opsd"}


def config(algorithm=None, *own, **sections):
    """Return a run with an environment for each of its own algorithms, or one without."""
    algorithms = enumerate(own or (None,))
    environments = [{"name": f"e{index}", "taskset": {"id": "t"}, "algorithm": each} for index, each in algorithms]
    given = {"environments": environments, "algorithm": algorithm or {"type": "grpo"}} | sections
    return RunConfig.model_validate(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(OPD), (True, False, False)),
        (config(OPSD), (True, False, True)),
        (config(SFT), (False, True, False)),
        (config(None, SFT, None), (False, False, False)),
        (config(None, SFT, OPSD), (True, False, True)),
        (config(), (False, False, False)),
        (config(OPD, kind="evaluate"), (False, False, False)),
    ],
)
def test_who_is_asked(given, expected):
    found = needs_reference_scores(given), only_teachers_sample(given), policy_scores(given)
    assert found == expected


def test_only_the_version_of_a_teacher_is_in_keys():
    def keys(teacher):
        made = config(OPD | {"teacher": teacher}, SFT | {"teacher": teacher}, None)
        return [View(made, each.STAGE.sections, each.STAGE.name).content() for each in (reference, rollout)]

    here = {"path": "/a", "version": "v1"}
    assert keys(here) == keys({"url": "http://b", "version": "v1", "max_in_flight": 2, "memory_gib": 9})
    assert all(a != b for a, b in zip(keys(here), keys(here | {"version": "v2"}), strict=True))
    chat = {"url": "http://b/v1", "model": "m"}
    served = keys({"chat": chat, "version": "m"})[1]
    own = chat | {"api_key_variable": "K", "retries": 1, "answer_seconds": 9}
    assert served == keys({"chat": own, "version": "m"})[1]
    for change in ({"url": "http://c/v1"}, {"model": "n"}, {"settings": {"top_k": 1}}):
        assert served != keys({"chat": chat | change, "version": "m"})[1]
    assert "'chat'" in str(served) and "'chat'" not in str(keys(here))
    assert "teachers" not in View(config(OPD), rollout.STAGE.sections, "rollout").content()

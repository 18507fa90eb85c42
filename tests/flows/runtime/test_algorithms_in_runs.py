"""Algorithms in whole runs: functions by import path are refused early and part of keys; a constant length counts."""

import sys

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.fields import imported_functions
from flows.runtime.machine_facts import function_facts
from flows.runtime.resolve_run import resolve_run
from flows.runtime.session import record_run
from tests.fixtures.histories import results
from tests.fixtures.rehearsal import rehearse, session_for

OWN = 'algorithm={type="custom", function="own_credit:credit"}'
CREDIT = """
from tasks.advantage.algorithms.grpo import GrpoConfig, grpo

def credit(kept, settings):
    return grpo(kept, GrpoConfig())
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module that a config may name; it is forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_credit.py").write_text(CREDIT)
    yield tmp_path
    sys.modules.pop("own_credit", None)


@pytest.fixture
def edit(here):
    """Change the module's code, which is then loaded again."""

    def change():
        (here / "own_credit.py").write_text(CREDIT + "\n# otherwise\n")
        del sys.modules["own_credit"]

    return change


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (OWN, ["algorithm.function: 'own_credit:credit'", "No module named 'own_credit'"]),
        ('algorithm={type="custom", function="json:loadz"}', ["algorithm.function: 'json:loadz'", "it has no 'loadz'"]),
        ('algorithm={type="echo", keep_mask="json:__all__"}', ["algorithm.keep_mask: ", "'__all__' there cannot be"]),
    ],
)
def test_what_cannot_be_called_is_refused(refused, model, override, words):
    said = refused("run", "demo", model, override)
    assert all(word in said for word in words), said


def test_every_function_that_cannot_be_loaded_is_told(place, model):
    own = 'environments.0.algorithm={type="echo", keep_mask="nowhere:short"}'
    with pytest.raises(ConfigError) as caught:
        resolve_run("train", ["demo"], [model, OWN, own])
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "environments.0.algorithm.keep_mask",
        "algorithm.function",
    ]


def test_a_run_records_the_version_and_goes_on_with_that_one_only(here, edit, model):
    store = str(here / "store")
    config = resolve_run("train", ["demo"], [model, OWN], name="mine", seed=1, store=store)
    (function,) = imported_functions(config)
    assert function.version.startswith("sha256:")
    with record_run(session_for(here / "store", "mine", **config.model_dump(exclude={"name", "store"}))):
        pass
    assert resolve_run("train", [], [model], name="mine", store=store).algorithm == config.algorithm
    edit()
    with pytest.raises(ConfigError, match=r"algorithm\.version: recorded as 'sha256:"):
        resolve_run("train", [], [model], name="mine", store=store)


def test_an_evaluation_loads_no_algorithm(here, model):
    config = resolve_run("evaluate", ["demo"], [model, 'algorithm={type="custom", function="no:no"}'])
    assert function_facts(config) == {}


LENGTH = 50


def read(store, run, stage, table):
    return [store.read(entry.slices(table)) for entry in results(store, stage, run)]


def test_dr_grpo_shares_all_before_the_credits_with_grpo_and_divides_by_its_constant(tmp_path):
    rehearse(tmp_path, "grpo", algorithm={"type": "grpo"})
    store = rehearse(tmp_path, "dr", algorithm={"type": "dr_grpo", "length_normaliser": LENGTH})
    # Step 0 of both has the same policy; later ones are trained apart.
    for stage, num_shared in {"rollout": 1, "filtering": 1, "advantage": 0, "packing": 0}.items():
        one, other = ({entry.key for entry in results(store, stage, run)} for run in ("grpo", "dr"))
        assert len(one & other) == num_shared, stage
    steps = (read(store, "dr", *each) for each in (("packing", "batches"), ("filtering", "verdicts")))
    for batches, verdicts in zip(*steps, strict=True):
        weights = np.concatenate(batches["rl_weights"].to_pylist())
        traces = [row for row in verdicts.to_pylist() if row["reason"] in (None, "zero_advantage")]
        (num_tokens,) = set(batches["rl_tokens"].to_pylist())
        assert np.count_nonzero(weights) == num_tokens > 0
        assert set(weights[weights != 0]) == {np.float32(num_tokens / (LENGTH * len(traces)))}
    for batches in read(store, "grpo", "packing", "batches"):
        assert set(np.concatenate(batches["rl_weights"].to_pylist())) == {0, 1}

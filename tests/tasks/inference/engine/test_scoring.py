"""A frozen engine scores what others sampled: exactly, as far as its positions reach, and as many at once as asked."""

import pytest

from configs.services import EngineConfig
from tasks.inference.engine.checks import EngineMismatch, check_serving
from tasks.inference.engine.client import EngineLost, ServedModel, score
from tasks.training.policy import probe_token_ids
from tests.fixtures.hosts import KEY, engine_of
from tests.tasks.inference.engine.probes import reference_logprobs

pytestmark = pytest.mark.engine

LONGEST = 64
SEQUENCES = [[(7 * index + 3 * start) % 256 for index in range(length)] for start, length in enumerate((2, 31, 64, 33))]


@pytest.fixture(scope="module")
def teacher(models, tmp_path_factory):
    """A frozen engine whose head is tied to its embedding."""
    report = tmp_path_factory.mktemp("teacher") / "report.json"
    with engine_of(models["tied"], report, EngineConfig(max_model_len=LONGEST, memory_gib=0.1), frozen=True) as client:
        yield client


@pytest.mark.parametrize("most", [1, 3, 9])
def test_every_token_has_the_log_prob_of_the_weights(teacher, models, most):
    served = ServedModel(teacher.url, KEY, salt="the-teacher")
    found = dict(score(served, SEQUENCES, most))
    assert sorted(found) == list(range(len(SEQUENCES)))
    for place, tokens in enumerate(SEQUENCES):
        assert found[place] == pytest.approx(reference_logprobs(models["tied"], tokens), abs=1e-4)
    assert min(found[1]) < -1, "the values are no zeros"


def test_what_the_teacher_says_it_serves_names_its_weights(teacher, models):
    name, described = teacher.describe_model()
    assert name == "policy" and str(models["tied"]) in described and "vllm" in described


def test_an_engine_is_held_to_as_much_of_the_probe_as_it_holds(teacher, models):
    # Its longest sequence is shorter than the probe of a policy.
    probe = probe_token_ids(256)
    row = {"policy_key": "short", "version": 0, "probe_token_ids": probe}
    assert len(probe) > LONGEST
    config = EngineConfig(max_model_len=LONGEST)
    right = row | {"probe_logprobs": reference_logprobs(models["tied"], probe)}
    assert check_serving(teacher, right, config) < 1e-4
    with pytest.raises(EngineMismatch):
        check_serving(teacher, row | {"probe_logprobs": reference_logprobs(models["tied_b"], probe)}, config)


def test_a_teacher_that_is_gone_is_said_to_be_lost():
    with pytest.raises(EngineLost):
        list(score(ServedModel("http://127.0.0.1:9", ""), SEQUENCES, 2))

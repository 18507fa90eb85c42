"""The model runner that vLLM has on a GPU, on the CPU by Triton's interpreter: weights are proven, tokens are counted.

`make test-cuda-wheels` runs it, with the engine of the CPU lock and Triton of the GPU lock.
"""

import pytest

from tasks.inference.engine.client import POLICIES_HEADER
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.engine_calls import body, in_flight, paused
from tests.fixtures.hosts import engine_of
from tests.fixtures.interpreted_triton import variables_of
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.cuda_wheels]
LENGTH = 100


def counts(engine):
    with paused(engine, clear_cache=False):
        return engine.count_tokens()


def test_weights_are_exchanged_under_requests_of_the_second_runner(tmp_path, monkeypatch):
    first, second = (tiny_qwen3(tmp_path / name, seed=seed) for name, seed in (("first", 1), ("second", 2)))
    (tmp_path / "triton").mkdir()
    for name, value in variables_of(tmp_path / "triton").items():
        monkeypatch.setenv(name, value)
    with engine_of(first, tmp_path / "report.json") as engine:
        assert "Using V2 Model Runner" in (tmp_path / "report.log").read_text()
        engine.serve("first", first)
        bodies = [body(number, max_tokens=LENGTH, ignore_eos=True) for number in range(3)]
        with in_flight(engine, bodies, {POLICIES_HEADER: "1"}) as futures:
            until(lambda: len(found := counts(engine)) == 3 and min(found.values()) > 5, lambda: "no tokens")
            engine.serve("second", second)
            policies = [future.result().policies for future in futures]
        held, files = engine.weights_sum(second)
    assert held == files
    assert [[key for key, _ in spans] for spans in policies] == [["first", "second"]] * 3
    assert all(count > 5 for spans in policies for _, count in spans)
    assert {sum(count for _, count in spans) for spans in policies} == {LENGTH}

"""Weights that are exchanged under requests in flight: each token's policy is known, as recomputing it proves."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.inference.engine.client import POLICIES_HEADER, EngineError
from tests.fixtures.engine_calls import answers_to, body, in_flight, paused

pytestmark = pytest.mark.engine

BOUND = 1e-3
"""Of the probe, in float32."""
LENGTH = 220
TRIES, LOOKS = 10, 100


def counts(engine):
    """How many tokens of each request in flight the engine has sampled."""
    with paused(engine, clear_cache=False):
        return engine.count_tokens() or {}


def bodies_of(count):
    """Requests for texts of one length."""
    return [body(number, max_tokens=LENGTH, ignore_eos=True) for number in range(count)]


def answers_with_exchanges(engine, bodies, policies, recompute):
    """The answers to requests during which weights are exchanged, each time after all have some tokens more.

    On a busy machine requests may end before the last exchange: then all is done again.
    """
    for _ in range(TRIES):
        engine.serve(*policies[0])
        with in_flight(engine, bodies, {POLICIES_HEADER: "1"}) as futures:
            for number, (key, weights) in enumerate(policies[1:], 1):
                for _ in range(LOOKS):
                    if len(found := counts(engine)) == len(bodies) and min(found.values()) > 20 * number:
                        break
                engine.serve(key, weights, recompute=recompute)
                engine.probes([1, 2, 3, 4], key)  # as a run does, under the requests in flight
            answers = [future.result() for future in futures]
        if all(len(answer.policies or ()) == len(policies) for answer in answers):
            return answers
    raise AssertionError("requests ended before the weights were exchanged, each time")


def distances(engine, bodies, answers, policies):
    """By policy, how far the log-prob of each token of each request is from what that policy gives it."""
    found = {}
    for key, weights in policies.items():
        engine.serve(key, weights)
        for asked, answer in zip(bodies, answers, strict=True):
            again = engine.score([*asked["token_ids"], *answer.tokens], f"again-{key}")[len(asked["token_ids"]) :]
            pairs = zip(again, answer.logprobs, strict=True)
            found.setdefault(key, []).append([abs(one - other) for one, other in pairs])
    return found


def test_the_policy_of_every_token_is_known(small_engine, models):
    policies = {"first": models["a"], "second": models["b"], "third": models["a"]}
    bodies = bodies_of(4)
    answers = answers_with_exchanges(small_engine, bodies, list(policies.items()), recompute=True)
    far = distances(small_engine, bodies, answers, policies)
    seen_at_border = 0
    for number, answer in enumerate(answers):
        assert [key for key, _ in answer.policies or ()] == list(policies)
        versions = [key for key, count in answer.policies or () for _ in range(count)]
        assert len(versions) == LENGTH
        assert max(far[key][number][place] for place, key in enumerate(versions)) < BOUND
        # Another version in place of the recorded one is seen on nearly every token, also on the first after a border.
        second = [place for place, key in enumerate(versions) if key == "second"]
        for wrong, places in (("first", second), ("second", [p for p in range(LENGTH) if p not in second])):
            outside = [far[wrong][number][place] > BOUND for place in places]
            assert sum(outside) > 0.9 * len(outside) > 0
        seen_at_border += far["first"][number][second[0]] > BOUND and far["third"][number][second[-1]] > BOUND
    assert seen_at_border >= 3


@pytest.mark.parametrize("recompute", [True, False])
def test_a_request_goes_on_with_its_own_random_numbers(small_engine, models, recompute):
    small_engine.serve("undisturbed", models["a"])
    bodies = bodies_of(3)
    expected = [answer.tokens for answer in answers_to(small_engine, bodies)]
    exchanges = [(f"same-{number}-{recompute}", models["a"]) for number in range(3)]
    answers = answers_with_exchanges(small_engine, bodies, exchanges, recompute)
    assert [answer.tokens for answer in answers] == expected
    assert all(len(answer.policies or ()) == 3 for answer in answers)


def test_an_engine_whose_process_died_between_pause_and_resume_serves_the_next_policy(small_engine, models):
    small_engine.serve("before", models["a"])
    small_engine._post("/pause", params={"mode": "keep"})
    small_engine.serve("after", models["b"])
    (answer,) = answers_to(small_engine, [body(1)], {POLICIES_HEADER: "1"})
    assert not small_engine.is_paused() and answer.policies == [["after", 12]]


def test_tokens_are_counted_while_the_engine_is_paused(small_engine, models):
    small_engine.serve("counted", models["a"])
    with pytest.raises(EngineError, match="while the engine is paused"):
        small_engine.count_tokens()
    (plain,) = answers_to(small_engine, [body(1)])
    assert plain.policies is None, "a client that does not ask"
    requests = [body(1), body(2, max_tokens=-1), body(3, n=2)]
    one, refused, several = answers_to(small_engine, requests, {POLICIES_HEADER: "1"})
    assert one.policies == [["counted", 12]]
    assert (refused.status, refused.policies, several.policies) == (400, None, None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=6), st.integers(0, 30))
def test_runs_are_what_was_sampled_between_exchanges(phases, answered):
    from tasks.inference.engine.token_policies import PolicyLog

    log, expected = PolicyLog(), ""
    for number, (key, length) in enumerate(phases):
        if number:
            log.close({"other": 3, **({"request": len(expected)} if expected else {})})
        log.current = key
        expected += key * length
    # An aborted request is answered with fewer tokens than were sampled.
    answered = min(answered, len(expected))
    spans = log.spans("request", answered)
    assert "".join(key * count for key, count in spans) == expected[:answered]
    assert all(one[0] != other[0] for one, other in pairwise(spans)) and all(count for _, count in spans)
    assert log.spans("request", 0) == []

"""Rollouts of several turns under which weights are exchanged: their rows say which policy sampled each token."""

import threading
from contextlib import contextmanager

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.limits import SamplingPlan, WeightUpdate
from tasks.inference.trace_rows.rows import UnknownPolicy
from tasks.runtime.stage import Policy
from tests.fixtures.engine_calls import paused
from tests.fixtures.hosts import KEY, assigned, examples_of, served
from tests.fixtures.sampled import failures, own, sample
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine

TURNS = {"min_turns": 2, "max_turns": 2, "min_words": 1, "max_words": 1}
SORT = EnvironmentConfig(name="sort", taskset={"id": "sample_alphabet_sort", "num_examples": 2, **TURNS})
BOUND = 1e-3
"""Of the probe, in float32."""
ENOUGH = 12
"""Tokens of every request in flight before weights are exchanged under them."""
LENGTH = 90
"""Tokens of a reply: most of them are sampled after the exchange, also where it takes a busy machine long."""
CHECK_SECONDS = 0.3
"""As long as it takes to check the new weights."""


class Exchanges(SamplingPlan):
    """Serves one policy after the other, each when the requests in flight have some tokens of the one before."""

    weight_update = "keep"

    def __init__(self, engine, policies):
        super().__init__()
        self.engine, self.policies = engine, policies
        self.versions = {key: version for version, key in enumerate(policies)}
        self.version = 0
        self.due, self.served = threading.Event(), threading.Event()
        self.ended = threading.Event()

    @contextmanager
    def watched(self):
        """Let the engine's counts of tokens say when weights are exchanged."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()

    def _watch(self):
        while self.version + 1 < len(self.policies) and not self.ended.wait(0.02):
            if self.due.is_set():
                continue
            with paused(self.engine, clear_cache=False):
                counts = self.engine.count_tokens()
                if counts and min(counts.values()) > ENOUGH:
                    self.served.clear()
                    self.due.set()
                    self.served.wait(PATIENCE)  # paused until then: on a busy machine the replies would end

    def is_outdated(self):
        return self.due.is_set()

    def update_weights(self):
        self.version += 1
        key = list(self.policies)[self.version]
        self.engine.serve(key, self.policies[key])
        self.served.set()
        self.ended.wait(CHECK_SECONDS)  # rollouts go on, and some end, before the sampler is told of the policy
        self.due.clear()
        served_model = ServedModel(self.engine.url, KEY, salt=key)
        return WeightUpdate(Policy(key, self.version), served_model, assigned("sort", [], 4))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the environment is served."""
    with served(SORT, tmp_path_factory.mktemp("sort")) as told:
        yield told["address"]


@pytest.fixture(scope="module")
def examples():
    return examples_of(SORT)


def test_rows_say_which_policy_sampled_each_token(small_engine, models, view, address, examples, monkeypatch):
    # vLLM calls a paused engine asleep. Woken before the exchange, it would end the replies on a slow machine.
    monkeypatch.setattr(small_engine, "is_sleeping", lambda: False)
    policies = {"old": models["a"], "new": models["b"], "newer": models["a"]}
    rows = assigned("sort", examples["example_id"].to_pylist(), 4)
    small_engine.serve("old", policies["old"])
    exchanges = Exchanges(small_engine, policies)
    with exchanges.watched():
        config, old = view(SORT, max_tokens=LENGTH), Policy("old", 0)
        groups = sample(small_engine.url, address, config, rows, examples, policy=old, plan=exchanges)
    # A group that ended before the first exchange is of one policy.
    tables = {name: [group[name] for group in groups.values() if name in group] for name in TABLES}
    found = {name: [row for table in tables[name] for row in table.to_pylist()] for name in TABLES}
    assert failures(found["traces"]) == [] and len(found["traces"]) == 8
    assert not any("token_policies" in trace["info"] for trace in found["traces"])
    runs = {(row["trace_id"], row["message"]) for row in found["token_policies"]}
    assert len(found["token_policies"]) > len(runs), "no reply has tokens of several policies"
    check_tokens(small_engine, found, policies)


TABLES = ("traces", "messages", "token_policies")


def check_tokens(engine, found, policies):
    """Recompute each sampled token under every policy: the recorded one gives its log-prob, the others do not."""
    far = {True: [], False: []}
    for key, weights in policies.items():
        engine.serve(key, weights)
        for trace in found["traces"]:
            messages = {row["message"]: row for row in own(trace, found["messages"])}
            runs = [row for row in found["token_policies"] if row["trace_id"] == trace["trace_id"]]
            oldest = min((run["policy_version"] for run in runs), default=trace["policy_version"])
            assert trace["policy_version"] == oldest
            for reply in [row for row in messages.values() if row["sampled"]]:
                tokens = [token for row in path_to(reply, messages) for token in row["token_ids"]]
                scored = engine.score(tokens, f"again-{key}")[-len(reply["token_ids"]) :]
                for place, sampled_by in keys_of_tokens(reply, runs, trace["policy_key"]).items():
                    same = policies[sampled_by] == weights  # the last policy has the weights of the first one
                    far[same].append(abs(scored[place] - reply["logprobs"][place]))
    assert max(far[True]) < BOUND
    assert sum(each > BOUND for each in far[False]) > 0.9 * len(far[False]) > 0


def path_to(message, messages):
    """The messages that the model saw before one, and itself."""
    before = [] if message["parent"] is None else path_to(messages[message["parent"]], messages)
    return [*before, message]


def keys_of_tokens(message, runs, only):
    """The policy of each sampled token of a message, by its place; `only` where the trace is of one policy."""
    sampled = [place for place, is_sampled in enumerate(message["mask"]) if is_sampled]
    of_message = [run for run in runs if run["message"] == message["message"]]
    keys = {run["start"] + number: run["policy_key"] for run in of_message for number in range(run["num_tokens"])}
    assert not runs or sorted(keys) == sampled, "each token has one policy"
    return keys if runs else dict.fromkeys(sampled, only)


def test_an_engine_that_serves_another_policy_than_it_should_is_found(small_engine, models, view, address, examples):
    small_engine.serve("somebody else's", models["a"])
    rows = assigned("sort", examples["example_id"].to_pylist(), 1)
    ours, plan = Policy("ours", 0), SamplingPlan()
    plan.weight_update = "keep"
    with pytest.raises(UnknownPolicy, match="somebody else's"):
        sample(small_engine.url, address, view(SORT), rows, examples, policy=ours, plan=plan)

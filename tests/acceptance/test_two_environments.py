"""Two environments in one run, grpo in one and echo with a tool in the other: real engine, servers, learner, tables.

What every token should weigh is worked out again from the messages, in plain Python.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from configs.load import load
from storage.store import open_store
from tests.acceptance.lives import stagecoach
from tests.fixtures.warming import warmed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS, ALPHAS = 2, {"tool": 0.01, "user": 0.005}
SMALL = [
    f"steps={STEPS}",
    "seed=7",
    "assignment.groups_per_step=6",
    "assignment.group_size=4",
    "evaluation.every=0",
    "engine.memory_gib=0.25",
    "engine.startup_seconds=600",
    "learner.startup_seconds=600",
    "prefect.startup_seconds=600",
    # A model that has learnt nothing earns nothing: groups without any spread are trained all the same.
    'filtering.filters=[{type="errored"},{type="zero_advantage",enforce=false}]',
]
Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """The rows of one step of a run, by table."""

    tables: Mapping[str, list[Row]]

    def of(self, environment):
        """The samples of an environment's traces."""
        own = {row["trace_id"] for row in self.tables["traces"] if row["environment"] == environment}
        return [row for row in self.tables["samples"] if row["trace_id"] in own]

    def path(self, sample):
        """The messages of a sample from root to leaf."""
        found = {row["message"]: row for row in self.tables["messages"] if row["trace_id"] == sample["trace_id"]}
        return [found[number] for number in sample["path"]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The store with the finished run."""
    directory = tmp_path_factory.mktemp("two")
    settings = load(["two_environments"]).model.renderer_settings
    model = warmed(directory / "model", settings)
    store = str(directory / "store")
    stagecoach("run", "two_environments", *SMALL, f"model.path={model}", "name=two", f"store={store}")
    return store


def read(store, run):
    """The tables of each step of a run, those that it shares with another included."""
    entries = [entry for entry in store.ledger.entries(run=run) if not entry.part]
    steps = [Step({}) for _ in range(STEPS)]
    for entry in entries:
        for table in {piece.table for piece in entry.outputs} if entry.stage != "examples" else ():
            steps[entry.step].tables[table] = store.read(entry.slices(table)).to_pylist()  # type: ignore[index]
    return steps


@pytest.fixture(scope="module")
def steps(root):
    """The steps of the run."""
    return read(open_store(root), "two")


def in_turn(step):
    """Every sample with its messages; the second of each pair tells whether no sample before it had that message."""
    seen = set()
    for sample in step.tables["samples"]:
        names = [(sample["trace_id"], number) for number in sample["path"]]
        yield sample, [(row, name not in seen) for row, name in zip(step.path(sample), names, strict=True)]
        seen.update(names)


def alphas_of(environment, path):
    """The weight that each token of a sample should have in the ce component."""
    weights = []
    acted = False
    for row, is_first in path:
        alpha = ALPHAS.get(row["role"], 0.0) if environment == "lookup" and acted and is_first else 0.0
        assert len(row["is_content"]) == len(row["token_ids"]), "the renderer says of every token whether it is body"
        weights += [alpha * (body and not row["sampled"]) for body in row["is_content"]]
        acted = acted or row["sampled"]
    return weights


def environments_of(step):
    """The environment of every trace."""
    return {row["trace_id"]: row["environment"] for row in step.tables["traces"]}


@pytest.mark.essential
def test_there_was_something_to_tell_apart(steps):
    for step in steps:
        assert Counter(environments_of(step).values()) == {"reverse_text": 12, "lookup": 12}
    for environment, algorithm in (("reverse_text", "grpo"), ("lookup", "echo")):
        assert load(["two_environments"]).algorithm_of(environment).type == algorithm
    assert len({row["reward"] for step in steps for row in step.tables["traces"]}) > 2, "no reward differs"
    tools = [row for step in steps for row in step.tables["messages"] if row["role"] == "tool"]
    users = [row for step in steps for row in step.tables["messages"] if row["role"] == "user" and row["parent"]]
    assert tools and users
    assert {json.loads(row["body"])["name"] for row in tools} == {"lookup"}
    assert all(any(row["is_content"]) and not all(row["is_content"]) for row in tools + users)


@pytest.mark.essential
def test_conversations_of_several_turns_are_one_branch(steps):
    traces = [row for step in steps for row in step.tables["traces"]]
    assert not [row["error_message"] for row in traces if row["error_class"]]
    assert max(row["num_turns"] for row in traces) >= 3
    assert {row["num_branches"] for row in traces} == {1}


@pytest.mark.essential
def test_each_environment_is_credited_by_its_algorithm(steps):
    for step in steps:
        environments = environments_of(step)
        for sample, path in in_turn(step):
            expected = alphas_of(environments[sample["trace_id"]], path)
            assert sample["ce_weights"] == pytest.approx(expected)
            assert not any(sample["ref_kl_weights"])
        assert any(any(sample["ce_weights"]) for sample in step.of("lookup"))


@pytest.mark.essential
def test_every_token_is_trained_once_and_counted(steps):
    for step in steps:
        packed = {}
        for row in step.tables["batches"]:
            borders = zip(row["cu_seqlens"], row["cu_seqlens"][1:], strict=False)
            for sample_id, (start, end) in zip(row["sample_ids"], borders, strict=True):
                assert sample_id not in packed, "in two rows"
                streams = (row[name][start:end] for name in ("token_ids", "rl_weights", "ce_weights"))
                packed[sample_id] = tuple(streams)  # type: ignore[assignment]
        num_credited = 0
        for sample in step.tables["samples"]:
            tokens = [token for row in step.path(sample) for token in row["token_ids"]]
            # A token without an advantage teaches nothing, and a sample with no other token is in no row.
            pairs = zip(sample["rl_weights"], sample["advantages"], strict=True)
            rl, ce = [weight if advantage else 0.0 for weight, advantage in pairs], sample["ce_weights"]
            assert packed.get(sample["sample_id"]) == ((tokens, rl, ce) if any(rl) or any(ce) else None)
            num_credited += weighted(sample["rl_weights"])
        assert num_credited == sum(sum(row["mask"]) for row in step.tables["messages"])
        assert packed.keys() <= {sample["sample_id"] for sample in step.tables["samples"]}
        (update,) = step.tables["updates"]
        assert 0 < update["rl_tokens"] == sum(map(weighted, (rl for _, rl, _ in packed.values())))
        assert update["ce_tokens"] == sum(map(weighted, (ce for _, _, ce in packed.values()))) > 0
        assert update["ref_kl_tokens"] == 0


def weighted(stream):
    """How many weights are not zero."""
    return sum(weight != 0 for weight in stream)


@pytest.mark.essential
def test_the_component_of_observations_is_measured(steps):
    for step in steps:
        (update,) = step.tables["updates"]
        metrics = json.loads(update["metrics"])
        assert 0 < metrics["ce_nll_mean"] <= metrics["ce_nll_max"]
        # Weights from 0.05 to 0.1 over the number of weighted tokens.
        assert ALPHAS["user"] <= update["ce_loss"] / metrics["ce_nll_mean"] * 1.001 <= ALPHAS["tool"] * 1.002

"""A real run that trains in one environment and is evaluated in another: killed in an evaluation, nothing twice."""

import json

import pytest
from sample_reverse_text import demonstrations

from tests.acceptance.lives import SMALL, LivedRun, stagecoach

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

EXAMPLES, ATTEMPTS, STEPS = 5, 2, 2
OWN = f"""{{
    name = "lookup", taskset = {{ id = "sample_lookup", num_examples = {EXAMPLES}, num_hops = 1 }}, max_turns = 2,
    every = 1, attempts = {ATTEMPTS}, pass_at = [1, 2]
}}""".replace("\n", " ")
SETTINGS = [f"steps={STEPS}", "engine.max_model_len=512", "packing.tokens_per_row=2048", "evaluation.overlap=false"]
KILLS = {"after commit rollout 1 part": "flow"}
"""Without overlap the evaluation of the first step's policy samples before the second step."""


def tried(store):
    """The rollouts of evaluations that are safe, as policy and assignment, by trace; those of unfinished work too."""
    read = [
        store.read(entry.slices("traces")).to_pylist() for entry in store.ledger.entries(run="run", stage="rollout")
    ]
    found = [row for rows in read for row in rows if row["environment"] == "lookup"]
    return {row["trace_id"]: (row["policy_version"], row["assignment_id"]) for row in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run."""
    with LivedRun(tmp_path_factory.mktemp("tried"), *SETTINGS, f"evaluation.environments=[{OWN}]") as run:
        run.live(KILLS, status=-9)
        before = tried(run.store)
        assert EXAMPLES * ATTEMPTS < len(before) < 2 * EXAMPLES * ATTEMPTS, "killed in the second evaluation"
        run.live({})
        assert before.items() <= tried(run.store).items(), "and none of it was sampled again"
        yield run


def test_every_policy_is_tried_on_all_examples_and_nothing_twice(run):
    found = tried(run.store)
    assert len(found) == len({*found.values()}) == (STEPS + 1) * EXAMPLES * ATTEMPTS
    evaluations = run.outcome["evaluations"]
    tried_on = [(entry["set"], entry["version"]) for entry in evaluations]
    assert tried_on == [("lookup", version) for version in range(STEPS + 1)]
    assert {score["num_attempts"] for entry in evaluations for score in entry["scores"]} == {EXAMPLES * ATTEMPTS}
    logs = {path.name for path in (run.root / "logs/run").glob("environment-*")}
    assert logs == {"environment-lookup.log", "environment-reverse_text.log"}


def test_an_evaluation_of_a_policy_finds_what_its_run_has_sampled(run):
    place = ["--store", str(run.root), "--name", "again", "--plain"]
    assert "lookup" in (printed := stagecoach("eval", "--policy", "run", "seed=7", *place))
    assert "0 computed, " in printed


def test_a_supervised_run_is_evaluated_in_tables_alone(run, tmp_path):
    rows = demonstrations.demonstrations(8, seed=1, right=1.0, untagged=0.0, max_length=4)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["steps=1", "assignment.groups_per_step=8", "assignment.group_size=1", "packing.updates_per_step=1"]
    sources = [f"model.path={run.model}", f"data.path={tmp_path / 'rows.jsonl'}", "engine.max_model_len=512"]
    settings = [*few, *sources, "algorithm.type=supervised", f"evaluation.environments=[{OWN}]"]
    place = ["--store", str(tmp_path / "store"), "--name", "taught", "--plain"]
    printed = stagecoach("sft", "sft_demo", SMALL, *settings, *place)
    assert "policy 0 on lookup" in printed and "policy 1 on lookup" in printed

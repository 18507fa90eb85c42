"""A real run of adapters whose seats are also played by the base and by an earlier adapter, all by one engine.

Its process is killed in the middle of the last step's rollouts and goes on.
"""

import json
from collections import Counter, defaultdict
from itertools import chain

import pytest

from tasks.learner.digest import weights_sha256
from tests.acceptance.lives import LivedRun
from tests.fixtures.driving import rows

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS, GROUPS, SIZE = 3, 2, 3
ENVIRONMENT = """{
    name = "rivals", taskset = { id = "rivals" }, max_examples = 1, holdout_fraction = 0, max_turns = 1,
    seats = { judge = { model = { base = true } } },
    bindings = { function = "league:choose", models = { base = { base = true }, recent = { earlier = 1 } } }
}""".replace("\n", " ")
SETTINGS = [
    f"steps={STEPS}",
    f"environments=[{ENVIRONMENT}]",
    'algorithm.type="rae"',
    "training.lora={rank=4, alpha=16}",
    "training.learning_rate=0.01",
    f"assignment.groups_per_step={GROUPS}",
    f"assignment.group_size={SIZE}",
    "rollout.max_in_flight=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run."""
    with LivedRun(tmp_path_factory.mktemp("based"), *SETTINGS, plugins=True) as run:
        run.live({"after commit rollout 2 part": "flow"}, status=-9)
        run.live({})
        yield run


@pytest.fixture(scope="module")
def keys(run):
    """The keys of the policies, by version."""
    return [row["policy_key"] for row in sorted(rows(run.store)["policies"], key=lambda row: row["version"])]


def test_rows_say_which_policy_played_which_seat(run, keys):
    traces = rows(run.store)["traces"]
    assert [row["error_message"] for row in traces if row["error_class"]] == []
    columns = ("step", "agent", "trainable", "policy_key", "policy_version", "staleness")
    played = [json.loads(row["info"]).get("played_by") for row in traces]
    expected = {}
    for step in range(STEPS):
        earlier, own = max(step - 1, 0), (True, keys[step], step, 0, None)
        expected |= {(step, "first", *own): GROUPS * SIZE, (step, "second", *own): GROUPS}
        base = (False, keys[0], 0, 0, "base")
        expected |= {(step, "judge", *base): GROUPS * SIZE, (step, "second", *base): GROUPS}
        expected[step, "second", False, keys[earlier], earlier, 0, "recent"] = GROUPS
    pairs = zip(traces, played, strict=True)
    assert Counter((*(row[name] for name in columns), player) for row, player in pairs) == expected
    assert not [*(run.root / "logs/run").glob("teacher*")], "one engine serves all"


def test_log_probs_are_those_of_the_base_in_its_rows_alone(run, keys):
    import torch
    from transformers import AutoModelForCausalLM

    tables, off, messages = rows(run.store), {True: [], False: []}, defaultdict(list)
    model = AutoModelForCausalLM.from_pretrained(run.store.policies.directory(keys[0]), dtype=torch.float32).eval()
    for row in tables["messages"]:
        messages[row["trace_id"]].append(row)
    for trace in tables["traces"]:
        columns = [[row[name] for row in messages[trace["trace_id"]]] for name in ("token_ids", "mask", "logprobs")]
        tokens, mask, recorded = (torch.tensor([*chain.from_iterable(column)]) for column in columns)
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        apart = (logprobs.gather(1, tokens[1:, None])[:, 0] - recorded[1:])[mask[1:]].abs().max().item()
        off[trace["policy_key"] == keys[0]].append(apart)
    assert max(off[True]) < 1e-4 < 1e-3 < max(off[False])


def test_only_the_policy_s_own_tokens_are_trained_and_the_base_stays(run, keys):
    tables = rows(run.store)
    ours = {row["trace_id"] for row in tables["traces"] if row["trainable"]}
    assert {row["trace_id"] for row in tables["samples"]} == ours
    assert weights_sha256(run.store.policies.directory(keys[0], verify=True)) == weights_sha256(run.model)

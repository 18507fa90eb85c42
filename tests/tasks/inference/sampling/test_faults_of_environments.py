"""What environments do wrong: each fault is a row with its class, and nothing else is touched by it.

One real server below a real supervisor, and the small engine; the faults are those of plugins/misbehaving_taskset.
"""

import os

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig
from configs.run import View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import start_time
from storage.schemas.stage_tables import MESSAGES
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.filtering.stage import STAGE as FILTERING
from tasks.rollout.stage import STAGE
from tasks.runtime.stage import Policy
from tests.fixtures.builders import view as of_stage
from tests.fixtures.hosts import KEY, assigned, config_of, examples_of
from tests.fixtures.sampled import sample
from tests.fixtures.stages import advantage, filtering
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine

FAULTS = {
    "fine": None,
    "extra": None,
    "floods": None,
    "leaks": None,
    "infinite": "environment",
    "nothing": "environment",
    "words": "environment",
    "memory": "environment",
    "cancels": "environment",
    "rude": "environment",
    "unserialisable": "environment",
    "image": "environment",
    "program": "timeout",
}
"""The class of each fault's row; None where the rollout is sound."""
SIZE = 4


class Sampled:
    """The rows of one call of `sample`, and where the environment left its marks."""

    def __init__(self, directory, supervisor):
        self.directory = directory
        self.supervisor = supervisor
        self.groups = {}
        self.patience = 4.0
        """How long the rollout that waits for ever was let run, in seconds."""

    def row(self, fault):
        (row,) = self.groups[fault]["traces"].to_pylist()
        return row


@pytest.fixture(scope="module")
def sampled(small_engine, models, tmp_path_factory, plugins_of_module):
    directory = tmp_path_factory.mktemp("faults")
    taskset = {"id": "misbehaving_taskset", "faults": [*FAULTS, "partly"], "task": {"directory": str(directory)}}
    config = config_of(models["a"], EnvironmentConfig(name="bad", taskset=taskset), max_tokens=4, max_attempts=1)
    with Supervisor("run", directory / "services") as supervisor:
        found = Sampled(directory, supervisor)
        examples = examples_of(config.environments[0])
        (address,) = EnvironmentServers(supervisor, config, KEY).addresses(["bad"])["bad"]

        def sample_faults(assignments, **settings):
            of_rollout = config.rollout.model_copy(update=settings)
            view = View(config.model_copy(update={"rollout": of_rollout}), STAGE.sections, "rollout")
            policy = Policy("policy-of-faults", 3)
            found.groups |= sample(small_engine.url, address, view, assignments, examples, policy=policy, step=4)

        sound = [name for name in FAULTS if name != "program"]
        sample_faults(pa.concat_tables([assigned("bad", sound, 1), assigned("bad", ["partly"], SIZE)]))
        while not (directory / "tree").exists():  # on a slow machine its time may end before it begins
            found.patience *= 2
            sample_faults(assigned("bad", ["program"], 1), timeout_seconds=found.patience)
        yield found


def test_every_fault_is_one_row_of_its_class(sampled):
    assert {fault: sampled.row(fault)["error_class"] for fault in FAULTS} == FAULTS
    assert all((sampled.row(fault)["reward"] is None) == (kind is not None) for fault, kind in FAULTS.items())
    assert sampled.row("fine")["reward"] == 0.5


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("infinite", "NonFiniteReward", "reward 'outcome' is inf"),
        ("nothing", "TaskError", "not 'NoneType'"),
        ("words", "TaskError", "could not convert string to float: 'good'"),
        ("memory", "TaskError", "MemoryError: planted"),
        ("rude", "Rude", "planted"),
        ("unserialisable", "PydanticSerializationError", "must survive JSON"),
        ("image", "HarnessError", "the renderer of this model takes text alone"),
        ("program", "TimeoutError", "timeout_seconds = {patience:g}"),
    ],
)
def test_its_message_says_what_went_wrong(sampled, fault, kind, text):
    assert sampled.row(fault)["error_type"] == kind
    assert text.format(patience=sampled.patience) in sampled.row(fault)["error_message"]


def test_the_phase_that_failed_is_in_its_row(sampled):
    scoring, turn = sampled.row("words"), sampled.row("image")
    assert " scoring: ValueError: could not" in scoring["error_message"]
    assert (scoring["stop_condition"], turn["stop_condition"]) == ("agent_completed", "harness_error")


def test_no_baseline_moves(sampled):
    group = sampled.groups["partly"]
    rows = group["traces"].to_pylist()
    assert sorted((row["error_class"] or "", row["reward"]) for row in rows if row["reward"] is not None) == [
        ("", 0.0),
        ("", 1.0),
    ]
    assert sorted(row["error_type"] for row in rows if row["error_class"]) == ["NonFiniteReward", "TaskError"]
    sound = group["traces"].filter(pa.compute.is_null(group["traces"]["error_class"]))
    names = pa.compute.is_in(group["messages"]["trace_id"], value_set=sound["trace_id"].combine_chunks())
    alone = credited(sound, group["messages"].filter(names))
    assert credited(group["traces"], group["messages"]) == alone
    assert sorted(alone.values()) == [-0.5, 0.5]


def credited(traces, messages):
    """The advantages that filtering and advantage give to what is kept, by trace, with default settings but no std."""
    tables = {"traces": traces, "messages": messages.cast(MESSAGES.arrow)}
    verdicts = filtering(tables, of_stage(FILTERING, filtering={"filters": []}))["verdicts"]
    made = advantage(tables | {"verdicts": verdicts}, of_stage(ADVANTAGE, algorithm={"type": "dr_grpo"}))["samples"]
    return dict(zip(made["trace_id"].to_pylist(), made["advantage"].to_pylist(), strict=True))


def test_a_rollout_past_its_time_leaves_no_program_behind(sampled):
    tree = [int(process) for process in (sampled.directory / "tree").read_text().split()]
    assert len(tree) == 2, "the program and the child that it had started"
    until(lambda: not any(map(start_time, tree)), lambda: f"one of {tree} lives")


def test_a_child_that_was_let_go_ends_with_its_server(sampled):
    child = int((sampled.directory / "leaked").read_text())
    assert start_time(child) is not None and os.getsid(child) == child
    sampled.supervisor.close()
    assert start_time(child) is None
    log = (sampled.directory / "services" / "environment-bad.log").read_text()
    assert "EnvServer down" in log and "KeyboardInterrupt" not in log, "a server that is told to end does so quietly"

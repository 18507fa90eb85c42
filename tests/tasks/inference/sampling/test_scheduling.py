"""Scheduling against a real engine and a real server: attempts by class, sticky sessions, stragglers, killers."""

from collections import Counter, defaultdict

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from configs.environments import ElasticPool, EnvironmentConfig
from configs.run import RunConfig, View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from tasks.inference.sampling.limits import SamplingPlan
from tasks.inference.sampling.rollout_runner import RETRY_SEED_STRIDE
from tasks.metrics.rollouts import retokenised_turns
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, SECTIONS, assigned, config_of, examples_of
from tests.fixtures.proxy import EMPTY, HELD, MALFORMED, check_packed, check_wire, packed, recording
from tests.fixtures.sampled import sample
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine

MOST = 3
"""Attempts at a rollout; a model call has two of its own."""
NAMES = ["fine 2", "fine 3", "slow 2", "broken 1", "empty 1", "malformed 1", "raises 1", "nan 1", "late 1"]
NAMES += ["infrastructure 1", "hangs 1", "hangs b 1", "held 1"]
ENDING = [name for name in NAMES if not name.startswith(("hangs", "held"))]
SEEDS = {name: 100 * number for number, name in enumerate(NAMES)}
COUNTED = EnvironmentConfig(
    name="counted",
    taskset={"id": "counted_taskset", "names": NAMES},
    harness={"id": "chat_loop", "backoff_seconds": 0.0},
    pool=ElasticPool(max_workers=2, multiplex=2),
)
FAULTS = {
    SEEDS["slow 2"]: [429],
    SEEDS["broken 1"]: [500, 503],
    SEEDS["empty 1"]: [EMPTY],
    SEEDS["malformed 1"]: [MALFORMED, MALFORMED],
    SEEDS["held 1"]: [HELD],
}


class Sampled:
    """A server of this environment behind a proxy, and what was sampled there."""

    def __init__(self, address, proxy, models, log):
        self.address = address
        self.proxy = proxy
        self.models = models
        self.log = log
        self.examples = examples_of(COUNTED)
        self.tables = []

    def view(self, **rollout):
        settings = {"max_tokens": 6, "max_attempts": MOST, "timeout_seconds": 240.0} | rollout
        return View(config_of(self.models["a"], COUNTED, **settings), (*SECTIONS, "external"), "rollout")

    def sample(self, assignments, plan=None, needed=None, **rollout):
        groups = {}

        def keep(group, tables):
            groups[group] = tables["traces"].to_pylist()
            self.tables.append(tables)

        plan = plan or SamplingPlan({} if needed is None else {"counted": needed})
        options = {"policy": Policy("the policy", 0), "on_group": keep, "plan": plan}
        sample(self.proxy.url, self.address, self.view(**rollout), assignments, self.examples, **options)
        return groups


@pytest.fixture(scope="module")
def sampled(small_engine, models, tmp_path_factory, plugins_of_module):
    directory = tmp_path_factory.mktemp("counted")
    with recording(small_engine.url) as proxy, Supervisor("counted", directory) as supervisor:
        proxy.faults = FAULTS
        servers = EnvironmentServers(supervisor, RunConfig(environments=(COUNTED,)), KEY)
        (address,) = servers.addresses(["counted"])["counted"]
        yield Sampled(address, proxy, models, directory / "environment-counted.log")


def of_groups(rows, names):
    """The assignments of some groups, with the seeds that they have among all."""
    return rows.filter(pc.is_in(rows["group_id"], value_set=pa.array(names)))


@pytest.fixture(scope="module")
def attempted(sampled):
    """The row of each task that ends, by its name."""
    groups = sampled.sample(of_groups(assigned("counted", NAMES, 1), ENDING))
    return {name: row for name, (row,) in groups.items()}


def test_only_what_may_go_better_is_tried_again(sampled, attempted):
    assert {name: row["error_class"] for name, row in attempted.items()} == {
        "fine 2": None,
        "fine 3": None,
        "slow 2": None,
        "broken 1": None,
        "empty 1": None,
        "malformed 1": None,
        "raises 1": "environment",
        "nan 1": "environment",
        "late 1": "timeout",
        "infrastructure 1": "infrastructure",
    }
    first_seeds = seeds_of_attempts(sampled.proxy)
    of_calls = Counter(first_seeds[call.session] for call in sampled.proxy.calls)
    calls = {name: (of_calls[seed], sum(of_calls[later] for later in again(seed))) for name, seed in SEEDS.items()}
    assert {name: found for name, found in calls.items() if name in attempted} == {
        "fine 2": (2, 0),
        "fine 3": (3, 0),
        "slow 2": (3, 0),  # the call that was refused is made again, by the harness
        "broken 1": (3, 0),  # both tries at the call, then the rollout once more
        "empty 1": (1, 1),  # the model's answer was at fault: another seed
        "malformed 1": (2, 1),  # to the harness an answer that cannot be read is a 502
        "raises 1": (1, 0),
        "nan 1": (1, 0),
        "late 1": (MOST, 0),
        "infrastructure 1": (MOST, 0),
    }


def seeds_of_attempts(proxy):
    """The seed of each attempt by its session: the first call has it."""
    return {call.session: call.seed for call in reversed(proxy.calls)}


def again(seed):
    """The seeds of later attempts whose first one was answered badly."""
    return [seed + RETRY_SEED_STRIDE * attempt for attempt in range(1, MOST)]


def test_every_call_of_an_attempt_carries_its_session_and_no_other_does(sampled, attempted):
    sessions = defaultdict(list)
    for call in sampled.proxy.calls:
        assert call.session, "no call goes without"
        sessions[call.session].append([call.seed, len(call.sent), call.status])
    by_trace = {row["trace_id"]: name for name, row in attempted.items()}
    finished = {by_trace[session]: made for session, made in sessions.items() if session in by_trace}
    assert {name: len(made) for name, made in finished.items()}["fine 3"] == 3
    assert [status for *_, status in finished["slow 2"]] == [429, 200, 200], "through a retry of the call"
    seeds = {name: {made[0][0], *(seed for seed, *_ in made)} for name, made in finished.items()}
    assert sum(map(len, seeds.values())) == len(set().union(*seeds.values())), "no two rollouts share a seed"
    assert len({seed for seed, *_ in finished["fine 3"]}) == 3, "nor do two turns"
    assert len({seed for seed, *_ in finished["slow 2"]}) == 2, "a call that was refused is sent again with its seed"
    attempts = {
        name: sum(made[0][0] in (seed, *again(seed)) for made in sessions.values()) for name, seed in SEEDS.items()
    }
    assert {name: count for name, count in attempts.items() if count > 1} == {
        "broken 1": 2,
        "empty 1": 2,
        "malformed 1": 2,
        "late 1": MOST,
        "infrastructure 1": MOST,
    }


def test_replies_that_are_tokenised_again_are_counted_and_learnt_once(sampled, attempted):
    # This renderer takes the thought of an earlier turn out as soon as the user speaks again.
    ids = {attempted[name]["trace_id"] for name in ("fine 2", "fine 3", "slow 2")}
    tables = {name: pa.concat_tables([each[name] for each in sampled.tables]) for name in ("traces", "messages")}
    tables = {name: each.filter(pc.is_in(each["trace_id"], value_set=pa.array(ids))) for name, each in tables.items()}
    traces, messages = tables["traces"].to_pylist(), tables["messages"].to_pylist()
    found = retokenised_turns(tables["messages"])
    assert {row["group_id"]: row["num_branches"] for row in traces if row["num_turns"] == 2} == {
        "fine 2": 2,
        "slow 2": 2,
    }
    assert {row["trace_id"]: row["num_branches"] - 1 for row in traces} == found
    assert check_wire(sampled.proxy.calls, traces, messages) == 7
    credits, batches = packed(tables["traces"], tables["messages"], 256)
    check_packed(credits, batches, messages)
    assert len(credits) == sum(row["num_branches"] for row in traces)


def test_stragglers_are_stopped_when_enough_groups_have_ended(sampled):
    rows = assigned("counted", ["hangs 1", "fine 2", "raises 1", "hangs b 1"], 2)
    # Five at once: the second member of the last group waits for room until others have ended.
    groups = sampled.sample(rows, needed=2, max_in_flight=5)
    assert groups.keys() == {"hangs 1", "fine 2", "raises 1", "hangs b 1"}
    classes = {name: [row["error_class"] for row in members] for name, members in groups.items()}
    assert classes == {
        "fine 2": [None, None],
        "raises 1": ["environment", "environment"],  # a group of errors has ended
        "hangs 1": ["straggler", "straggler"],
        "hangs b 1": ["straggler", "straggler"],
    }
    for row in (*groups["hangs 1"], *groups["hangs b 1"]):
        assert (row["error_type"], row["reward"], row["trainable"]) == ("Stopped", None, True)
        assert "enough groups of environment 'counted' had ended" in row["error_message"]
    assert "after" in groups["hangs 1"][0]["error_message"]
    assert {row["assignment_id"] for row in groups["hangs b 1"]} == {"hangs b 1/0", "hangs b 1/1"}
    # The server is told while the rows are made, and does so and says so in its own time.
    until(lambda: "cancelled run" in sampled.log.read_text(), lambda: "the server was not told to stop working on them")


def test_the_engine_is_told_to_stop_as_well(sampled):
    rows = of_groups(assigned("counted", NAMES, 1), ["held 1", "fine 2"])
    sampled.proxy.after_held.add(SEEDS["fine 2"])
    groups = sampled.sample(rows, needed=1)
    assert {name: row["error_class"] for name, (row,) in groups.items()} == {"fine 2": None, "held 1": "straggler"}
    assert sampled.proxy.held == {SEEDS["held 1"]}
    proxy = sampled.proxy
    until(lambda: proxy.hung_up == proxy.held, lambda: "the call goes on although nobody waits for it")


def test_a_group_that_is_stale_is_stopped_at_the_engine_too_and_leaves_nothing(sampled):
    proxy, rows = sampled.proxy, of_groups(assigned("counted", NAMES, 1), ["held 1", "fine 2"])
    proxy.held.clear()
    proxy.hung_up.clear()
    sampled.proxy.after_held.add(SEEDS["fine 2"])

    class Stale(SamplingPlan):
        weight_update = "wait"

        def find_dropped(self, groups):
            return {"held 1"}.intersection(groups) if proxy.held else ()

    groups = sampled.sample(rows, plan=Stale())
    assert {name: row["error_class"] for name, (row,) in groups.items()} == {"fine 2": None}
    until(lambda: proxy.hung_up == {SEEDS["held 1"]}, lambda: "the call goes on although nobody waits for it")

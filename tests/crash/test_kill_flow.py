"""The flow's process dies by SIGKILL wherever it can hurt; called again, the run ends as if nothing had happened.

Two runs at a time are killed and called again: each is mostly one process at work after another. They share nothing.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from storage.store import open_store
from tests.crash.checks import check_same, go_on, killed
from tests.fixtures.driving import Driven, Life, finished, rows
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BOUNDARIES = [
    "after commit policy_import 0",
    "after commit examples 0",
    "after commit assignment 0",
    "after commit rollout 0",
    "after commit filtering 0",
    "after commit advantage 0",
    "after commit packing 0",
    "after commit training 0",
    "after commit metrics 0",
    "after commit rollout 1",
    "after commit training 1",
]
INSIDE = [
    "before commit policy_import 0",  # the weights are published and the ledger does not know
    "sampling 0-0",  # nothing is committed
    "handed over 0-1",  # one group is safe, another is on its way to the disk
    "after append traces 0 #2",  # traces without their messages
    "before commit rollout 0 part #2",  # a whole part that the ledger does not know
    "after commit rollout 0 part #2",  # two groups of three are safe
    "before commit rollout 0",  # all groups are safe, the stage is not
    "after append verdicts 0",
    "after request train",  # the learner is at it
    "before publish #2",  # the learner is done
    "before rename of weights #2",  # weights and manifest are written, but not in their place
    "after publish #2",  # weights in their place, nothing else
    "after append updates 0",  # updates without policies
    "before commit training 0",
    "after commit rollout 1 part",
    "after request train #2",  # with optimizer state of an earlier step
]
THROUGH_PREFECT = ["after commit rollout 0 part #2", "after commit advantage 0", "after request train"]
OFF_POLICY = "rollout.max_off_policy_steps=1"
AHEAD = ["after commit rollout 1 part", "after request train", "after commit training 0"]
ROUNDED = ("training.dtype=bfloat16", "training.policy_dtype=bfloat16")
IN_MEMORY = (*ROUNDED, "learner.memory_directory=DIRECTORY")
HANDED_OVER = [
    "before publish #2",  # the new policy is in memory alone
    "sampling 1-0",  # the next step has begun on it, wherever it is by then
    "before rename of weights #2",  # the copy of it is complete, but not in its place
    "after publish #2",  # it is in its place, nothing else
    "before commit training 0",
]
AT_A_TIME = 2
SAME = "called again it makes the same rows, keys and weights, and samples no committed group again"


@dataclass(frozen=True)
class Story:
    """A run that is killed at a moment and called again."""

    moment: str
    prefect: bool = False
    overrides: tuple[str, ...] = ()

    def lived(self, run: Driven) -> tuple[Driven, Life]:
        """Live it in an empty directory; return the run at its end, and its life that was ended."""
        first = killed(run, self.moment, prefect=self.prefect)
        go_on(run, first, prefect=self.prefect)
        return run, first


IN_CI = {Story("handed over 0-1"), Story("after append updates 0")}
"""The others are run at night."""


def ended_as(ended: Future[tuple[Driven, Life]], reference: Driven) -> None:
    """Assert that a run that was killed and called again made what another made."""
    run, first = ended.result()
    happened(f"SIGKILL to {first.receipts[0]['pid']}, the last moment {first.moments[-1]}")
    check_same(run, reference)


def stories(stories: list[Story]) -> pytest.MarkDecorator:
    """Run a test for each of some stories, called by their moments."""
    nightly = [() if story in IN_CI else pytest.mark.nightly for story in stories]
    cases = [pytest.param(story, id=story.moment, marks=mark) for story, mark in zip(stories, nightly, strict=True)]
    return pytest.mark.parametrize("story", cases)


@pytest.fixture(scope="module")
def ended(request, drive):
    """The stories of all tests that are to come; while one is looked at, the next are lived."""
    own = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    told = [item.callspec.params["story"] for item in own if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {story: pool.submit(story.lived, drive(*story.overrides)) for story in told}
        pool.shutdown(cancel_futures=True)


@pytest.mark.fault("process", "a flow is killed at a moment", SAME)
@stories([Story(moment) for moment in (*BOUNDARIES, *INSIDE)])
def test_a_killed_run_called_again_ends_as_if_nothing_had_happened(story, ended, uninterrupted):
    ended_as(ended[story], uninterrupted)


@pytest.mark.fault("process", "a Prefect flow is killed at a moment", SAME)
@stories([Story(moment, prefect=True) for moment in THROUGH_PREFECT])
def test_it_does_so_as_a_prefect_flow(story, ended, uninterrupted):
    ended_as(ended[story], uninterrupted)


def test_the_moments_are_those_of_a_run(uninterrupted):
    moments = (uninterrupted.directory / "all_moments.jsonl").read_text().splitlines()
    seen = {moment.strip('"') for moment in moments}
    assert seen >= {*BOUNDARIES, *INSIDE}
    boundaries = {entry.stage for entry in finished(open_store(uninterrupted.store))}
    assert boundaries == {moment.split()[2] for moment in BOUNDARIES}, "a stage has no boundary here"


@pytest.fixture(scope="module")
def rounded(drive):
    """A run that nobody killed, of policies in bfloat16 that are written to the disk at once."""
    run = drive(*ROUNDED)
    life = run.live()
    assert life.status == 0, life.output
    files = {path.name for path in (run.store / "policies").rglob("*.safetensors")}
    assert "optimizer-00001-of-00001.safetensors" in files
    return run


@pytest.mark.fault("process", "a flow is killed while weights are in memory and on their way to the disk", SAME)
@stories([Story(moment, overrides=IN_MEMORY) for moment in HANDED_OVER])
def test_it_does_so_while_weights_are_on_their_way_to_the_disk(story, ended, rounded):
    ended_as(ended[story], rounded)
    run, first = ended[story].result()
    assert "after request train" in first.moments
    assert not list(run.directory.glob("stagecoach-*/*")), "the memory is given back, that of the killed flow too"


@pytest.fixture(scope="module")
def off_policy(drive):
    """A run that nobody killed, in which a step is sampled while the step before it trains."""
    run = drive(OFF_POLICY)
    life = run.live()
    assert life.status == 0, life.output
    staleness = {(row["step"], row["staleness"]) for row in rows(open_store(run.store))["traces"]}
    assert staleness == {(0, 0), (1, 1)}
    return run


@pytest.mark.fault("process", "a flow that samples ahead is killed at a moment", SAME)
@stories([Story(moment, overrides=(OFF_POLICY,)) for moment in AHEAD])
def test_it_does_so_while_it_samples_ahead(story, ended, off_policy):
    ended_as(ended[story], off_policy)

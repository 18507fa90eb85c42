"""The debate played over real interactions: exact conversations before a scripted endpoint, and with a real engine."""

import asyncio
import itertools
import json
import re

import numpy as np
import pyarrow as pa
import pytest
import verifiers.v1 as vf
from sample_arena.errors import ArenaError
from sample_arena.scores import EpisodeScore
from sample_debate.claims import Claim, cited, num_true_citations
from sample_debate.playing import DebateEnv
from sample_debate.taskset import DebateTask, data_of
from verifiers.v1.clients import ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from configs.sections import ModelConfig, RolloutConfig
from tasks.arrays.parse_errors import parse_error_flags
from tasks.inference.engine.client import MODEL, ServedModel
from tasks.inference.engine.command import CPU_BLOCK_TOKENS
from tasks.inference.engine.metrics import EngineMetrics
from tasks.inference.sampling.model_requests import client_config, sampling_config
from tasks.inference.trace_rows.rows import RolloutOrigin, rows_of_record, wire_record
from tests.environments.scripted import episodes, listed
from tests.fixtures.commands import cases
from tests.fixtures.hosts import ENGINE, KEY, engine_of
from tests.fixtures.sampled import sampled_tables

pytestmark = pytest.mark.engine

MEMBERS = ("affirmative", "negative", "judge")
CLAIM = Claim("7", ("4", "7", "2"))
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
SEATS = {
    name: {"harness": {"id": "chat_loop", "backoff_seconds": 0}, "runtime": {"type": "subprocess"}} for name in MEMBERS
}


# Claims


@pytest.mark.parametrize(
    ("statement", "found"),
    [("see 4 7 2", "4 7 2"), ("I see 4 7", "4 7"), ("see 47", None), ("4 7 2", None), ("see 1 see 2", "1"), ("", None)],
)
def test_what_a_statement_cites(statement, found):
    assert cited(statement) == found
    assert num_true_citations([statement, "see 4 7 2"], "4 7 2") == 1 + (found == "4 7 2")


# Conversations, word for word


def config_of(**settings):
    seats = {name: {**seat, **settings.pop(name, {})} for name, seat in SEATS.items()}
    return resolve_env_config({"taskset": {"id": "sample_debate"}, **seats, **settings})


def played(answer, env=None, claim=CLAIM, **settings):
    """One episode in which `answer(member, turn)` is what a model says; return it, and the requests of each member."""
    environment = env or load_environment(config_of(**settings))
    asked = {member: [] for member in MEMBERS}

    def reply(body):
        messages = body["messages"]
        member = {"yes": "affirmative", "no:": "negative"}.get(users(messages)[0][:3], "judge")
        said = answer(member, sum(each["role"] == "assistant" for each in messages))
        if not isinstance(said, int):
            asked[member].append(messages)
        return said

    task = DebateTask(data_of(claim), environment.taskset.config.task)
    ((episode,), _) = asyncio.run(episodes(environment, [task], reply))
    return episode, asked


def by_member(episode):
    assert sorted(trace.agent.name for trace in episode.traces) == sorted(MEMBERS)
    return {trace.agent.name: trace for trace in episode.traces}


def users(messages):
    return [each["content"] for each in messages if each["role"] == "user"]


def words(member, number):
    return "<yes>" if member == "judge" else f"<note>SECRET</note> {member[0]}{number}"


def debated(answer=words, **settings):
    """One episode whose members have private words."""
    return played(answer, private_tag="note", **settings)


def test_by_turns_each_hears_the_other_before_it_speaks():
    episode, asked = debated(num_rounds=2)
    assert users(asked["affirmative"][-1]) == ["yes: 7 in 4 7 2\n\nsay 1", "negative: n0\n\nsay 2"]
    assert users(asked["negative"][-1]) == [
        "no: 7 in 4 7 2\n\naffirmative: a0\n\nsay 1", "affirmative: a1\n\nsay 2"
    ]  # fmt: skip
    heard = "\n\n".join(["affirmative: a0", "negative: n0", "affirmative: a1", "negative: n1", "7?"])
    assert users(asked["judge"][-1]) == [heard]
    assert episode.ok and {name: trace.reward for name, trace in by_member(episode).items()} == {
        "affirmative": 1.0, "negative": -1.0, "judge": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["sequential", "simultaneous"])
@pytest.mark.essential
def test_prompts_extend_each_other_and_private_words_stay_with_their_member(schedule):
    episode, asked = debated(num_rounds=3, schedule=schedule)
    for member, requests in asked.items():
        for before, after in itertools.pairwise(requests):
            assert after[: len(before)] == before
        assert "SECRET" not in "".join(users(requests[-1])), member
    traces = by_member(episode)
    assert {name: (trace.num_turns, trace.num_branches) for name, trace in traces.items()} == {
        "affirmative": (3, 1), "negative": (3, 1), "judge": (1, 1)
    }  # fmt: skip
    # Turns of all members, not of the first one.
    assert {trace.metrics["total_turns"] for trace in traces.values()} == {7.0}
    assert {trace.info["stop"] for trace in traces.values()} == {"schedule_exhausted"}


@cases(__file__, "verdicts")
def test_the_verdict_is_what_an_episode_is_worth(verdict, claim, rewards, given, true):
    digit, listed = claim.split(" in ")
    says = {"affirmative": f"see {listed}", "negative": "see 9 9 9", "judge": verdict}
    claimed = Claim(digit, tuple(listed.split()))
    traces = by_member(played(lambda member, number: says[member], claim=claimed)[0])
    assert [traces[member].reward for member in MEMBERS] == rewards
    assert [list(traces[member].rewards) for member in MEMBERS] == [["outcome"]] * 3
    assert {(trace.metrics["verdict_given"], trace.metrics["verdict_true"]) for trace in traces.values()} == {
        (given, true)
    }
    assert traces["affirmative"].metrics["cited"] == 1 and traces["negative"].metrics["cited"] == 0


@pytest.mark.essential
def test_broken_thoughts_are_flagged_and_the_debate_goes_on():
    def answer(member, number):
        return "n1 <think>SECRET" if (member, number) == ("negative", 1) else words(member, number)

    episode, asked = debated(answer, num_rounds=2)
    traces = by_member(episode)
    assert episode.ok and "SECRET" not in str(asked["judge"])
    assert users(asked["judge"][-1])[0].endswith("negative: n1\n\n7?")
    assert ["parse_errors" in traces[member].info for member in MEMBERS] == [False, True, False]
    negative = traces["negative"]
    (number,) = negative.info["parse_errors"]
    assert negative.nodes[number].sampled and negative.nodes[number].message.content == "n1 <think>SECRET"
    assert flagged(negative) == [number]


def flagged(trace):
    """The messages of a trace that the admission to training finds unreadable, in its own tables."""
    messages = pa.table(
        {
            "message": range(len(trace.nodes)),
            "body": [json.dumps(node.message.model_dump()) for node in trace.nodes],
            "sampled": [node.sampled for node in trace.nodes],
        }
    )
    traces = pa.table({"record": ["{}"], "info": [json.dumps(trace.info)]})
    return np.flatnonzero(parse_error_flags(traces, messages, np.zeros(len(trace.nodes), np.int64))).tolist()


# Failures


@pytest.mark.parametrize("schedule", ["sequential", "simultaneous"])
def test_a_member_that_fails_ends_the_episode_and_nobody_is_given_a_zero(schedule):
    def answer(member, number):
        return 400 if (member, number) == ("negative", 1) else words(member, number)

    episode, asked = debated(answer, num_rounds=2, schedule=schedule)
    traces = by_member(episode)
    assert not episode.ok and episode.errors == []
    assert [len(traces[member].errors) for member in MEMBERS] == [0, 1, 0]
    # What is tried again is decided by the failure, not by what followed from it: it comes first.
    assert [trace.agent.name for trace in episode.traces] == ["negative", "affirmative", "judge"]
    assert [trace.rewards for trace in traces.values()] == [{"outcome": None}] * 3
    assert all(trace.info["stop"] == "error" for trace in traces.values())
    assert all(trace.info["episode_error"].startswith("member 'negative' failed") for trace in traces.values())
    assert asked["judge"] == []


class Partial(DebateEnv):
    """Rewards who kept speaking while another failed."""

    def partial_score(self, task, state):
        return {"members": [{"member": "affirmative", "reward": 0.5}], "metrics": {"slots": float(state.num_slots)}}


def test_a_partial_score_stands_and_the_rest_is_not_scored():
    episode, _ = played(
        lambda member, number: 400 if member == "negative" else "hi",
        Partial(config_of(num_rounds=2)),
    )
    traces = by_member(episode)
    assert traces["affirmative"].reward == 0.5 and traces["affirmative"].metrics == {"slots": 1.0, "total_turns": 1.0}
    assert [traces[member].rewards for member in ("negative", "judge")] == [{"outcome": None}] * 2


class Incomplete(DebateEnv):
    """Forgets the judge."""

    def score(self, task, state):
        full = super().score(task, state)
        return EpisodeScore(members=full.members[:2])


class Buggy(DebateEnv):
    """Stumbles over one claim, and not over its own arena."""

    def score(self, task, state):
        return {}["no such key"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [(Incomplete, r"ScoreError: .*no reward for \['judge'\]"), (Buggy, "KeyError: 'no such key'")],
)
def test_a_score_that_fails_is_the_failure_of_its_episode(environment, told):
    episode, _ = played(lambda member, number: "hi", environment(config_of()))
    assert not episode.ok and [error.type for error in episode.errors] == ["EnvError"]
    assert re.search(told, episode.errors[0].message)
    assert all(trace.rewards == {} for trace in episode.traces)


def test_a_failing_episode_leaves_those_beside_it_alone():
    env = load_environment(config_of())
    broken, _ = played(lambda member, number: 400, env)
    whole, _ = played(words, env, private_tag="note")
    assert not broken.ok and whole.ok and by_member(whole)["affirmative"].reward == 1.0


# Seats


def test_the_learner_is_pinned_or_drawn_by_example():
    for pinned in ("affirmative", "negative"):
        traces = by_member(debated(learner_seat=pinned)[0])
        assert {trace.info["learner_seat"] for trace in traces.values()} == {pinned}
    assert all("learner_seat" not in trace.info for trace in played(words)[0].traces)
    failed = played(lambda member, number: 400, learner_seat="negative")[0]
    assert {trace.info["learner_seat"] for trace in failed.traces} == {"negative"}


def test_an_episode_that_would_show_an_image_fails_before_anyone_is_asked(monkeypatch):
    shown = vf.TaskData.model_validate({"prompt": [{"role": "user", "content": [PICTURE]}]}).prompt
    data = data_of(CLAIM).model_copy(update={"prompt": shown})
    monkeypatch.setitem(played.__globals__, "data_of", lambda claim: data)
    episode, asked = played(words)
    assert (
        "its prompt has image_url, and an arena passes text alone" in episode.errors[0].message and not episode.traces
    )
    assert not any(asked.values())


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"learner_seat": "judge"}, "learner_seat = 'judge'"), ({"private_tag": "think"}, "private tag 'think'")],
)
def test_settings_that_cannot_be_played_are_refused(settings, told):
    with pytest.raises(ArenaError, match=told):
        load_environment(config_of(**settings))


# With a real engine


@pytest.fixture(scope="module")
def model(models):
    return models["a"]


@pytest.fixture(scope="module")
def engine(model, small_engine):
    small_engine.serve("policy-of-debates", model)
    return small_engine


def view_of(model, *environment):
    config = RunConfig(
        model=ModelConfig(path=str(model), renderer="qwen3", renderer_settings={"enable_thinking": False}),
        environments=environment or RunConfig().environments,
        rollout=RolloutConfig(max_tokens=8, max_attempts=1),
        engine=ENGINE,
    )
    return View(config, ("rollout", "environments", "engine", "model"), "rollout")


def sampled(engine, model, directory, **env):
    """The rows of two rollouts for each of two claims, through a real environment server."""
    environment = EnvironmentConfig(name="debate", taskset={"id": "sample_debate", "num_examples": 8}, env=env)
    view = view_of(model, environment)
    tables = sampled_tables(engine, environment, view, listed(environment), directory, (2, 2))
    return tables["traces"].to_pylist(), tables["messages"].to_pylist()


def sampled_here(engine, model, **settings):
    """The rows of an episode that is played in this process, for want of time to start servers."""
    environment, view = load_environment(config_of(**settings)), view_of(model)
    served = ServedModel(engine.url, KEY, salt="salt")
    own = dict.fromkeys(("assignment_id", "group_id", "environment", "example_id"), "x")

    async def go():
        async with environment.serving():
            task = DebateTask(data_of(CLAIM), environment.taskset.config.task)
            sampling = sampling_config(served, view.rollout.request_sampling, 0)
            context = ModelContext(client=client_config(served, view), model=MODEL, sampling=sampling)
            return await environment.run_episode(task, context)

    traces, messages = [], []
    episode = asyncio.run(go())
    for trace in episode.traces:
        row, nodes = rows_of_record(wire_record(trace), RolloutOrigin(own, "policy", 0, 0, 1.0), episode.id)
        traces.append(row)
        messages += nodes
    return traces, messages


def episodes_of(traces):
    """The rows of each episode by member, one of each."""
    found = {}
    for row in traces:
        assert found.setdefault(row["episode_id"], {}).setdefault(row["agent"], row) is row
    assert all(sorted(each) == sorted(MEMBERS) for each in found.values())
    return list(found.values())


def check_whole(each, messages):
    """An episode of two rounds: zero-sum, each conversation one branch whose tokens go on from turn to turn."""
    rows = [each[member] for member in MEMBERS]
    assert [row["error_message"] for row in rows] == [None] * 3
    assert rows[0]["reward"] + rows[1]["reward"] == rows[2]["reward"] == 0.0
    assert [(row["num_branches"], row["num_turns"]) for row in rows] == [(1, 2), (1, 2), (1, 1)]
    assert {json.loads(row["metrics"])["total_turns"] for row in rows} == {5.0}
    assert len({json.loads(row["info"])["learner_seat"] for row in rows}) == 1
    for row in rows:
        own = [message for message in messages if message["trace_id"] == row["trace_id"]]
        assert [message["parent"] for message in own] == [None, *range(len(own) - 1)]
        assert [message["role"] for message in own] == ["user", "assistant"] * row["num_turns"]
        assert all(message["token_ids"] for message in own)


def test_by_turns_each_member_has_a_trace_whose_tokens_go_on_from_turn_to_turn(engine, model, tmp_path):
    traces, messages = sampled(engine, model, tmp_path, num_rounds=2, learner_seat="alternate")
    found = episodes_of(traces)
    assert len(found) == 4 and all(len({row["assignment_id"] for row in each.values()}) == 1 for each in found)
    for each in found:
        check_whole(each, messages)


def cached(messages):
    """Return how many tokens of one member's prompts lie in whole blocks that its own turn before has computed."""
    mask = [sampled for message in messages for sampled in message["mask"]]
    begins = [place for place in range(1, len(mask)) if mask[place] > mask[place - 1]]
    turns = [(begin, len([*itertools.takewhile(bool, mask[begin:])])) for begin in begins]
    # The last token of an answer is sampled and never read, and that of a prompt is always computed.
    known = (min(start + count, after) - 1 for (start, count), (after, _) in itertools.pairwise(turns))
    return sum(tokens // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS for tokens in known)


@pytest.mark.nightly
def test_the_engine_finds_a_members_last_turn_in_its_cache_and_nobody_elses(model, tmp_path):
    with engine_of(model, tmp_path / "engine.json", metrics=True) as engine:
        counted = EngineMetrics([ServedModel(engine.url, KEY)])
        with counted.measure():
            traces, messages = sampled_here(engine, model, num_rounds=3)
    (each,) = episodes_of(traces)
    found = {
        member: cached([message for message in messages if message["trace_id"] == each[member]["trace_id"]])
        for member in MEMBERS
    }
    assert min(found["affirmative"], found["negative"]) >= 3 * CPU_BLOCK_TOKENS and found["judge"] == 0
    hits = {row["name"]: row["value"] for row in counted.take().to_pylist()}["prefix_cache_hits"]
    assert hits == sum(found.values())


@pytest.mark.nightly
def test_a_conversation_that_no_longer_fits_is_cut_and_no_error(engine, model):
    (each,) = episodes_of(sampled_here(engine, model, num_rounds=12, schedule="simultaneous")[0])
    assert {json.loads(row["info"])["stop"] for row in each.values()} == {"prompt_too_long"}
    debaters = [each["affirmative"], each["negative"]]
    assert [(row["error_message"], row["reward"]) for row in debaters] == [(None, 0.0)] * 2
    assert any(row["is_truncated"] for row in debaters)
    # It was never asked, and the environment says what that earns it: nothing failed.
    assert (each["judge"]["error_class"], each["judge"]["reward"], each["judge"]["num_turns"]) == (None, 0.0, 0)

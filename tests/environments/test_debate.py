"""The debate played over real interactions: exact conversations before a scripted endpoint, and with a real engine."""

import asyncio
import itertools
import json
import re

import numpy as np
import pyarrow as pa
import pytest
import verifiers.v1 as vf
from sample_arena.errors import ArenaError, PlayError
from sample_arena.scores import EpisodeScore
from sample_arena.seats import learner, require_text
from sample_debate.claims import Claim, cited, claims, num_true_citations
from sample_debate.demonstrations import demonstrations
from sample_debate.playing import DebateEnv
from sample_debate.taskset import DebateTask, data_of
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.types import SamplingConfig
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
from tests.environments.scripted import listed, response
from tests.fixtures.commands import cases
from tests.fixtures.endpoints import endpoint
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


def test_claims_are_seeded_half_of_them_true_and_all_different():
    first = list(claims(40, 3, seed=2))
    assert len(set(first)) == 40 and list(claims(60, 3, seed=2))[:40] == first != list(claims(40, 3, seed=3))
    assert [claim.truth for claim in first] == ["affirmative", "negative"] * 20
    assert all((claim.digit in claim.listed.split()) == (claim.truth == "affirmative") for claim in first)


@pytest.mark.parametrize(("length", "most"), [(1, 20), (2, 250), (3, 2500)])
def test_as_many_claims_are_drawn_as_are_promised(length, most):
    truths = [claim.truth for claim in claims(most, length, seed=0)]
    assert truths == ["affirmative", "negative"] * (most // 2)
    with pytest.raises(ValueError, match=f"there are {10 * 10**length}, and at most {most} of them"):
        list(claims(most + 1, length, seed=0))
    assert len(list(demonstrations(6 * most, seed=0, length=length))) == 6 * most


@pytest.mark.parametrize(
    ("statement", "found"),
    [("see 4 7 2", "4 7 2"), ("I see 4 7", "4 7"), ("see 47", None), ("4 7 2", None), ("see 1 see 2", "1"), ("", None)],
)
def test_what_a_statement_cites(statement, found):
    assert cited(statement) == found
    assert num_true_citations([statement, "see 4 7 2"], "4 7 2") == 1 + (found == "4 7 2")


# Conversations, word for word


class Scripted:
    """A chat endpoint that answers by `answer(member, turn)`, a text or an HTTP status, and keeps its requests."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = {member: [] for member in MEMBERS}

    async def respond(self, request):
        messages = (await request.json())["messages"]
        opening = next(each["content"] for each in messages if each["role"] == "user")
        member = {"yes": "affirmative", "no:": "negative"}.get(opening[:3], "judge")
        number = sum(each["role"] == "assistant" for each in messages)
        said = self.answer(member, number)
        if not isinstance(said, int):
            self.asked[member].append(messages)
        return response(said)


def config_of(**settings):
    seats = {name: {**seat, **settings.pop(name, {})} for name, seat in SEATS.items()}
    return resolve_env_config({"taskset": {"id": "sample_debate", "length": 3}, **seats, **settings})


def played(answer, env=None, claim=CLAIM, **settings):
    """One episode before a scripted endpoint."""
    script, environment = Scripted(answer), env or load_environment(config_of(**settings))

    async def go():
        async with endpoint(script.respond) as url, environment.serving():
            client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_SUCH_KEY")
            context = ModelContext(client=client, model="m", sampling=SamplingConfig())
            task = DebateTask(data_of(claim), environment.taskset.config.task)
            return await environment.run_episode(task, context)

    return asyncio.run(go()), script


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
    episode, script = debated(num_rounds=2)
    assert users(script.asked["affirmative"][-1]) == ["yes: 7 in 4 7 2\n\nsay 1", "negative: n0\n\nsay 2"]
    assert users(script.asked["negative"][-1]) == [
        "no: 7 in 4 7 2\n\naffirmative: a0\n\nsay 1", "affirmative: a1\n\nsay 2"
    ]  # fmt: skip
    heard = "\n\n".join(["affirmative: a0", "negative: n0", "affirmative: a1", "negative: n1", "7?"])
    assert users(script.asked["judge"][-1]) == [heard]
    assert episode.ok and {name: trace.reward for name, trace in by_member(episode).items()} == {
        "affirmative": 1.0, "negative": -1.0, "judge": 0.0
    }  # fmt: skip


def test_at_once_nobody_hears_the_other_before_the_next_round():
    episode, script = debated(num_rounds=2, schedule="simultaneous")
    assert users(script.asked["affirmative"][-1]) == ["yes: 7 in 4 7 2\n\nsay 1", "negative: n0\n\nsay 2"]
    assert users(script.asked["negative"][-1]) == ["no: 7 in 4 7 2\n\nsay 1", "affirmative: a0\n\nsay 2"]
    assert len(script.asked["judge"]) == 1 and episode.ok


@pytest.mark.parametrize("schedule", ["sequential", "simultaneous"])
@pytest.mark.essential
def test_prompts_extend_each_other_and_private_words_stay_with_their_member(schedule):
    episode, script = debated(num_rounds=3, schedule=schedule)
    for member, requests in script.asked.items():
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

    episode, script = debated(answer, num_rounds=2)
    traces = by_member(episode)
    assert episode.ok and "SECRET" not in str(script.asked["judge"])
    assert users(script.asked["judge"][-1])[0].endswith("negative: n1\n\n7?")
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


@pytest.mark.parametrize(("at_once", "schedule"), [(0.0, "sequential"), (1.0, "simultaneous")])
def test_demonstrations_are_conversations_that_the_environment_has(at_once, schedule):
    rows = list(demonstrations(90, seed=3, at_once=at_once))
    first = next(n for n in range(0, 90, 3) if len(rows[n]["messages"]) == 4)
    told = {member: rows[first + number]["messages"] for number, member in enumerate(MEMBERS)}
    digit, numbers = re.fullmatch(r"yes: (\d) in ([\d ]+)\n\nsay 1", told["affirmative"][0]["content"]).groups()
    claim = Claim(digit, tuple(numbers.split()))
    _, script = played(
        lambda member, number: told[member][2 * number + 1]["content"], claim=claim, num_rounds=2, schedule=schedule
    )
    for member in MEMBERS:
        assert users(script.asked[member][-1]) == users(told[member])


def test_half_of_the_demonstrated_debates_are_of_each_schedule():
    # Whether the negative has heard the affirmative when it first speaks: the preset's debates are spoken at once.
    openings = [row["messages"][0]["content"] for row in demonstrations(3000, seed=5)][1::3]
    assert all(text.startswith("no: ") for text in openings)
    assert 0.45 < sum("affirmative: " in text for text in openings) / 1000 < 0.55
    with pytest.raises(ValueError, match=r"at_once 1\.5"):
        next(demonstrations(1, seed=0, at_once=1.5))


def test_demonstrations_know_the_forms_and_a_judge_that_goes_by_what_is_cited():
    """Of one who cites and one who does not, the first wins; two lists win where they agree about the digit."""
    rows = list(demonstrations(900, seed=1))
    assert len(rows) == 900 and list(demonstrations(300, seed=2)) != rows[:300]
    said = [row["messages"][-1]["content"] for row in rows]
    statements = [text for number, text in enumerate(said) if number % 3 != 2]
    assert 0.3 < statements.count("hm") / 600 < 0.5 and all(text == "hm" or cited(text) for text in statements)
    verdicts = said[2::3]
    assert set(verdicts) == {"<yes>", "<no>"}
    for judged, verdict in zip(rows[2::3], verdicts, strict=True):
        heard = judged["messages"][0]["content"]
        lists = {text.split(":")[0]: listed for text in heard.split("\n\n") if (listed := cited(text))}
        if len(lists) == 1:
            assert {"<yes>": "affirmative", "<no>": "negative"}[verdict] in lists
        found = {heard[-2] in text.split() for text in map(cited, heard.split("\n\n")) if text}
        assert len(lists) < 2 or len(found) != 1 or found == {verdict == "<yes>"}
    with pytest.raises(ValueError, match="sum to at most 1"):
        next(demonstrations(1, seed=1, cite=0.8, misquote=0.3))


# Failures


@pytest.mark.parametrize("schedule", ["sequential", "simultaneous"])
def test_a_member_that_fails_ends_the_episode_and_nobody_is_given_a_zero(schedule):
    def answer(member, number):
        return 400 if (member, number) == ("negative", 1) else words(member, number)

    episode, script = debated(answer, num_rounds=2, schedule=schedule)
    traces = by_member(episode)
    assert not episode.ok and episode.errors == []
    assert [len(traces[member].errors) for member in MEMBERS] == [0, 1, 0]
    # What is tried again is decided by the failure, not by what followed from it: it comes first.
    assert [trace.agent.name for trace in episode.traces] == ["negative", "affirmative", "judge"]
    assert [trace.rewards for trace in traces.values()] == [{"outcome": None}] * 3
    assert all(trace.info["stop"] == "error" for trace in traces.values())
    assert all(trace.info["episode_error"].startswith("member 'negative' failed") for trace in traces.values())
    assert script.asked["judge"] == []


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


class Refusing(DebateEnv):
    """Refuses the second slot when all of it was said."""

    async def committed(self, task, state):
        if state.num_slots == 2:
            raise PlayError("not that")

    def partial_score(self, task, state):
        return {"metrics": {"slots": float(state.num_slots)}}


def test_a_hook_that_refuses_a_slot_fails_the_episode_as_it_was_before_the_slot():
    episode, script = played(words, Refusing(config_of()))
    traces = by_member(episode)
    assert [len(script.asked[member]) for member in MEMBERS] == [1, 1, 0] and not episode.ok
    assert {trace.errors[-1].type for trace in traces.values()} == {"PlayError"}
    assert {trace.metrics["slots"] for trace in traces.values()} == {1.0}
    assert {trace.info["episode_error"] for trace in traces.values()} == {"PlayError: not that"}


class Stumbling(Partial):
    """Has a fault in its hook, which no rule of the arena knows."""

    async def committed(self, task, state):
        raise KeyError("no such turn")


def test_a_fault_of_the_program_is_raised_and_nothing_is_scored_for_it():
    episode, _ = played(words, Stumbling(config_of()))
    assert not episode.ok and [error.type for error in episode.errors] == ["EnvError"]
    assert "KeyError: 'no such turn'" in episode.errors[0].message
    assert all(trace.rewards == {} and not trace.ok for trace in episode.traces)


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


def test_drawn_by_example_both_seats_get_their_share():
    drawn = [learner("alternate", MEMBERS[:2], f"{claim.digit} in {claim.listed}") for claim in claims(200, 3, seed=0)]
    assert 70 < drawn.count("affirmative") < 130 and set(drawn) == set(MEMBERS[:2])
    assert [learner("alternate", MEMBERS[:2], "x")] * 3 == [learner("alternate", MEMBERS[:2], "x") for _ in range(3)]
    assert learner("", MEMBERS[:2], "x") is None


def test_images_are_refused():
    content = [{"type": "text", "text": "a"}, PICTURE]
    shown = vf.TaskData.model_validate({"idx": 4, "prompt": [{"role": "user", "content": content}]})
    with pytest.raises(ArenaError, match="task 4: its prompt has image_url, and an arena passes text alone"):
        require_text(shown)
    for fine in ("text", None, [{"role": "user", "content": content[:1]}], [{"role": "user", "content": "a"}]):
        require_text(vf.TaskData.model_validate({"prompt": fine}))


def test_an_episode_that_would_show_an_image_fails_before_anyone_is_asked(monkeypatch):
    shown = vf.TaskData.model_validate({"prompt": [{"role": "user", "content": [PICTURE]}]}).prompt
    data = data_of(CLAIM).model_copy(update={"prompt": shown})
    monkeypatch.setitem(played.__globals__, "data_of", lambda claim: data)
    episode, script = played(words)
    assert "an arena passes text alone" in episode.errors[0].message and not episode.traces
    assert not any(script.asked.values())


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


def sampled_here(engine, model, num_episodes, **settings):
    """The rows of episodes about one claim that are played in this process, for want of time to start servers."""
    environment, view = load_environment(config_of(**settings)), view_of(model)
    served = ServedModel(engine.url, KEY, salt="salt")
    own = dict.fromkeys(("assignment_id", "group_id", "environment", "example_id"), "x")

    async def go():
        async with environment.serving():
            task = DebateTask(data_of(CLAIM), environment.taskset.config.task)
            contexts = [
                ModelContext(
                    client=client_config(served, view),
                    model=MODEL,
                    sampling=sampling_config(served, view, 1.0, seed),
                )
                for seed in range(num_episodes)
            ]
            return await asyncio.gather(*(environment.run_episode(task, context) for context in contexts))

    traces, messages = [], []
    for episode in asyncio.run(go()):
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


@pytest.mark.nightly
def test_so_they_do_at_once(engine, model):
    settings = {"num_rounds": 2, "schedule": "simultaneous", "learner_seat": "negative"}
    traces, messages = sampled_here(engine, model, 2, **settings)
    for each in episodes_of(traces):
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
            traces, messages = sampled_here(engine, model, 1, num_rounds=3)
    (each,) = episodes_of(traces)
    found = {
        member: cached([message for message in messages if message["trace_id"] == each[member]["trace_id"]])
        for member in MEMBERS
    }
    assert min(found["affirmative"], found["negative"]) >= 3 * CPU_BLOCK_TOKENS and found["judge"] == 0
    hits = {row["name"]: row["value"] for row in counted.table().to_pylist()}["prefix_cache_hits"]
    assert hits == sum(found.values())


@pytest.mark.nightly
def test_a_conversation_that_no_longer_fits_is_cut_and_no_error(engine, model):
    (each,) = episodes_of(sampled_here(engine, model, 1, num_rounds=12, schedule="simultaneous")[0])
    assert {json.loads(row["info"])["stop"] for row in each.values()} == {"prompt_too_long"}
    debaters = [each["affirmative"], each["negative"]]
    assert [(row["error_message"], row["reward"]) for row in debaters] == [(None, 0.0)] * 2
    assert any(row["is_truncated"] for row in debaters)
    # It was never asked, and the environment says what that earns it: nothing failed.
    assert (each["judge"]["error_class"], each["judge"]["reward"], each["judge"]["num_turns"]) == (None, 0.0, 0)


@pytest.mark.essential
def test_a_member_without_a_model_leaves_rows_with_errors_and_no_zeros(engine, model):
    nowhere = {"type": "eval", "base_url": "http://127.0.0.1:9/v1", "api_key_var": "NO_SUCH_KEY"}
    (each,) = episodes_of(sampled_here(engine, model, 1, negative={"client": nowhere, "model": "gone"})[0])
    assert [each[member]["error_class"] for member in MEMBERS] == ["incomplete", "infrastructure", "incomplete"]
    assert [each[member]["reward"] for member in MEMBERS] == [None] * 3
    assert [each[member]["num_turns"] for member in MEMBERS] == [1, 0, 0]
    assert each["affirmative"]["error_type"] == "NotScored"

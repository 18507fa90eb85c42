"""Games and environments with tools, with a real engine and real servers: what reaches the tables and stages."""

import json
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import pyarrow as pa
import pytest
import sample_alphabet_sort.demonstrations as names
import sample_calc_tools.demonstrations as sums_of_tools
import sample_kuhn_poker.demonstrations as poker
import sample_proposer_solver.demonstrations as sums
import sample_wikispeedia.demonstrations as walks
from sample_calc_tools.sums import Chain, calculated, is_right, progress
from sample_calc_tools.words import words as calc_words
from sample_kuhn_poker.talk import move_of
from sample_wikispeedia.graph import graph, page
from sample_wikispeedia.walk import efficiency
from sample_wikispeedia.words import words as walk_words

from configs.load import load
from configs.run import RunConfig, View
from storage.schemas.stage_tables import SAMPLES
from tasks.learner.tiny import tiny_qwen3
from tasks.rollout import stage as rollout
from tests.environments.scripted import listed
from tests.fixtures.hosts import ENGINE, engine_of
from tests.fixtures.sampled import sampled_tables
from tests.fixtures.stages import advantage, filtering, packing, written
from tests.fixtures.warming import taught

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ROWS = 640
"""Conversations of each game that the model is taught."""
GROUPS, SIZE, LARGEST = 3, 6, 9
UNREAD = 'environments.0.taskset.unreadable="passive"'
"""So that replies of poker that cannot be read are flagged."""

NUM_TALKS = 2
"""Groups of conversations with tools."""
TOPICS = graph(load(["wikispeedia"]).environments[0].taskset["num_topics"])


@contextmanager
def serving(root, words, conversations):
    """Teach a model of these words some conversations; yield an engine that serves it, and its weights."""
    tiny_qwen3(root / "model", hidden=96, layers=2, heads=3, kv_heads=3, words=list(dict.fromkeys(words)))
    weights = taught(root / "model", {"enable_thinking": False}, conversations)
    with engine_of(weights, root / "engine.json") as engine:
        engine.serve("policy", weights)
        yield engine, weights


def sampled_preset(preset, served, directory, shape, *settings):
    """Sample some groups as a preset says; return the tables, the config, and the examples."""
    engine, weights = served
    given = load([preset], settings)
    model = given.model.model_copy(update={"path": str(weights), "vocab_size": 512})
    config = given.model_copy(update={"engine": ENGINE, "model": model})
    (environment,) = config.environments
    examples = listed(environment)
    view = View(config, rollout.STAGE.sections, rollout.STAGE.name)
    return sampled_tables(engine, environment, view, examples, directory, shape), config, examples


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """An engine that serves a model that knows what replies look like in both games."""
    games = poker.demonstrations(ROWS, seed=1, unreadable=0.05)
    problems = sums.demonstrations(ROWS, seed=1, largest=LARGEST)
    rows = [(each["messages"],) for pair in zip(games, problems, strict=True) for each in pair]
    with serving(tmp_path_factory.mktemp("games"), [*poker.words(), *sums.words(LARGEST)], rows) as found:
        yield found


@dataclass
class Played:
    """A game's rollouts of one step, and what the stages made of them."""

    config: RunConfig
    tables: dict[str, pa.Table]

    def rows(self, table):
        """The rows of a table."""
        return self.tables[table].to_pylist()


def playing(preset, served, directory, *settings):
    """Sample one step as a preset says, in few groups, and do the stages up to packing."""
    tables, config, _ = sampled_preset(preset, served, directory, (GROUPS, SIZE), *settings)
    for call in (filtering, advantage, packing):
        tables |= written(call(tables, View(config, call.stage.sections, call.stage.name)))
    return Played(config, tables)


@pytest.fixture(scope="module")
def poker_played(policy, tmp_path_factory):
    """Eighteen games of poker."""
    return playing("kuhn_poker", policy, tmp_path_factory.mktemp("poker"), UNREAD)


@pytest.fixture(scope="module")
def sums_played(policy, tmp_path_factory):
    """Eighteen proposals and their solvers."""
    return playing("proposer_solver", policy, tmp_path_factory.mktemp("sums"))


def by_episode(played):
    """The traces of each episode."""
    episodes = defaultdict(list)
    for row in played.rows("traces"):
        episodes[row["episode_id"]].append(row)
    return episodes


def check_whole(played):
    """Nothing failed, every trace is one branch, and what is kept and weighs anything is packed once."""
    traces = played.rows("traces")
    assert not [row["error_message"] for row in traces if row["error_class"]]
    assert {row["num_branches"] for row in traces} == {1} and all(row["trainable"] for row in traces)
    assert played.tables["samples"].schema.equals(SAMPLES.arrow)
    packed = Counter(name for row in played.rows("batches") for name in row["sample_ids"])
    assert packed == Counter(row["sample_id"] for row in played.rows("samples") if any(row["rl_weights"]))
    assert packed


def test_games_of_poker_are_two_traces_whose_chips_add_up_to_zero(poker_played):
    check_whole(poker_played)
    episodes = by_episode(poker_played)
    assert len(episodes) == GROUPS * SIZE
    for rows in episodes.values():
        assert sorted(row["agent"] for row in rows) == ["player_0", "player_1"]
        assert sum(row["reward"] for row in rows) == 0 and rows[0]["reward"] in (-2, -1, 1, 2)
        assert len({row["example_id"] for row in rows}) == len({row["group_id"] for row in rows}) == 1
    assert len({row["reward"] for row in poker_played.rows("traces")}) > 2, "no game differs"


def test_flagged_replies_of_poker_are_those_that_name_no_move_and_are_not_trained(poker_played):
    messages = {(row["trace_id"], row["message"]): row for row in poker_played.rows("messages")}
    read, moves = Counter[bool](), Counter[str]()
    for trace in poker_played.rows("traces"):
        info = json.loads(trace["info"])
        said = [row for (owner, _), row in messages.items() if owner == trace["trace_id"] and row["sampled"]]
        assert len(said) == len(info["moves"])
        for row, move in zip(sorted(said, key=lambda row: row["message"]), info["moves"], strict=True):
            history = ("bet",) if move in ("call", "fold") else ()
            is_read = move_of(row["content"] or "", history) == move
            assert is_read == (row["message"] not in info.get("parse_errors", []))
            read[is_read] += 1
            moves[move] += 1
    assert read[True] > GROUPS * SIZE and len(moves) == 4, "the model plays"
    for credit in poker_played.rows("samples"):
        path = [messages[credit["trace_id"], number] for number in credit["path"]]
        (info,) = (json.loads(t["info"]) for t in poker_played.rows("traces") if t["trace_id"] == credit["trace_id"])
        flagged = info.get("parse_errors", [])
        mask = [own and row["message"] not in flagged for row in path for own in row["mask"]]
        assert credit["rl_weights"] == [float(own) for own in mask]


def test_rae_has_a_baseline_for_each_seat_of_each_deal(poker_played):
    decay = poker_played.config.algorithm.decay
    kept = {row["trace_id"] for row in poker_played.rows("verdicts") if row["keep"]}
    advantages = {row["trace_id"]: row["advantage"] for row in poker_played.rows("samples")}
    baselines = {}
    for row in poker_played.rows("traces"):
        if row["trace_id"] in kept:
            seat = row["example_id"], row["agent"]
            baselines[seat] = decay * baselines.get(seat, 0.0) + (1 - decay) * row["reward"]
            assert advantages[row["trace_id"]] == pytest.approx(row["reward"] - baselines[seat], abs=1e-6)
    states = {(row["example_id"], row["agent"]): row["values"] for row in poker_played.rows("estimator_states")}
    assert states == {seat: [pytest.approx(value)] for seat, value in baselines.items()}
    assert len(states) == 2 * GROUPS
    assert {row["environment"] for row in poker_played.rows("estimator_states")} == {"kuhn_poker"}


def test_a_proposal_is_tried_by_solvers_who_answer_apart(sums_played):
    check_whole(sums_played)
    replies = defaultdict(list)
    for row in sums_played.rows("messages"):
        if row["sampled"]:
            replies[row["trace_id"]].append(row["content"])
    several = 0
    for rows in by_episode(sums_played).values():
        agents = Counter(row["agent"] for row in rows)
        (proposer,) = (row for row in rows if row["agent"] == "proposer")
        valid = json.loads(proposer["metrics"])["valid"]
        assert agents == ({"proposer": 1, "solver": 4} if valid else {"proposer": 1})
        right = [row["reward"] for row in rows if row["agent"] == "solver"]
        assert proposer["reward"] == pytest.approx(1 - abs(2 * sum(right) / 4 - 1) if valid else 0)
        answers = {replies[row["trace_id"]][0] for row in rows if row["agent"] == "solver"}
        several += len(answers) > 1
    assert several >= GROUPS, "with one seed for all the solvers of a problem would say the same"
    assert {row["reward"] for row in sums_played.rows("traces") if row["agent"] == "solver"} == {0, 1}


def test_advantages_add_up_to_zero_over_solvers_of_a_problem_and_proposals_of_a_group(sums_played):
    traces = {row["trace_id"]: row for row in sums_played.rows("traces")}
    compared = defaultdict(list)
    for credit in sums_played.rows("samples"):
        row = traces[credit["trace_id"]]
        name = ("solver", row["episode_id"]) if row["agent"] == "solver" else ("proposer", row["group_id"])
        compared[name].append((credit["reward"], credit["advantage"]))
    for members in compared.values():
        mean = sum(reward for reward, _ in members) / len(members)
        assert [worth for _, worth in members] == pytest.approx([reward - mean for reward, _ in members], abs=1e-6)
    assert {name for name, *_ in compared} == {"solver", "proposer"}
    assert any(worth for members in compared.values() for _, worth in members)


@pytest.fixture(scope="module")
def tool_policy(tmp_path_factory):
    """An engine that serves a model that knows what replies look like in all three."""
    words = [*calc_words(), *walk_words(TOPICS), *names.words(26)]
    lists = names.demonstrations(ROWS // 2, seed=1, min_words=1, max_words=2, num_names=26)
    calculations = sums_of_tools.demonstrations(ROWS // 2, seed=1)
    walked = walks.demonstrations(ROWS // 2, TOPICS, seed=1)
    rows = chain.from_iterable(zip(calculations, walked, lists, strict=True))
    conversations = [(row["messages"], *([json.loads(row["tools"])] if "tools" in row else [])) for row in rows]
    with serving(tmp_path_factory.mktemp("tools"), words, conversations) as found:
        yield found


def talks(preset, tool_policy, directory):
    """Sample some groups; return of each rollout its trace, its messages in order, and the content of its task.

    What no rollout may be is refused here.
    """
    made, _, examples = sampled_preset(preset, tool_policy, directory, (NUM_TALKS, SIZE))
    contents = dict(zip(examples["example_id"].to_pylist(), map(json.loads, examples["task"].to_pylist()), strict=True))
    traces, messages = made["traces"].to_pylist(), made["messages"].to_pylist()
    assert len(traces) == NUM_TALKS * SIZE
    assert not [row["error_message"] for row in traces if row["error_class"]]
    assert {row["num_branches"] for row in traces} == {1}
    for row in messages:
        assert any(row["mask"]) == row["sampled"] == (row["role"] == "assistant")
    by_trace = defaultdict(list)
    for row in sorted(messages, key=lambda row: row["message"]):
        by_trace[row["trace_id"]].append(row)
    return [(trace, by_trace[trace["trace_id"]], contents[trace["example_id"]]) for trace in traces]


def calls(messages, tool, argument):
    """What a tool was asked; the engine writes calls as text, and the record holds them apart."""
    made = [call for row in messages for call in json.loads(row["body"]).get("tool_calls") or []]
    return [str(json.loads(call["arguments"]).get(argument, "")) for call in made if call["name"] == tool]


def results(messages):
    """What the tools answered."""
    return [row["content"] for row in messages if row["role"] == "tool"]


def test_a_calculation_is_calls_results_and_an_answer(tool_policy, tmp_path):
    found = talks("calc_tools", tool_policy, tmp_path)
    num_results = 0
    for trace, messages, task in found:
        chain = Chain(task["first"], tuple(task["operations"]))
        asked, told = calls(messages, "calc", "expression"), results(messages)
        assert told == [calculated(each) for each in asked][: len(told)]
        right = is_right(messages[-1]["content"] or "", chain.results[-1])
        assert trace["reward"] == pytest.approx(0.5 * right + 0.5 * progress(asked, chain.calls) / 2)
        assert json.loads(trace["metrics"])["num_calls"] == len(asked)
        num_results += len(told)
    assert num_results > 0, "the model has not called the tool once"


def test_a_walk_leads_from_page_to_page(tool_policy, tmp_path):
    found = talks("wikispeedia", tool_policy, tmp_path)
    num_moves = 0
    for trace, messages, task in found:
        trail = json.loads(trace["info"])["trail"]
        assert trail[0] == task["start"]
        for number, (before, after) in enumerate(pairwise(trail)):
            assert after in TOPICS[before] or after in trail[:number], "neither a link nor gone back"
        shown = [text for text in results(messages) if not text.startswith("no")]
        assert shown == [page(TOPICS, topic) for topic in trail[1 : len(shown) + 1]]
        score = efficiency(trail, task["target"], task["distance"])
        assert trace["reward"] == pytest.approx(0.5 * (score > 0) + 0.5 * score)
        num_moves += len(trail) - 1
    assert num_moves > 0, "the model has not followed one link"


def test_a_list_is_sorted_in_turns(tool_policy, tmp_path):
    from sample_alphabet_sort.lists import asked, score

    found = talks("alphabet_sort", tool_policy, tmp_path)
    for trace, messages, task in found:
        said = [row["content"] or "" for row in messages if row["role"] == "assistant"]
        turns = task["turns"]
        expected = [asked(given, "sorted", first=not number) for number, given in enumerate(turns)]
        assert [row["content"] for row in messages if row["role"] == "user"] == expected
        assert trace["num_turns"] == len(said) == len(turns)
        answers = [sorted(name for given in turns[: number + 1] for name in given) for number in range(len(turns))]
        assert trace["reward"] == pytest.approx(score([text.strip() for text in said], answers, "sorted", 1.0))
    assert any(trace["reward"] > 0 for trace, _, _ in found), "the model has not used the tags once"

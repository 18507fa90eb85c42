"""Both games with a real engine and real environment servers, and their rollouts through the stages before training."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kuhn_poker.demonstrations as poker
import proposer_solver.demonstrations as sums
import pyarrow as pa
import pytest
from kuhn_poker.talk import move_of

from configs.load import load
from configs.run import RunConfig, View
from storage.schemas.stage_tables import SAMPLES
from tasks.advantage import stage as advantage
from tasks.filtering import stage as filtering
from tasks.inference.engine.client import Engine
from tasks.learner.tiny import tiny_qwen3
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tests.environments.scripted import listed
from tests.fixtures.hosts import ENGINE, engine_of
from tests.fixtures.sampled import sampled_tables
from tests.fixtures.warming import taught

pytestmark = pytest.mark.engine

Row = dict[str, Any]
ROWS = 640
"""Conversations of each game that the model is taught."""
GROUPS, SIZE, LARGEST = 3, 6, 9
UNREAD = 'environments.0.taskset.unreadable="passive"'
"""So that replies of poker that cannot be read are flagged."""


def warmed(directory: Path) -> Path:
    """A model that knows what replies look like in both games."""
    words = list(dict.fromkeys([*poker.words(), *sums.words(LARGEST)]))
    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=words)
    games, problems = (
        poker.demonstrations(ROWS, seed=1, unreadable=0.05),
        sums.demonstrations(ROWS, seed=1, largest=LARGEST),
    )
    rows = [(each["messages"],) for pair in zip(games, problems, strict=True) for each in pair]
    return taught(directory, {"enable_thinking": False}, rows)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """An engine that serves the model."""
    root = tmp_path_factory.mktemp("games")
    weights = warmed(root / "model")
    with engine_of(weights, root / "engine.json") as engine:
        engine.serve("policy-of-games", weights)
        yield engine, weights


@dataclass
class Played:
    """A game's rollouts of one step, and what the stages made of them."""

    config: RunConfig
    tables: dict[str, pa.Table]

    def rows(self, table: str) -> list[Row]:
        """The rows of a table."""
        found: list[Row] = self.tables[table].to_pylist()
        return found


def playing(preset: str, engine: Engine, weights: Path, directory: Path, *settings: str) -> Played:
    """Sample one step as a preset says, in few groups, and do the stages up to packing."""
    given = load([preset], settings)
    model = given.model.model_copy(update={"path": str(weights), "vocab_size": 512})
    config = given.model_copy(update={"engine": ENGINE, "model": model})
    (environment,) = config.environments
    examples = listed(environment)
    asked = View(config, rollout.STAGE.sections, rollout.STAGE.name)
    tables = sampled_tables(engine, environment, asked, examples, directory, (GROUPS, SIZE), "policy-of-games")
    for stage, more in ((filtering, {"quarantined": {}}), (advantage, {"step": 0}), (packing, {})):
        view = View(config, stage.STAGE.sections, stage.STAGE.name)
        tables |= stage.STAGE.function(tables, view, **more)
    return Played(config, tables)


@pytest.fixture(scope="module")
def poker_played(policy: tuple[Engine, Path], tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Eighteen games of poker."""
    return playing("kuhn_poker", *policy, tmp_path_factory.mktemp("poker"), UNREAD)


@pytest.fixture(scope="module")
def sums_played(policy: tuple[Engine, Path], tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Eighteen proposals and their solvers."""
    return playing("proposer_solver", *policy, tmp_path_factory.mktemp("sums"))


def by_episode(played: Played) -> dict[str, list[Row]]:
    """The traces of each episode."""
    episodes: dict[str, list[Row]] = defaultdict(list)
    for row in played.rows("traces"):
        episodes[row["episode_id"]].append(row)
    return episodes


def check_whole(played: Played) -> None:
    """Nothing failed, every trace is one branch, and what is kept and weighs anything is packed once."""
    traces = played.rows("traces")
    assert not [row["error_message"] for row in traces if row["error_class"]]
    assert {row["num_branches"] for row in traces} == {1} and all(row["trainable"] for row in traces)
    assert played.tables["samples"].schema.equals(SAMPLES.arrow)
    packed = Counter(name for row in played.rows("batches") for name in row["sample_ids"])
    assert packed == Counter(row["sample_id"] for row in played.rows("samples") if any(row["rl_weights"]))
    assert packed


def test_games_of_poker_are_two_traces_whose_chips_add_up_to_zero(poker_played: Played) -> None:
    check_whole(poker_played)
    episodes = by_episode(poker_played)
    assert len(episodes) == GROUPS * SIZE
    for rows in episodes.values():
        assert sorted(row["agent"] for row in rows) == ["player_0", "player_1"]
        assert sum(row["reward"] for row in rows) == 0 and rows[0]["reward"] in (-2, -1, 1, 2)
        assert len({row["example_id"] for row in rows}) == len({row["group_id"] for row in rows}) == 1
    assert len({row["reward"] for row in poker_played.rows("traces")}) > 2, "no game differs"


def test_flagged_replies_of_poker_are_those_that_name_no_move_and_are_not_trained(poker_played: Played) -> None:
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


def test_rae_has_a_baseline_for_each_seat_of_each_deal(poker_played: Played) -> None:
    decay = poker_played.config.algorithm.decay  # type: ignore[union-attr]
    kept = {row["trace_id"] for row in poker_played.rows("verdicts") if row["keep"]}
    advantages = {row["trace_id"]: row["advantage"] for row in poker_played.rows("samples")}
    baselines: dict[tuple[str, str], float] = {}
    for row in poker_played.rows("traces"):
        if row["trace_id"] in kept:
            seat = row["example_id"], row["agent"]
            baselines[seat] = decay * baselines.get(seat, 0.0) + (1 - decay) * row["reward"]
            assert advantages[row["trace_id"]] == pytest.approx(row["reward"] - baselines[seat], abs=1e-6)
    states = {(row["example_id"], row["agent"]): row["values"] for row in poker_played.rows("estimator_states")}
    assert states == {seat: [pytest.approx(value)] for seat, value in baselines.items()}
    assert len(states) == 2 * GROUPS and {row["environment"] for row in poker_played.rows("estimator_states")} == {
        "kuhn_poker"
    }


def test_a_proposal_is_tried_by_solvers_who_answer_apart(sums_played: Played) -> None:
    check_whole(sums_played)
    replies: dict[str, list[str]] = defaultdict(list)
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


def test_advantages_add_up_to_zero_over_solvers_of_a_problem_and_proposals_of_a_group(sums_played: Played) -> None:
    traces = {row["trace_id"]: row for row in sums_played.rows("traces")}
    compared: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for credit in sums_played.rows("samples"):
        row = traces[credit["trace_id"]]
        name = ("solver", row["episode_id"]) if row["agent"] == "solver" else ("proposer", row["group_id"])
        compared[name].append((credit["reward"], credit["advantage"]))
    for members in compared.values():
        mean = sum(reward for reward, _ in members) / len(members)
        assert [worth for _, worth in members] == pytest.approx([reward - mean for reward, _ in members], abs=1e-6)
    assert {name for name, *_ in compared} == {"solver", "proposer"}
    assert any(worth for members in compared.values() for _, worth in members)

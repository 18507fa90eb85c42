"""Tokens of random message graphs against a reference that walks them one token at a time."""

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from flows.queries.messages import branches, messages
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import tokens
from flows.queries.trace import find_trace
from tests.fixtures import builders
from tests.flows.viewer.hand_made import RUN, HandMade, batch, credit, update

NUM_TRACES = 6
SCALE = 0.75
"""By what packing multiplied the rl weights."""
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
Row = dict[str, Any]


def graph(name: str, chance: random.Random) -> list[Row]:
    """Random messages: every one follows any earlier one, some have no tokens, some are sampled in part."""
    rows: list[Row] = []
    for number in range(1 if chance.random() < 0.2 else chance.randint(6, 20)):
        length = chance.choice((0, 1, 2, 4))
        mask = [chance.random() < 0.6 for _ in range(length)]
        logprobs = [-chance.random() if flag else 0.0 for flag in mask]
        body = [chance.random() < 0.5 for _ in range(length)] if chance.random() < 0.5 else []
        rows.append(
            builders.message(
                name, number, parent=chance.randrange(number) if number else None, sampled=any(mask), mask=mask,
                tokens=[chance.randrange(100) for _ in range(length)], logprobs=logprobs, is_content=body,
            )
        )  # fmt: skip
    return rows


def paths(rows: list[Row]) -> list[list[int]]:
    """The ways to the leaves, by following parents up."""
    inner = {row["parent"] for row in rows}
    found = []
    for leaf in (row["message"] for row in rows if row["message"] not in inner):
        way = [leaf]
        while (parent := rows[way[-1]]["parent"]) is not None:
            way.append(parent)
        found.append(way[::-1])
    return found


def samples(rows: list[Row], chance: random.Random) -> list[Row]:
    """Credits of every way: random weights on sampled tokens, each on the first way through it alone."""
    name, seen, found = rows[0]["trace_id"], set[int](), []
    for branch, way in enumerate(paths(rows)):
        streams: dict[str, list[float]] = {stream: [] for stream in ("advantages", *WEIGHTS)}
        for number in way:
            for flag in rows[number]["mask"]:
                chosen = chance.choice((None, *WEIGHTS)) if flag and number not in seen else None
                for stream in WEIGHTS:
                    streams[stream].append(0.5 if stream == chosen else 0.0)
                streams["advantages"].append(chance.choice((-1.5, 0.25)) if chosen in WEIGHTS[::2] else 0.0)
        seen |= set(way)
        found.append(credit(name, branch, way, streams))
    return found


def measured(sample: Row, chance: random.Random) -> Row:
    """What the learner measured: zeros where nothing has weight in the packed row."""
    length = len(sample["rl_weights"])
    weighted = [at > 0 and any(sample[name][at] for name in WEIGHTS) for at in range(length)]
    values = [[chance.random() + 0.125 if flag else 0.0 for flag in weighted] for _ in range(2)]
    return {"sample_id": sample["sample_id"], "logprobs": [-each for each in values[0]], "entropies": values[1]}


def expected(rows: list[Row], credits: list[Row], statistics: Mapping[str, Row], packed: set[str]) -> list[Row]:
    """The tokens of a trace, one at a time."""
    found = []
    for row in rows:
        credit_of = next(each for each in credits if row["message"] in each["path"])
        is_packed = credit_of["sample_id"] in packed
        before = credit_of["path"][: credit_of["path"].index(row["message"])]
        start = sum(len(rows[number]["token_ids"]) for number in before)
        for place, token in enumerate(row["token_ids"]):
            at = start + place
            weights = {name: credit_of[name][at] if at else 0.0 for name in WEIGHTS}
            known = statistics.get(credit_of["sample_id"]) if any(weights.values()) else None
            engine = row["logprobs"][place] if row["mask"][place] else None
            learner = known and known["logprobs"][at]
            both = None if engine is None or learner is None else learner - engine
            found.append(
                {
                    "message": row["message"],
                    "place": place,
                    "token_id": token,
                    "sampled": row["mask"][place],
                    "is_content": row["is_content"][place] if row["is_content"] else None,
                    "policy_version": 0 if row["mask"][place] else None,
                    "policy_age": 0 if row["mask"][place] else None,
                    "branch": credit_of["branch"],
                    "position": at,
                    "trained": any(weights.values()) and is_packed,
                    "advantage": credit_of["advantages"][at] if weights["rl_weights"] else None,
                    "signal": credit_of["advantages"][at] if weights["ref_kl_weights"] else None,
                    "trained_rl_weight": (weights["rl_weights"] * SCALE or None) if is_packed else None,
                    "trained_ce_weight": (weights["ce_weights"] or None) if is_packed else None,
                    "rl_weight": weights["rl_weights"],
                    "ce_weight": weights["ce_weights"],
                    "ref_kl_weight": weights["ref_kl_weights"],
                    "engine_logprob": engine,
                    "learner_logprob": learner,
                    "entropy": known and known["entropies"][at],
                    "log_ratio": both,
                    "ratio": None if both is None else math.exp(both),
                    "mismatch": None if both is None else math.exp(both) - 1 - both,
                }
            )
    return found


def test_tokens_are_those_that_a_walk_finds(tmp_path):
    chance = random.Random(11)
    names = [f"{number:032x}" for number in range(NUM_TRACES)]
    graphs = {name: graph(name, chance) for name in names}
    credits = {name: samples(graphs[name], chance) for name in names}
    every = [each for name in names for each in credits[name]]
    packed = {each["sample_id"] for each in every if chance.random() < 0.8}
    statistics = {each["sample_id"]: measured(each, chance) for each in every if each["sample_id"] in packed}
    made = HandMade(tmp_path / "store")
    made.step(
        [builders.trace(name) for name in names],
        [row for name in names for row in graphs[name]],
        every,
        batches=[batch([each for each in every if each["sample_id"] in packed], scale=SCALE)],
        updates=[update()],
        token_statistics=list(statistics.values()),
    )
    library = StoreReader.at(made.store.root.address)
    compared = 0
    for name in names:
        found = find_trace(library, RUN, name)
        assert branches(messages(library, found)) == paths(graphs[name])
        wanted = expected(graphs[name], credits[name], statistics, packed)
        got = tokens(library, found).to_dicts()
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            for column, value in other.items():
                close = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
                assert one[column] == close, (name, other["message"], other["place"], column)
        compared += sum(each["mismatch"] is not None for each in wanted)
    assert compared > 25 and any(len(paths(rows)) > 2 for rows in graphs.values()), "the graphs are not trivial"

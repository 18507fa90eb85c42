"""Tokens of random message graphs against a reference that walks them one token at a time."""

import math
import random
from itertools import chain

import polars as pl
from polars.testing import assert_frame_equal

from flows.queries.messages import branches, messages
from flows.queries.tokens import tokens
from flows.queries.trace import find_trace
from tests.fixtures import builders
from tests.flows.viewer.hand_made import RUN, batch, credit, update

NUM_TRACES = 6
SCALE = 0.75
"""By what packing multiplied the rl weights."""
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")


def graph(name, chance):
    """Random messages: every one follows any earlier one, some have no tokens, some are sampled in part."""
    rows = []
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


def paths(rows):
    """The ways to the leaves, by following parents up."""
    inner = {row["parent"] for row in rows}
    found = []
    for leaf in (row["message"] for row in rows if row["message"] not in inner):
        way = [leaf]
        while (parent := rows[way[-1]]["parent"]) is not None:
            way.append(parent)
        found.append(way[::-1])
    return found


def samples(rows, chance):
    """Credits of every way: random weights on sampled tokens, each on the first way through it alone."""
    name, seen, found = rows[0]["trace_id"], set(), []
    for branch, way in enumerate(paths(rows)):
        streams = {stream: [] for stream in ("advantages", *WEIGHTS)}
        for number in way:
            for flag in rows[number]["mask"]:
                chosen = chance.choice((None, *WEIGHTS)) if flag and number not in seen else None
                for stream in WEIGHTS:
                    streams[stream].append(0.5 if stream == chosen else 0.0)
                streams["advantages"].append(chance.choice((-1.5, 0.25)) if chosen in WEIGHTS[::2] else 0.0)
        seen |= set(way)
        found.append(credit(name, branch, way, streams))
    return found


def measured(sample, chance):
    """What the learner measured: zeros where nothing has weight in the packed row."""
    weighted = [at > 0 and any(weights) for at, weights in enumerate(zip(*map(sample.get, WEIGHTS), strict=True))]
    values = [[chance.random() + 0.125 if flag else 0.0 for flag in weighted] for _ in range(2)]
    return {"sample_id": sample["sample_id"], "logprobs": [-each for each in values[0]], "entropies": values[1]}


def expected(rows, credits, statistics, packed):
    """The tokens of a trace, one at a time."""
    for row in rows:
        credit_of = next(each for each in credits if row["message"] in each["path"])
        is_packed = credit_of["sample_id"] in packed
        before = credit_of["path"][: credit_of["path"].index(row["message"])]
        start = sum(len(rows[number]["token_ids"]) for number in before)
        for place, token in enumerate(row["token_ids"]):
            at, sampled, advantage = start + place, row["mask"][place], credit_of["advantages"][start + place]
            rl, ce, ref_kl = weights = [credit_of[name][at] if at else 0.0 for name in WEIGHTS]
            known = statistics.get(credit_of["sample_id"]) if any(weights) else None
            engine = row["logprobs"][place] if sampled else None
            learner = known and known["logprobs"][at]
            both = None if engine is None or learner is None else learner - engine
            yield {
                **{"message": row["message"], "place": place, "token_id": token, "sampled": sampled},
                "is_content": row["is_content"][place] if row["is_content"] else None,
                **dict.fromkeys(("policy_version", "policy_age"), 0 if sampled else None),
                **{"branch": credit_of["branch"], "position": at, "trained": any(weights) and is_packed},
                "advantage": advantage if rl else None,
                "signal": advantage if ref_kl else None,
                "trained_rl_weight": rl * SCALE if rl and is_packed else None,
                "trained_ce_weight": ce if ce and is_packed else None,
                **{"rl_weight": rl, "ce_weight": ce, "ref_kl_weight": ref_kl},
                **{"engine_logprob": engine, "learner_logprob": learner, "entropy": known and known["entropies"][at]},
                "log_ratio": both,
                "ratio": None if both is None else math.exp(both),
                "mismatch": None if both is None else math.exp(both) - 1 - both,
            }


def test_tokens_are_those_that_a_walk_finds(hand):
    chance = random.Random(11)
    names = [f"{number:032x}" for number in range(NUM_TRACES)]
    graphs = {name: graph(name, chance) for name in names}
    credits = {name: samples(graphs[name], chance) for name in names}
    every = [*chain(*credits.values())]
    packed = {each["sample_id"]: each for each in every if chance.random() < 0.8}
    statistics = {name: measured(sample, chance) for name, sample in packed.items()}
    hand.step(
        [builders.trace(name) for name in names], [*chain(*graphs.values())], every,
        batches=[batch([*packed.values()], scale=SCALE)], updates=[update()], token_statistics=[*statistics.values()],
    )  # fmt: skip
    compared = 0
    for name in names:
        found = find_trace(hand.reader, RUN, name)
        assert branches(messages(hand.reader, found)) == paths(graphs[name])
        got, wanted = tokens(hand.reader, found), [*expected(graphs[name], credits[name], statistics, packed)]
        columns = {column: got.schema[column] for column in next(iter(wanted), ())}
        rows = pl.DataFrame(wanted, schema=columns)
        assert len(got) == len(wanted)
        assert_frame_equal(got.select([*columns]), rows, rel_tol=1e-5, abs_tol=1e-6)
        compared += len(rows.drop_nulls("mismatch")) if wanted else 0
    assert compared > 25 and any(len(paths(rows)) > 2 for rows in graphs.values()), "the graphs are not trivial"

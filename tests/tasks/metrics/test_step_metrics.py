"""Metrics of rollouts and accounts with exact values, and the rows that the stage makes of all metrics."""

import json
import math

import pyarrow as pa
import pytest

from configs.run import RunConfig
from storage.schemas.stage_tables import METRICS
from tasks.inference.trace_rows.failures import STRAGGLER
from tasks.metrics.accounting import AccountBreach, account_metrics
from tasks.metrics.figures import full_name, metric_values
from tasks.metrics.rollouts import retokenised_turns, rollout_metrics
from tasks.metrics.stage import STAGE
from tests.fixtures.builders import message, table, trace, verdict, view
from tests.fixtures.stages import metrics


def blank(trace_id, environment="one", **columns):
    """A rollout that has nothing but the given columns."""
    counts = ("num_input_tokens", "num_output_tokens", "num_turns", "generation_seconds", "model_seconds")
    empty = {"reward": None, "trainable": False} | dict.fromkeys(counts, 0)
    return trace(trace_id, environment=environment, **(empty | columns))


UNJUDGED = table("verdicts", [])


def named(*given):
    """The metrics of rollouts by their full names."""
    return {full_name(*name): value for name, value in rollout_metrics(*given).items()}


def only(found, begin):
    """The metrics whose names begin so."""
    return {name: value for name, value in found.items() if name.startswith(begin)}


TABLES = (
    table(
        "traces",
        [
            blank(
                "a",
                trainable=True,
                reward=1.0,
                num_output_tokens=10,
                generation_seconds=2.0,
                metrics='{"length": 3, "note": "text"}',
            ),
            blank("b", trainable=True, reward=0.0, num_output_tokens=20),
            blank("c", "two", trainable=True, is_truncated=True, error_class="timeout"),
            blank("d", "two", reward=0.5, metrics='{"length": 5}'),
        ],
    ),
    table(
        "verdicts",
        [
            verdict("a"),
            verdict("b", reason="gibberish", detected=["gibberish"]),
            verdict("c", reason="errored", detected=["errored", "truncated"]),
            verdict("d"),
        ],
    ),
)


def unjudged(*rows):
    """The metrics of these rollouts before any verdict."""
    return named(table("traces", rows), UNJUDGED)


def test_the_staleness_of_tokens_is_that_of_the_policy_of_each():
    rows = [
        blank("a", num_output_tokens=10, policy_version=3, staleness=2),
        blank("b", num_output_tokens=5, policy_version=5),
        blank("c", "two", policy_version=1, staleness=4),
    ]
    names = ("trace_id", "message", "start", "num_tokens", "policy_version", "policy_key")
    runs = [("a", 1, 4, 3, 3, "x"), ("a", 1, 7, 1, 4, "y"), ("a", 3, 0, 6, 5, "z")]
    policies = table("token_policies", [dict(zip(names, run, strict=True)) for run in runs])
    assert only(named(table("traces", rows), UNJUDGED, (), None, policies), "token_staleness") == {
        "token_staleness/all/mean": pytest.approx(7 / 15),
        "token_staleness/all/max": 2.0,
        "token_staleness/one/mean": pytest.approx(7 / 15),
        "token_staleness/one/max": 2.0,
    }
    assert only(unjudged(*rows), "token_staleness") == {}


def test_metrics_of_a_step_for_all_and_by_environment():
    found = named(*TABLES, ["repetition"])
    expected = {
        "rollouts/all": 4,
        "reward/all/mean": 0.5,
        "reward/all/std": math.sqrt(1 / 6),
        "reward/all/min": 0,
        "reward/all/max": 1,
        "reward/one/mean": 0.5,
        "reward/two/mean": 0.5,
        "errored_rollout/all": 0.25,
        "errored_rollout/all/timeout": 0.25,
        "errored_rollout/one": 0,
        "errored_rollout/two": 0.5,
        "is_truncated/all": 0.25,
        "num_output_tokens/all": 7.5,
        "num_output_tokens/one": 15,
        "timing/one/generation": 1,
        "metrics/all/length": 4,
        "metrics/two/length": 5,
        "filters/all/gibberish": 0.25,
        "filters/all/errored": 0.25,
        "filters/all/repetition": 0,
        "filters/all/is_filtered": 0.5,
        "filters/one/gibberish": 0.5,
        "filters/two/is_filtered": 0.5,
        "trainable/all/count": 1,
        "trainable/all/ratio": 0.25,
        "trainable/one/ratio": 0.5,
        "trainable/two/ratio": 0,
        "rollout/one/output_tokens": 30,
        "longest_output/all": 20,
        "kept": 0.5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "metrics/all/note" not in found and not [name for name in found if "retokenised" in name]
    assert all(type(value) is float for value in found.values())


def test_agents_of_one_environment_have_rewards_of_their_own():
    rows = [
        blank(f"{agent}{number}", "duel", agent=agent, reward=reward, trainable=True)
        for agent, rewards in (("first", (1.0, -0.5)), ("second", (-1.0, 0.5)))
        for number, reward in enumerate(rewards)
    ]
    found = unjudged(*rows, blank("lost", "duel", error_class="timeout"), blank("alone", reward=1.0))
    assert {name: value for name, value in only(found, "reward/").items() if name.endswith("/mean")} == {
        "reward/all/mean": 0.2,
        "reward/duel/mean": 0.0,
        "reward/duel/first/mean": 0.25,
        "reward/duel/second/mean": -0.25,
        "reward/one/mean": 1.0,
    }


def test_two_named_rewards_agree_as_far_as_their_ranks_do():
    def rated(name, **scores):
        rewards = {key: {"score": score, "weight": 1.0} for key, score in scores.items()}
        return blank(name, reward=1.0, rewards=json.dumps(rewards))

    rows = [
        rated("a", judge=0.1, rule=0.0, flat=1.0),
        rated("b", judge=0.9, rule=2.0, flat=1.0),
        rated("c", judge=0.5, rule=1.0, flat=1.0),
        rated("d", judge=0.7),
        rated("e", judge=float("nan"), rule=9.0, flat=1.0),
    ]
    found = only(unjudged(*rows), "agreement/")
    assert found == {f"agreement/{scope}/judge/rule": pytest.approx(1.0) for scope in ("all", "one")}
    reversed_rows = [rated("f", judge=0.0, rule=3.0), rated("g", judge=1.0, rule=2.0)]
    assert only(unjudged(*reversed_rows), "agreement/")["agreement/all/judge/rule"] == pytest.approx(-1.0)


def test_named_rewards_have_the_means_of_their_scores():
    both = {"exact": {"score": 1.0, "weight": 0.5}, "form": {"score": 0.5, "weight": 1.0}}
    partly = {"exact": {"score": 0.0, "weight": 0.5}, "form": None}
    rows = [blank(name, reward=1.0, rewards=json.dumps(rewards)) for name, rewards in (("a", both), ("b", partly))]
    assert only(unjudged(*rows, blank("c", "two", reward=0.0)), "rewards/") == {
        f"rewards/{scope}/{name}/mean": 0.5 for scope in ("all", "one") for name in ("exact", "form")
    }


def test_scopes_are_symmetric():
    filters = {tuple(name.split("/")[1:]) for name in only(named(*TABLES, ["repetition"]), "filters/")}
    assert filters == {(scope, name) for scope in ("all", "one", "two") for _, name in filters} != set()


def test_a_reward_may_be_infinite_and_a_step_without_a_scored_or_any_rollout_has_none():
    found = unjudged(blank("a", error_class="model"))
    assert found["errored_rollout/one"] == 1
    assert not only(found, ("reward/", "filters/", "trainable/"))
    assert unjudged(blank("a", reward=math.inf))["reward/all/mean"] == math.inf
    assert unjudged() == {"rollouts/all": 0, "rollout/all/input_tokens": 0, "rollout/all/output_tokens": 0}


def test_turns_that_were_tokenised_again_are_counted_where_somebody_counted():
    counts = {"a": 2, "d": 1, "elsewhere": 9}
    found = named(*TABLES, (), counts)
    assert [found[f"rollout/{scope}/retokenised_turns"] for scope in ("all", "one", "two")] == [3, 2, 1]


def test_stopped_rollouts_are_in_their_share_and_the_sums_of_tokens_alone():
    late = blank("late", error_class=STRAGGLER, num_output_tokens=5)
    found = unjudged(blank("a", reward=1.0, num_output_tokens=10), late)
    assert (found["stragglers/all"], found["rollouts/all"], found["errored_rollout/all"]) == (0.5, 1, 0)
    assert (found["num_output_tokens/one"], found["rollout/one/output_tokens"]) == (10, 15)
    assert unjudged(late)["rollouts/one"] == 0


ENDS = {
    "trained": {},
    "light": {},
    "cut": {},
    "broken": {"reward": None, "error_class": "timeout"},
    "late": {"reward": None, "error_class": STRAGGLER},
}
"""Rollouts that end in every way there is."""
HELD_BACK = {"filtered/truncated": 1, "errored/timeout": 1, "stopped": 1}


def until(stage):
    """The tables of a step that is done as far as to a stage."""
    judged = [verdict(name, reason="truncated" if name == "cut" else None) for name in ENDS]
    samples = pa.table({"sample_id": ["trained/0", "light/0"], "trace_id": ["trained", "light"]})
    made = {
        "rollout": ("traces", table("traces", [trace(name, **how) for name, how in ENDS.items()])),
        "filtering": ("verdicts", table("verdicts", judged)),
        "advantage": ("samples", samples),
        "packing": ("batches", pa.table({"sample_ids": [["trained/0"]]})),
        "gate": ("decisions", pa.table({"approved": [False]})),
        "training": ("updates", pa.table({"loss": [0.5]})),
    }
    names = list(made)
    wanted = [name for name in names[: names.index(stage) + 1] if name != "gate" or stage == "gate"]
    return dict(made[name] for name in wanted)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("rollout", {"pending": 3, "errored/timeout": 1, "stopped": 1}),
        ("filtering", {"pending": 2, **HELD_BACK}),
        ("advantage", {"pending": 2, **HELD_BACK}),
        ("packing", {"pending": 1, "no weight": 1, **HELD_BACK}),
        ("gate", {"refused": 1, "no weight": 1, **HELD_BACK}),
        ("training", {"trained": 1, "no weight": 1, **HELD_BACK}),
    ],
)
def test_accounts_are_as_far_as_the_step_is(stage, expected):
    assert account_metrics(until(stage)) == {f"accounting/{name}": count for name, count in expected.items()}


def test_a_step_with_all_its_tables_is_held_to_account():
    tables = until("training")
    assigned = pa.table({"assignment_id": tables["traces"]["assignment_id"].unique()})
    assert account_metrics(tables | {"assignments": assigned}) == account_metrics(tables)
    lost = pa.table({"assignment_id": ["never answered"]})
    with pytest.raises(AccountBreach):
        account_metrics(tables | {"assignments": lost})


def test_rows_are_of_the_contract_and_say_only_what_was_measured():
    config = view(STAGE)
    rows = metrics({"traces": TABLES[0], "verdicts": TABLES[1]}, config, parameters=1)["metrics"]
    assert rows.schema == METRICS.arrow and rows.equals(rows.sort_by([("scope", "ascending"), ("name", "ascending")]))
    found = metric_values(rows)
    assert rollout_metrics(*TABLES, RunConfig().filter_names).items() <= found.items()
    assert found["", "batch/reward_mean"] == found["all", "reward/mean"] and ("", "batch/fill") not in found
    assert not [name for _, name in found if name.startswith(("timing/stage", "update", "groups"))]
    empty = metrics({"traces": TABLES[0].slice(0, 0)}, config, parameters=0)["metrics"]
    assert metric_values(empty)["all", "rollouts"] == 0


def said(number, parent, role="assistant", content="yes", sampled=False, **others):
    body = {"role": role, "content": content} | others
    return message("t0", number, parent=parent, sampled=sampled, role=role, body=json.dumps(body), content=content)


ASKED = [said(0, None, "user", "well?"), said(1, 0, sampled=True)]
BRIDGED = [*ASKED, said(2, 1, "user", "again"), said(3, 2, sampled=True)]
AGAIN = [*ASKED, said(2, 0), said(3, 2, "user", "again"), said(4, 3, sampled=True)]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (ASKED, 0),
        (BRIDGED, 0),
        (AGAIN, 1),
        # The prompt, too, came out as other tokens: the same conversation all the same.
        (
            [*ASKED, said(2, None, "user", "well?"), said(3, 2), said(4, 3, "user", "again"), said(5, 4, sampled=True)],
            1,
        ),
        # A reply that nobody sampled: an example in the prompt, or a history that was written anew.
        ([*ASKED, said(2, 0, content="no"), said(3, 2, "user", "again"), said(4, 3, sampled=True)], 0),
        ([said(0, None, "user", "a"), said(1, 0), said(2, 1, "user", "well?"), said(3, 2, sampled=True)], 0),
        # The same words after another conversation.
        ([*ASKED, said(2, None, "user", "who?"), said(3, 2), said(4, 3, "user", "again"), said(5, 4, sampled=True)], 0),
        # Both replies of three turns.
        ([*AGAIN, said(5, 3), said(6, 5, "user", "more"), said(7, 6, sampled=True)], 2),
        # A thought that a template takes out is no other reply.
        ([ASKED[0], said(1, 0, sampled=True, reasoning_content="hm"), *AGAIN[2:]], 1),
        # The same call, written otherwise; None and no text are the same.
        (
            [
                ASKED[0],
                said(1, 0, sampled=True, content=None, tool_calls=[{"id": "a", "name": "f", "arguments": '{"x":1}'}]),
                said(2, 0, content="", tool_calls=[{"id": "a", "name": "f", "arguments": '{ "x": 1 }'}]),
                said(3, 2, "tool", "3", tool_call_id="a"),
                said(4, 3, sampled=True),
            ],
            1,
        ),
        ([ASKED[0], said(1, 0, "user", "yes", sampled=False), said(2, 0, sampled=True)], 0),
    ],
)
def test_retokenised_turns_by_hand(rows, count):
    assert retokenised_turns(table("messages", rows)) == ({"t0": count} if count else {})


def test_traces_are_told_apart_and_their_order_does_not_matter():
    other = [row | {"trace_id": "t1"} for row in BRIDGED]
    rows = [row for pair in zip(other, AGAIN, strict=False) for row in pair] + AGAIN[4:]
    assert retokenised_turns(table("messages", rows[::-1])) == {"t0": 1}

"""What the stages between rollout and training say when they refuse rows, word for word."""

import numpy as np
import pytest

from tasks.advantage.algorithms.credit import AdvantageBreach, Credit
from tasks.advantage.stage import STAGE, ImportedWithoutTokens, StateMissing, check_zero_sum
from tasks.arrays.message_graph import BrokenGraph, find_branches, owners
from tasks.arrays.ragged import Ragged
from tasks.arrays.samples import PackingBreach
from tasks.filtering.filters.gibberish import UnknownVocabulary
from tasks.packing.bin_packing import balanced_rows, best_fit
from tasks.packing.stage import BudgetTooSmall, check_once
from tests.fixtures.builders import exactly, exchange, failed, message, table, trace, verdict, view
from tests.fixtures.stages import advantage, credited, group, inputs, judged, of_lengths, packed, tables_of

UNTRAINED = "Nothing was trained; all that was sampled is safe. "
AGAIN = "Nothing was trained on these rows; all that was sampled is safe. Run the stage that wrote the table again."
KEPT_BAD = [verdict("g0-0"), verdict("g0-1"), verdict("bad")]


@pytest.mark.parametrize(
    ("traces", "messages", "verdicts", "what"),
    [
        (
            group(1.0, 0.0),
            None,
            [verdict("g0-0")],
            "table verdicts, column trace_id: there is not exactly one verdict for every trace",
        ),
        (
            [*group(1.0, 0.0), failed("bad")],
            None,
            KEPT_BAD,
            "table verdicts, column keep: errored trace bad is kept and would enter a baseline",
        ),
        (
            group(1.0, float("inf")),
            None,
            None,
            "table traces, column reward: a kept trace has a reward that is not finite",
        ),
        (
            group(1.0, 0.0),
            exchange("g0-0"),
            None,
            "table messages, column trace_id: kept trace g0-1 has no messages",
        ),
    ],
    ids=["verdicts", "errored", "reward", "messages"],
)
def test_advantage_says_which_rows_do_not_fit(traces, messages, verdicts, what):
    with pytest.raises(AdvantageBreach, match=exactly(f"{what}. {AGAIN}")):
        credited(traces, messages, verdicts)


def test_advantage_says_which_reference_has_another_length():
    references = table("references", [{"trace_id": "t0", "message": 1, "logprobs": [-1.0]}])
    tables = tables_of([trace("t0")]) | {"references": references}
    what = "table references, column logprobs: message 1 of trace t0 has another length"
    with pytest.raises(AdvantageBreach, match=exactly(f"{what}. {AGAIN}")):
        advantage(tables, view(STAGE, algorithm={"type": "opd", "teacher": {"path": "/teacher"}}))


def test_advantage_says_that_state_is_missing():
    said = (
        "table estimator_states: algorithm rae goes on from the state after step 3, which recorded none. Nothing was "
        "credited: a cold start would look healthy and be wrong. All that was sampled is safe. Begin at step 0 "
        "(replay: without --steps), or choose an algorithm without state."
    )
    with pytest.raises(StateMissing, match=exactly(said)):
        credited(group(1.0), step=4, type="rae")


def test_advantage_says_which_group_does_not_add_up():
    traces = table("traces", [*group(1.0, 0.0), *group(1.0, 0.0, group_id="g1"), *group(3.0, group_id="g2")])
    stream, nan = np.zeros(0, np.float32), float("nan")
    wrong = Credit(np.zeros(5), np.array([0.5, -0.5, 0.5, 0.734, nan]), stream, stream, stream)
    said = (
        "table samples, column advantage: group g1 adds up to 1.23, not to zero (1 groups). Nothing was trained. A "
        "trace outside the baseline was given an advantage."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        check_zero_sum(traces, wrong)


def test_advantage_says_which_trace_no_policy_sampled():
    said = (
        "table traces, column policy_key: 2 kept traces, first g0-1, have tokens that no policy sampled, or none with "
        "log-probs: the renderer made them of text, an imported file held token ids alone, or a frozen teacher sampled "
        "them (algorithm sft). The rl and ref_kl components need the policy's log-prob of every token. Nothing was "
        "trained on; the rows are safe. Train on them with algorithm.type=supervised, or score or export them. For "
        "reinforcement learning, import traces with token ids and log-probs (verifiers writes them where its client is "
        "of type train)."
    )
    first, *others = group(1.0, 0.0, 0.0)
    with pytest.raises(ImportedWithoutTokens, match=exactly(said)):
        credited([first, *(row | {"policy_key": ""} for row in others)])


def test_advantage_says_which_agents_an_algorithm_cannot_credit():
    said = (
        "table traces, column agent: group g0 of environment 'reverse' holds trainable agents 'first' and 'second', "
        "and 'grpo' keeps no agents apart: rewards of different seats are not comparable. "
        f"{UNTRAINED}Choose an algorithm with a baseline per agent (rae, hierarchical_grpo), or make one seat "
        "trainable."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        credited([trace("a", agent="first"), trace("b", agent="second", reward=0.0)], step=0)


MASKS = "tests.fixtures.masks"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("a table", "it returned Table, not stagecoach.Credit"),
        ("short", "advantage is float64 (3,), not an array of float64 for 2 traces"),
        ("a list", "baseline is list, not an array of float64 for 2 traces"),
        ("double weights", "rl is float64 (10,), not an array of float32 for 10 tokens"),
        ("infinite", "advantage is infinite for some traces; NaN is none"),
        ("negative", "ce has weights that are negative or not finite; let an advantage be negative"),
        ("nan", "rl has weights that are negative or not finite; let an advantage be negative"),
        ("unsampled", "rl has weight on tokens that the policy did not sample"),
        ("unsampled reference", "ref_kl has weight on tokens that the policy did not sample"),
        ("both", "a token has weight in rl and in ref_kl; column advantages can serve but one of them"),
        ("no signal", "ref_kl has weight, and there is no signal: log pi_ref - log pi_engine of each token"),
        ("short signal", "signal is float32 (9,), not an array of float32 for 10 tokens"),
        ("signal not finite", "signal is not finite for some tokens"),
        ("no advantage", "rl has weight in a trace without an advantage"),
        ("state", "it returned states, which would be lost; set keeps_state=true for them to be kept"),
    ],
)
def test_a_custom_algorithm_is_told_what_cannot_be_trained_on(kind, what):
    said = (
        f"algorithm {MASKS}:broken: {what}. {UNTRAINED}Correct the function (its code is part of the key) and go on "
        "under a new name, or replay the run from advantage."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        credited(group(1.0, 0.0), type="custom", function=f"{MASKS}:broken", arguments={"kind": kind})


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("too few", "it returned 3 lists for 4 messages"),
        ("too long", "for message 0 of trace g0-0 it returned bool (4,), not 3 truth values"),
        ("numbers", "for message 0 of trace g0-0 it returned int64 (3,), not 3 truth values"),
        ("nothing", "it returned NoneType, not lists of truth values ('NoneType' object is not iterable)"),
    ],
)
def test_a_keep_mask_is_told_what_is_wrong_with_it(kind, what):
    said = (
        f"keep_mask {MASKS}:wrong: {what}. {UNTRAINED}Let it return, for each message of the table that it is given, a "
        "list of booleans as long as the message's token_ids."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        credited(group(1.0, 0.0), type="echo", keep_mask=f"{MASKS}:wrong", arguments={"kind": kind})


@pytest.mark.parametrize("section", [{"type": "opd", "teacher": {"path": "/teacher"}}, {"type": "opsd"}])
def test_a_token_without_a_reference_is_named(section):
    said = (
        "table references, column logprobs: 3 sampled tokens have no log-prob under the reference, first of message 1 "
        f"of trace g0-0; algorithm {section['type']} needs all of them. {UNTRAINED}Run the stage reference again."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        credited(group(1.0, 1.0), [*exchange("g0-0", completion=[4]), *exchange("g0-1")], **section)


def test_gibberish_says_that_it_needs_a_vocabulary():
    said = (
        "filter 'gibberish' needs model.vocab_size, which is 0. Nothing was filtered. Resolve the config with the "
        "model at hand, set model.vocab_size, or leave the filter out."
    )
    with pytest.raises(UnknownVocabulary, match=exactly(said)):
        judged([trace("a")], filters=[{"type": "gibberish"}], vocab_size=0)
    assert judged([trace("a")], filters=[{"type": "gibberish"}], vocab_size=1)["a"]["keep"]


def test_an_orphan_is_named():
    rows = table("messages", [message("a"), message("b")])
    said = (
        "table messages, column trace_id: b is not in table traces. Rows of two attempts may be mixed; nothing was "
        "trained. Run the stage that wrote the table again."
    )
    with pytest.raises(BrokenGraph, match=exactly(said)):
        owners(rows, table("traces", [trace("a")]), "messages")


def test_doubled_messages_are_counted():
    rows = table("messages", [message("a"), message("a"), message("a"), message("a", 1)])
    said = (
        "table messages, column message: 2 messages are there twice. Nothing was trained on them. Rows of two attempts "
        "may be mixed; run the rollout stage again."
    )
    with pytest.raises(BrokenGraph, match=exactly(said)):
        find_branches(rows, np.zeros(4, np.int64))


def test_a_message_whose_parent_is_no_earlier_one_is_named():
    rows = table("messages", [message("a"), message("a", 1, parent=4)])
    said = (
        "table messages, column parent: message 1 of trace a names parent 4, which is not an earlier message of that "
        "trace. Nothing was trained on it. Run the rollout stage again."
    )
    with pytest.raises(BrokenGraph, match=exactly(said)):
        find_branches(rows, np.zeros(2, np.int64))


def test_the_longest_sample_over_budget_is_named():
    said = (
        "sample t2/0 has 11 tokens, but packing.tokens_per_row is 8 (2 of 3 samples are too long). Nothing was "
        "trained; traces and samples are safe. Set packing.tokens_per_row to 11 or more, or shorten the rollouts: "
        "engine.max_model_len bounds prompt and completion, max_turns the number of turns."
    )
    with pytest.raises(BudgetTooSmall, match=exactly(said)):
        packed(of_lengths([9, 4, 11]), tokens_per_row=8)


def test_a_lost_sample_is_named():
    said = (
        "table batches, column sample_ids: sample c is in 2 rows, not in one. Nothing was trained; the samples are "
        "safe in table samples."
    )
    with pytest.raises(PackingBreach, match=exactly(said)):
        check_once([[0, 2], [2]], np.array([0, 2]), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (exchange("a")[:1], "column path: a row names a message that is not in table messages"),
        (
            exchange("a", completion=[4, 5, 6]),
            "column advantages: a row is not as long as the tokens on its path",
        ),
    ],
    ids=["path", "length"],
)
def test_packing_says_which_column_does_not_fit(messages, what):
    tables = inputs([trace("a")], exchange("a"), "supervised")
    said = f"table samples, {what}. {UNTRAINED}Run the advantage stage again from the same traces."
    with pytest.raises(PackingBreach, match=exactly(said)):
        packed(tables | {"messages": table("messages", messages)})


def test_a_sample_of_no_trace_and_a_batch_that_lost_its_only_sample_are_named():
    tables = inputs([trace("a")], algorithm="supervised") | {"traces": table("traces", [trace("b")])}
    with pytest.raises(BrokenGraph, match="table samples, column trace_id: a"):
        packed(tables)
    with pytest.raises(PackingBreach, match="sample a is in 0 rows"):
        check_once([[]], np.array([0]), ["a"])


def test_what_must_hold_of_our_own_code_says_where_it_does_not():
    with pytest.raises(AssertionError, match=exactly("sample 1 of 9 tokens does not fit 8")):
        best_fit([8, 9], 8)
    with pytest.raises(AssertionError, match=exactly("one row for each sample always does")):
        balanced_rows([8], 8, -1, None)
    with pytest.raises(AssertionError, match=exactly("lengths add up to 3, but there are 4 values")):
        Ragged.from_lengths(np.arange(4), [1, 2])

"""What the learner says when it refuses packed rows, word for word."""

import pytest

from tasks.learner.protocol import LearnerError
from tasks.learner.rows import batches_from_table
from tests.fixtures.exactly import exactly
from tests.fixtures.packed import batches, changed, padding, sample

LENGTHS = {"logprobs": 5, "temperatures": 5, "advantages": 5, "rl_weights": 5, "ce_weights": 5, "ref_kl_weights": 5}


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        (
            "token_ids",
            [1, 2, 3],
            f"batches row 1: per-token columns differ in length: { ({'token_ids': 3} | LENGTHS) }",
        ),
        ("cu_seqlens", [0, 4], "batches row 1: cu_seqlens (0, 4) does not rise from 0 to 5 tokens"),
        ("cu_seqlens", [0], "batches row 1: cu_seqlens (0,) does not rise from 0 to 5 tokens"),
        ("logprobs", [0, 0, float("inf"), 0, 0], "batches row 1: logprobs is not finite on a weighted token"),
        (
            "temperatures",
            [1, 1, 0, 1, 1],
            "batches row 1: temperatures must be positive on weighted tokens; greedy samples cannot train",
        ),
        (
            "ce_weights",
            [1, 0, 1, 1, 1],
            "batches row 1: the first token of a segment has weight, but nothing in its segment predicts it",
        ),
        (
            "ref_kl_weights",
            [0, 0, 0, 1, 0],
            "batches row 1: a token has rl and ref_kl weight, but the advantages column carries one signal",
        ),
        ("sample_ids", ["b", "c"], "batches row 1: 2 sample_ids for 1 segments"),
        ("sample_ids", [], "batches row 1: a padding row (no sample_ids) has weighted tokens"),
        (
            "rank",
            2,
            "batches: rows for ranks [0, 2], but the learner has 2: packing.data_parallel must not exceed "
            "learner.processes",
        ),
        ("micro_step", 0, "batches: two rows of an update share a rank and a micro_step"),
        ("rl_tokens", 3, "batches: rl_tokens says [3, 5], but 5 tokens have rl weight"),
        ("ref_kl_tokens", 1, "batches: ref_kl_tokens says [0, 1], but 0 tokens have ref_kl weight"),
        ("update", 2, "batches: updates [0, 2] are not numbered from 0 without gaps"),
    ],
)
def test_the_row_and_the_column_are_named(column, values, said):
    table = batches([[sample("a", 4, 1)], [sample("b", 5, 2)]])
    with pytest.raises(LearnerError, match=exactly(said)):
        batches_from_table(changed(table, column, values, row=1), 2)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (batches([[padding(4)]]), "batches: no token has weight in any component; nothing was trained"),
        (batches([[padding(4)]]).slice(1), "batches: no rows; nothing was trained"),
    ],
    ids=["weights", "rows"],
)
def test_that_nothing_was_trained_is_said(table, said):
    with pytest.raises(LearnerError, match=exactly(said)):
        batches_from_table(table, 1)

"""Tokens of a trace: what each table says of a token; what was not measured is not zero; and their shades."""

import math
import re
from io import StringIO

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from configs.run import RunConfig
from flows.queries.messages import branches, messages
from flows.queries.mismatch import CAUSES, MIN_TOKENS, cause, mismatch
from flows.queries.request import PageRequest
from flows.queries.rollouts import lineages_of, traces_of
from flows.queries.tokens import COLOURINGS, NONE, default_colouring, drawn_text, tokens
from flows.queries.trace import find_trace, samples
from flows.viewer.pages.trace import trace_page
from tests.fixtures import builders
from tests.fixtures.view_schemas import schema
from tests.flows.viewer.hand_made import FORKED, PATHS, RUN, HandMade, batch, credit, forked, update
from tests.flows.viewer.looking import pluck

FIRST = {
    "advantages": [0, 0, 0, 0, 0.5, 0.5, 0, -0.75, 0],
    "rl_weights": [0, 0, 0, 0, 1, 1, 0, 0, 0],
    "ce_weights": [0] * 8 + [2],
    "ref_kl_weights": [0] * 7 + [1, 0],
}
SECOND = {"advantages": [0, 0, 0, -0.5, -0.5], "rl_weights": [0, 0, 0, 0.25, 0.25]}
MEASURED_FIRST = {
    "sample_id": f"{FORKED}/0",
    "logprobs": [0, 0, 0, 0, -1.5, -2, 0, -0.25, -3],
    "entropies": [0, 0, 0, 0, 0.5, 0, 0, 0.25, 1],
}
MEASURED_SECOND = {"sample_id": f"{FORKED}/1", "logprobs": [0, 0, 0, -0.5, -1], "entropies": [0, 0, 0, 2, 3]}
MASKS = [{"sample_id": f"{FORKED}/1", "masked": [False, False, False, True, False]}]
REFERENCES = [
    {"trace_id": FORKED, "message": 1, "logprobs": [0, -3, -4]},
    {"trace_id": FORKED, "message": 3, "logprobs": [-1.25, -0.125]},
]
TOKENS = {name: kind for name, kind in schema("trace_tokens").items() if name not in ("run", "key", "trace_id")}
TOKENS |= {"text": pl.String(), "special": pl.Boolean()}
SAMPLES = [credit(FORKED, 0, PATHS[0], FIRST), credit(FORKED, 1, PATHS[1], SECOND)]
OTHER = credit("other", 0, [0], {"rl_weights": [0]})
WHOLE = {
    "samples": SAMPLES,
    "batches": [
        batch(SAMPLES[:1], logprobs=[0, 0, 0, 0, -1, -2, 0, -0.5, -0.25]),
        batch([OTHER, SAMPLES[1]], row=1, scale=0.5, logprobs=[0, 0, 0, 0, -1, -1]),
    ],
    "updates": [update()], "token_statistics": [MEASURED_FIRST, MEASURED_SECOND], "token_masks": MASKS,
    "references": REFERENCES,
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The store with everything in it."""
    hand = HandMade(tmp_path_factory.mktemp("tokens") / "store")
    tokens_of(hand)
    return hand.reader


@pytest.fixture(scope="module")
def found(library):
    """The tokens of its trace."""
    return tokens(library, find_trace(library, RUN, FORKED))


def tokens_of(hand, trace=None, messages=None, **changes):
    """The tokens of the forked trace, in a store of its own; a table that is None is not written."""
    tables = {name: rows for name, rows in (WHOLE | changes).items() if rows is not None}
    hand.step([trace or builders.trace(FORKED)], messages or forked(), **tables)
    return tokens(hand.reader, find_trace(hand.reader, RUN, FORKED))


EXPECTED = """
message place token_id sampled is_content policy_version branch position trained advantage rl_weight ce_weight
0 0  1 false -     - 0 0 false -    0    0
0 1  2 false -     - 0 1 false -    0    0
0 2  3 false -     - 0 2 false -    0    0
1 0  4 false false - 0 3 false -    0    0
1 1  5 true  true  0 0 4 true  0.5  1    0
1 2  6 true  true  0 0 5 true  0.5  1    0
2 0  7 false -     - 0 6 false -    0    0
3 0  8 true  -     0 0 7 true  -    0    0
3 1  9 true  -     0 0 8 true  -    0    2
4 0 10 true  -     0 1 3 true  -0.5 0.25 0
4 1 11 true  -     0 1 4 true  -0.5 0.25 0
"""
MEASURED = """
ref_kl_weight trained_rl_weight trained_ce_weight trained_ref_kl_weight engine_logprob learner_logprob entropy log_ratio
0 -     - - -     -     -    -
0 -     - - -     -     -    -
0 -     - - -     -     -    -
0 -     - - -     -     -    -
0 1     - - -1    -1.5  0.5  -0.5
0 1     - - -2    -2    0    0
0 -     - - -     -     -    -
1 -     - 1 -0.5  -0.25 0.25 0.25
0 -     2 - -0.25 -3    1    -2.75
0 0.125 - - -1    -0.5  2    0.5
0 0.125 - - -1    -1    3    0
"""
REST = """
outside reference_logprob signal text
- - - -
- - - -
- - - -
- - - -
false -3 - -
false -4 - -
- - - -
- -1.25 -0.75 -
- -0.125 - -
true - - -
false - - -
"""


@pytest.mark.parametrize("table", [EXPECTED, MEASURED, REST])
def test_every_token_has_what_each_table_says_of_it(found, table):
    assert dict(found.schema) == TOKENS
    rows = StringIO("\n".join(",".join(line.split()) for line in table.split("\n")[1:]))
    expected = pl.read_csv(rows, null_values="-", schema_overrides=TOKENS)
    assert_frame_equal(found.select(expected.columns), expected, check_exact=True)


def test_a_tiny_mismatch_is_not_rounded_away(hand):
    near = MEASURED_FIRST | {"logprobs": [*MEASURED_FIRST["logprobs"][:-1], -0.25 + 2**-26]}
    found = tokens_of(hand, token_statistics=[near, MEASURED_SECOND])
    assert found["log_ratio"][8] == 2**-26
    assert found["mismatch"][8] == pytest.approx(2**-53, rel=1e-6, abs=0), "exp(x) - 1 - x would be nothing"


@pytest.mark.engine  # torch takes its time to load
def test_the_learners_own_measure_says_the_same(found):
    torch = pytest.importorskip("torch")
    from configs.losses import DppoLoss
    from tasks.learner.loss import WeightedTokens, measure_loss, rl_term

    found = found.filter(pl.col("rl_weight") != 0)
    column = {name: torch.tensor(found[name].to_list()) for name in ("engine_logprob", "advantage", "rl_weight")}
    none, learner = torch.zeros(len(found)), torch.tensor(found["learner_logprob"].to_list())
    given = WeightedTokens(*column.values(), none, none, torch.tensor([0, 0, 1, 1]), 2)
    rl, term = rl_term(learner, given, DppoLoss())
    entropies = torch.tensor(found["entropy"].to_list())
    measured = measure_loss(rl, term, entropies, none, none, term)
    assert found["mismatch"].sum() == pytest.approx(measured.sums["mismatch_kl"].item())
    assert found["mismatch"].max() == pytest.approx(measured.maxima["mismatch_kl"].item())
    assert found["entropy"].sum() == pytest.approx(measured.sums["entropy"].item())


def test_without_credits_weights_are_unknown_not_zero(hand):
    found = tokens_of(hand, samples=(), batches=None, updates=None)
    unknown = found.select("rl_weight", "ce_weight", "ref_kl_weight", "advantage", "branch")
    assert unknown.null_count().row(0) == (len(found),) * 5
    assert found["engine_logprob"].to_list()[4] == -1


def test_a_sample_that_was_not_packed_was_not_trained(hand):
    found = tokens_of(hand, batches=[batch(SAMPLES[:1])], token_statistics=[MEASURED_FIRST])
    assert found["trained"].to_list() == [False] * 4 + [True, True, False, True, True, False, False]
    assert found["learner_logprob"].to_list()[9:] == [None, None]
    assert found["rl_weight"].to_list()[9:] == [0.25, 0.25], "the advantage stage gave it one"
    assert found["trained_rl_weight"].to_list()[9:] == [None, None], "nothing was trained with it, not even zero"


def test_what_was_packed_and_not_trained_has_no_weight_as_trained(hand):
    found = tokens_of(hand, updates=None, token_statistics=None, token_masks=None)
    assert not found["trained"].any() and found["trained_rl_weight"].null_count() == len(found)


@pytest.mark.parametrize(("share", "outside"), [(0, False), (0.25, None)])
def test_masks_that_were_not_kept_are_unknown(hand, share, outside):
    found = tokens_of(hand, token_masks=None, updates=[update(masked_fraction=share)])
    assert found["outside"].to_list() == [None] * 4 + [outside] * 2 + [None] * 3 + [outside] * 2


def test_log_probs_of_a_text_that_was_only_rendered_are_unknown(hand):
    rows = [row | {"logprobs": [0.0] * len(row["token_ids"])} for row in forked()]
    found = tokens_of(hand, builders.trace(FORKED, policy_key=""), rows)
    assert found["engine_logprob"].null_count() == found["ratio"].null_count() == len(found)
    assert found["learner_logprob"].to_list()[4] == -1.5
    assert mismatch_of(hand.reader) is None


def mismatch_of(reader):
    """The mismatch of the only rollout, as lists of a step have it."""
    return traces_of(reader, RUN, lineages_of(reader, RUN, 0), ["mismatch_kl"])["mismatch_kl"].item()


def test_the_mismatch_of_a_rollout_is_the_mean_of_its_tokens_with_rl_weight(library, found):
    weighted = found.filter(pl.col("rl_weight") != 0)["mismatch"]
    assert mismatch_of(library) == pytest.approx(weighted.mean()) and weighted.mean() > 0


def test_the_first_token_of_a_sample_has_no_weight_in_its_batch(hand):
    credits = [credit(FORKED, 0, [0], {"advantages": [1, 1], "rl_weights": [1, 1]})]
    measured = {"sample_id": f"{FORKED}/0", "logprobs": [0, -1], "entropies": [0, 1]}
    found = tokens_of(
        hand, None, [builders.message(FORKED, 0, tokens=(1, 2), sampled=True)],
        samples=credits, batches=[batch(credits)], token_statistics=[measured], token_masks=None, references=None,
    )  # fmt: skip
    assert found["trained"].to_list() == [False, True]
    assert found["rl_weight"].to_list() == [0, 1] and found["trained_rl_weight"].to_list() == [None, 1]
    assert found["learner_logprob"].to_list() == [None, -1]


def test_messages_have_texts_and_counts_and_a_window_the_same_tokens(library, found):
    trace = find_trace(library, RUN, FORKED)
    rows = messages(library, trace)
    assert rows["num_tokens"].to_list() == [3, 3, 1, 2, 2] and rows["num_sampled"].to_list() == [0, 2, 0, 2, 2]
    assert branches(rows) == [list(way) for way in PATHS]
    packed = samples(library, trace).select("branch", "row", "update").rows()
    assert packed == [(0, 0, 0), (1, 1, 0)]
    some = tokens(library, trace, within=[1, 4])
    assert some.equals(found.filter(pl.col("message").is_in([1, 4])))


BY_NAME = {each.name: each for each in COLOURINGS}
CHANCES = [None, *(math.log(chance) for chance in (1.0, 0.995, 0.95, 0.6, 0.3, 0.05, 0.001))]


@pytest.mark.parametrize(
    ("name", "values", "letters"),
    [
        ("advantage", [None, -1, -0.75, -0.5, -0.25, -1e-9, 0, 1e-9, 0.25, 0.26, 0.5, 1, 7], "-abbcdoeffghh"),
        ("ratio", [None, 0, 0.0005, -0.0005, 0.001, -0.01, 0.1, -0.1, 0.5, -math.inf], "-oooecgbha"),
        ("mismatch", [None, 0.0, 1e-8, 9e-7, 1e-6, 0.05, 0.1, math.inf], "-ABBCGHH"),
        ("entropy", [None, 0.0, 0.0101, 0.31, 3.9, 4.0], "-ABDGH"),
        ("engine", CHANCES, "-AABDEGH"),
        ("learner", CHANCES, "-AABDEGH"),
        ("outside", [True, False, None], "xi-"),
        ("trained", [True, False], "yn"),
    ],
)
def test_shades(name, values, letters):
    column = BY_NAME[name].column
    frame = pl.DataFrame({column: values}, schema={column: TOKENS[column]}, strict=False)
    assert BY_NAME[name].shades(frame) == letters


def test_the_mask_has_a_letter_for_each_writer():
    tokens = {"sampled": [True, False, False, False], "is_content": [None, True, False, None]}
    shades = [BY_NAME[name].shades(pl.DataFrame(tokens)) for name in ("mask", "content")]
    assert shades == ["suuu", "-pt-"]


def test_every_shade_that_can_be_is_in_its_legend():
    for each in COLOURINGS:
        letters = [letter for letter, _ in each.legend()]
        assert len(set(letters)) == len(letters) and NONE not in letters
    assert BY_NAME["advantage"].legend()[0] == ("a", "-1") and BY_NAME["advantage"].legend()[-1] == ("h", "+1")
    assert [label for _, label in BY_NAME["ratio"].legend()][3:6] == ["-0.001", "0", "+0.001"]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"rl_weight": 1.0, "ce_weight": 1.0}, "advantage"),
        ({"rl_weight": 0.0, "ce_weight": 1.0}, "ce_weight"),
        ({"engine_logprob": -1.0}, "engine"),
        ({"engine_logprob": None}, "mask"),
    ],
)
def test_what_is_looked_at_first_is_what_there_is(values, name):
    schema = dict.fromkeys(("rl_weight", "ce_weight", "engine_logprob"), pl.Float32)
    found = pl.DataFrame([values], schema)
    assert default_colouring(found) == name


def test_blanks_of_tokens_can_be_seen():
    assert drawn_text(" the  end ", 1) == "·the··end·"
    assert drawn_text("two words", 1) == "two words"
    assert drawn_text("a\n\tb", 1) == "a⏎\n⇥b"
    assert drawn_text("", 1) == "∅" and drawn_text(None, 12) == "⟨12⟩"


def test_tokens_of_a_trace_of_several_policies_know_theirs(hand):
    places = [(1, 1, 1, 3), (1, 2, 1, 4), (3, 0, 2, 5), (4, 0, 2, 3)]
    names = ("message", "start", "num_tokens", "policy_version")
    spans = [dict(zip(names, place, strict=True)) for place in places]
    spans = [span | {"trace_id": FORKED, "policy_key": f"policy {span['policy_version']}"} for span in spans]
    own = tokens_of(hand, builders.trace(FORKED, policy_key="policy 3", policy_version=3), token_policies=spans)
    assert own["policy_version"].to_list() == [*[None] * 4, 3, 4, None, 5, 5, 3, 3]
    assert own["policy_age"].to_list() == [*[None] * 4, 2, 1, None, 0, 0, 2, 2]
    assert BY_NAME["policy"].shades(own) == "----CB-AACC"
    page = trace_page(hand.reader, PageRequest("/", {"run": RUN, "trace": FORKED}, {})).values
    assert pluck(page["policies"]["sampled"], "version", "num_tokens") == [(3, 3), (4, 1), (5, 2)]


def test_the_gap_is_split_by_properties_of_tokens_with_rl_weight(library, found):
    rows = mismatch(library, RUN, RunConfig())["splits"]
    weighted = found.filter(pl.col("rl_weight") != 0)
    for split in {row["split"] for row in rows}:
        values = [row for row in rows if row["split"] == split]
        assert sum(row["num_tokens"] for row in values) == len(weighted) == 4, split
        total = sum(row["num_tokens"] * row["mismatch_kl"] for row in values)
        assert total == pytest.approx(weighted["mismatch"].sum())
    in_8_bits = RunConfig.model_validate({"engine": {"quantization": "fp8"}, "training": {"fp8": True}})
    assert mismatch(library, RUN, in_8_bits)["precision"] == {"engine": "fp8", "learner": "fp8"}
    turns, later = (row for row in rows if row["split"] == "turn")
    assert turns["log_ratio"] == -0.25 and later["mismatch_kl_max"] == pytest.approx(math.exp(0.5) - 1.5)


@pytest.mark.parametrize(
    ("apart", "mean", "expected"),
    [
        ({}, 1e-9, "rounding in float32"),
        ({}, 1e-4, "all tokens differ alike.*router_replay=rollout"),
        ({"age": 1}, 1e-4, "tokens of older policies"),
        ({"token": 0}, 1e-4, "the first token of a turn"),
        ({"token": 1}, 1e-4, "all tokens differ alike"),
        ({"turn": 1, "position": 1}, 1e-4, "later turns"),
        ({"position": 1}, 1e-4, "later positions"),
        ({"engine": 0}, 1e-4, "one engine"),
    ],
)
def test_the_cause_is_the_first_split_that_differs_by_a_factor(apart, mean, expected):
    rows = [
        {"split": split, "num_tokens": 100, "mismatch_kl": mean * (4 if apart.get(split) == place else 1)}
        for split in CAUSES
        for place in (0, 1)
    ]
    rows += [{"split": "age", "num_tokens": MIN_TOKENS - 1, "mismatch_kl": 1.0}]
    assert re.search(expected, cause(rows, RunConfig()))
    assert "no sampled token" in cause([], RunConfig())

"""Every token of a trace with its text and all that the engine, the advantage stage and the learner said of it."""

from collections.abc import Collection, Iterator

import numpy as np
import polars as pl

from flows.queries.messages import message_works
from flows.queries.step_history import present
from flows.queries.store_reader import StoreReader, has_lost_rows
from flows.queries.trace import FoundTrace, packed_weights, samples
from flows.queries.views import has_expired_rows
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, TokenTexts, tokenizer_of

TEXTS = {"text": pl.String, "special": pl.Boolean}


def with_texts(reader: StoreReader, trace: FoundTrace, tokens: pl.DataFrame) -> pl.DataFrame:
    """Return tokens, which have the columns message and token_id, with `text` and `special`.

    The texts are for people: bytes that are no whole character are named, as TokenText.shown has them. Both columns are
    null where there is no tokenizer.
    """
    texts, _ = tokenizer(reader, trace)
    if texts is None:
        return tokens.with_columns(pl.lit(None, kind).alias(name) for name, kind in TEXTS.items())
    pieces = [
        piece
        for (_,), part in tokens.group_by("message", maintain_order=True)
        for piece in texts.of(part["token_id"].to_list(), begins=False)
    ]
    return tokens.with_columns(
        pl.Series("text", [piece.shown for piece in pieces], pl.String),
        pl.Series("special", [piece.special for piece in pieces], pl.Boolean),
    )


def tokenizer(reader: StoreReader, trace: FoundTrace) -> tuple[TokenTexts | None, str]:
    """Return the tokenizer of a trace; where there is none, None and why: token ids can be looked at all the same."""
    policy = str(trace.row["policy_key"]) or _rendered_for(reader, trace)
    try:
        texts = tokenizer_of(reader.store, reader.config(trace.run), policy, _other_policies(reader, trace))
    except TokenizerUnreadable as error:
        return None, str(error)
    return texts, "" if texts else "no tokenizer of the policy that sampled it is at hand"


def _rendered_for(reader: StoreReader, trace: FoundTrace) -> str:
    """Return a policy whose tokenizer made the tokens of a text that none sampled: what is trained on is of the run."""
    return next(_other_policies(reader, trace), "") if trace.row["trainable"] else ""


def _other_policies(reader: StoreReader, trace: FoundTrace) -> Iterator[str]:
    """Yield the policies of the run, the newest first: their tokenizer is the same."""
    made = reader.frames(trace.run).graph.makers("policies")
    yield from (work.key for work in reversed(made))


WEIGHTS = {"rl_weights": "rl_weight", "ce_weights": "ce_weight", "ref_kl_weights": "ref_kl_weight"}
TRAINED_WEIGHTS = {name: f"trained_{name}" for name in WEIGHTS.values()}
"""What a token weighs by the credit, and what it was trained with."""
STREAMS = {"advantages": "signal", **WEIGHTS}
MEASURED = {"logprobs": "learner_logprob", "entropies": "entropy"}
PLACE = ("message", "place")
TOKENS = {
    "message": pl.Int32,
    "place": pl.Int64,
    "token_id": pl.Int32,
    **TEXTS,
    "sampled": pl.Boolean,
    "is_content": pl.Boolean,
    "policy_version": pl.Int64,
    "policy_age": pl.Int64,
    "branch": pl.Int32,
    "position": pl.Int64,
    "trained": pl.Boolean,
    "advantage": pl.Float32,
    "rl_weight": pl.Float32,
    "ce_weight": pl.Float32,
    "ref_kl_weight": pl.Float32,
    "trained_rl_weight": pl.Float32,
    "trained_ce_weight": pl.Float32,
    "trained_ref_kl_weight": pl.Float32,
    "engine_logprob": pl.Float32,
    "learner_logprob": pl.Float32,
    "log_ratio": pl.Float64,
    "ratio": pl.Float64,
    "mismatch": pl.Float64,
    "entropy": pl.Float32,
    "outside": pl.Boolean,
    "reference_logprob": pl.Float32,
    "signal": pl.Float32,
}
"""One row for each token of a trace's messages, by message and place.

message, place      where the token stands; place counts within the message, from 0
text, special       what it adds to the text, for people; null where its tokenizer is not at hand
sampled             the mask: the policy sampled it
is_content          body rather than template; null where that is not known
policy_version      of the policy that sampled it; null where it was not, or no policy of the store did
policy_age          how many versions older that policy is than the newest one that sampled a part of the trace
branch, position    the first branch through its message, whose sample has its weights, and its place in that sample
trained             it has weight in a row of a batch that an update was made on; null where rows that say it were
                    dropped for their age
advantage           where it has rl weight
rl_weight, ...      as the advantage stage gave it; null where the trace has no credit; 0 is no member of the component
trained_rl_weight,  as the batch row has it, to the last bit: packing scales it where losses are divided by constant
...                 lengths. Null where the token was not packed or not trained, or is no member of the component
engine_logprob      as it was sampled, temperature applied; null where it was not, or nobody measured it
learner_logprob     before the update, at the same temperature; null where the learner did not measure it
log_ratio, ratio    learner_logprob - engine_logprob, and its exp: the importance ratio r of tasks.learner.loss; null
                    where no policy is known to have sampled it
mismatch            r - 1 - log r, as the learner measures it (tasks.learner.loss)
entropy             of the learner's distribution, nats
outside             the rl loss gave its surrogate no gradient: outside the trust region, clipped, or in a sequence that
                    was left out; null where it has no rl weight, or masks were not kept
reference_logprob   of the frozen reference, where one was asked
signal              where it has ref_kl weight: the reference's log-prob less the engine's
"""


def tokens(
    reader: StoreReader, trace: FoundTrace, within: Collection[int] | None = None, texts: bool = True
) -> pl.DataFrame:
    """Return the tokens of a trace, columns as in `TOKENS`; only those of the messages `within`, where it is given.

    Without `texts` their two columns are not there: `with_texts` finds those of the tokens that are looked at.
    A token that several branches share is returned once, with the weights that the first one's sample gives it.
    """
    own = _laid_out(reader, trace, within)
    own = own.join(_sample_streams(reader, trace), on=PLACE, how="left", maintain_order="left")
    own = own.join(_references(reader, trace), on=PLACE, how="left", maintain_order="left")
    rl, pulled = pl.col("rl_weight") != 0, pl.col("ref_kl_weight") != 0
    both = pl.col("learner_logprob").cast(pl.Float64) - pl.col("engine_logprob").cast(pl.Float64)
    own = own.with_columns(
        *_as_trained(reader, trace),
        advantage=pl.when(rl).then("signal"),
        signal=pl.when(pulled).then("signal"),
        outside=pl.when(rl).then("outside"),
        reference_logprob=pl.when("sampled").then("reference_logprob"),
        log_ratio=pl.when(pl.lit(_by_policy(trace))).then(both),
    )
    runs = token_policies(reader, trace)
    own = own.with_columns(_ratios(own["log_ratio"]), policy_version=_versions(reader, trace, own, runs))
    # Of the trace, and not of the messages that are looked at: the same age means the same on every page.
    newest = max([trace.row["policy_version"], *runs["policy_version"]])
    own = own.with_columns(policy_age=newest - pl.col("policy_version"))
    own = with_texts(reader, trace, own) if texts else own
    return own.select(pl.col(name).cast(kind) for name, kind in TOKENS.items() if name in own.columns)


def _as_trained(reader: StoreReader, trace: FoundTrace) -> list[pl.Expr]:
    """Return whether each token was trained on, null where that is not known any more, and with which weights."""
    weighted = {name: (pl.col(name) != 0).fill_null(False) for name in TRAINED_WEIGHTS.values()}
    made = pl.lit(trace.lineage.updates is not None)
    own = pl.any_horizontal(*weighted.values()) & made
    gone = trace.lineage.for_training and has_expired_rows(reader.frames(), trace.lineage)
    trained = pl.when(own).then(True) if gone else own
    weights = (pl.when(member & made).then(name).alias(name) for name, member in weighted.items())
    return [trained.alias("trained"), *weights]


RUNS = {"message": pl.Int32, "start": pl.Int64, "num_tokens": pl.Int64, "policy_key": pl.String}
RUNS |= {"policy_version": pl.Int64}
"""The columns of table token_policies that tell who sampled which tokens of a trace."""


def token_policies(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the runs of tokens by policy, in order; none of a trace that one policy sampled."""
    works = message_works(reader, trace)
    if not any("token_policies" in work.tables for work in works):
        return pl.DataFrame(schema=RUNS)
    rows = reader.frames().rows(works, "token_policies").filter(pl.col("trace_id") == trace.trace_id)
    return rows.select(pl.col(name).cast(kind) for name, kind in RUNS.items()).collect().sort("message", "start")


def _versions(reader: StoreReader, trace: FoundTrace, own: pl.DataFrame, runs: pl.DataFrame) -> pl.Series:
    """Return the version of the policy that sampled each token; `runs` are those of `token_policies`."""
    places = pl.int_ranges("start", pl.col("start") + pl.col("num_tokens"))
    versions = runs.select("message", "policy_version", place=places).explode("place")
    several = own.select(*PLACE, "sampled").join(versions, on=PLACE, how="left", maintain_order="left")
    lost = has_lost_rows(reader, message_works(reader, trace), "token_policies")
    single = trace.row["policy_version"] if _by_policy(trace) and not lost else None
    known = pl.coalesce("policy_version", pl.lit(single, pl.Int64))
    return several.select(policy_version=pl.when("sampled").then(known))["policy_version"]


def _by_policy(trace: FoundTrace) -> bool:
    """Say whether a policy of the store sampled the trace: else log-probs are zeros, or another model's."""
    return bool(trace.row["policy_key"] != "")


def _ratios(log_ratio: pl.Series) -> list[pl.Series]:
    """Return the importance ratio and the mismatch; both null where the log ratio is."""
    values = log_ratio.to_numpy()
    # Far apart, a ratio is infinite: that is a finding to be shown and no fault of the page.
    with np.errstate(over="ignore", invalid="ignore"):
        ratio, mismatch = np.exp(values), np.expm1(values) - values
    return [
        pl.Series("ratio", ratio, nan_to_null=True),
        pl.Series("mismatch", mismatch, nan_to_null=True),
    ]


def _laid_out(reader: StoreReader, trace: FoundTrace, within: Collection[int] | None) -> pl.DataFrame:
    """Return one row for each token of the messages, with what sampling said of it."""
    rows = reader.frames().rows(message_works(reader, trace), "messages")
    rows = rows.filter(pl.col("trace_id") == trace.trace_id).sort("message")
    if within is not None:
        rows = rows.filter(pl.col("message").is_in(list(within)))
    read = rows.select("message", "token_ids", "mask", "logprobs", "is_content").collect()
    numbers = read.select("message", place=pl.int_ranges(pl.col("token_ids").list.len()))
    flat = pl.concat([numbers, read.drop("message", "is_content")], how="horizontal")
    flat = flat.filter(pl.col("place").list.len() > 0).explode("place", "token_ids", "mask", "logprobs")
    body = read.select("message", "is_content", place=pl.int_ranges(pl.col("is_content").list.len()))
    body = body.filter(pl.col("place").list.len() > 0).explode("place", "is_content")
    flat = flat.join(body, on=PLACE, how="left", maintain_order="left")
    # Of a text that was only rendered, log-probs are zeros that nobody measured.
    known = pl.col("mask") & (pl.lit(_by_policy(trace)) | (pl.col("logprobs") != 0))
    flat = flat.with_columns(engine_logprob=pl.when(known).then("logprobs"))
    return flat.rename({"token_ids": "token_id", "mask": "sampled"})


def _sample_streams(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return, by message and place, the streams of the sample that the token belongs to."""
    own = samples(reader, trace)
    places = _places(reader, trace, own)
    rows = reader.frames().rows(present(trace.lineage.samples), "samples").filter(pl.col("trace_id") == trace.trace_id)
    # Streams stand by sample, messages by trace: a token that branches share is in several samples, the first one
    # counts.
    streams = rows.select("sample_id", *STREAMS).collect()
    flat = _explode(streams.rename(STREAMS)).join(
        _learner_values(reader, trace, own), on=("sample_id", "position"), how="left"
    )
    if _masks_known(reader, trace):
        flat = flat.with_columns(pl.col("outside").fill_null(False))
    weighted = pl.any_horizontal(pl.col(name) != 0 for name in WEIGHTS.values())
    packed = packed_weights(reader, trace, own).rename({old: TRAINED_WEIGHTS[new] for old, new in WEIGHTS.items()})
    flat = flat.join(_explode(packed), on=("sample_id", "position"), how="left")
    # The first token of a sample has nothing before it: packing takes its weight away.
    first = pl.col("position") == 0
    flat = flat.with_columns(pl.when(first).then(0).otherwise(pl.col(name)).alias(name) for name in STREAMS.values())
    flat = flat.with_columns(pl.when(weighted).then(name).alias(name) for name in MEASURED.values())
    return places.join(flat, on=("sample_id", "position"), how="left").drop("sample_id")


def _places(reader: StoreReader, trace: FoundTrace, own: pl.DataFrame) -> pl.DataFrame:
    """Return message, place, branch, sample_id and position of every token, in the first sample through its message."""
    rows = reader.frames().rows(message_works(reader, trace), "messages")
    lengths = rows.filter(pl.col("trace_id") == trace.trace_id).select(
        "message", length=pl.col("token_ids").list.len().cast(pl.Int64)
    )
    path = own.select("sample_id", "branch", message="path").explode("message").drop_nulls("message")
    path = path.join(lengths.collect(), on="message", how="left", maintain_order="left")
    start = pl.col("length").cum_sum().over("sample_id") - pl.col("length")
    path = path.with_columns(start=start).unique("message", keep="first", maintain_order=True)
    path = path.with_columns(place=pl.int_ranges(pl.col("length"))).filter(pl.col("length") > 0).explode("place")
    return path.select(*PLACE, "branch", "sample_id", position=pl.col("start") + pl.col("place"))


def _learner_values(reader: StoreReader, trace: FoundTrace, own: pl.DataFrame) -> pl.DataFrame:
    """Return, by sample and position, what the learner measured, and which tokens its masks took out."""
    made = trace.lineage.updates
    named = pl.col("sample_id").is_in(own["sample_id"].to_list())
    frames = reader.frames()
    read = frames.rows(present(made), "token_statistics").filter(named).select("sample_id", *MEASURED).collect()
    masks = frames.rows(present(made), "token_masks").filter(named).select("sample_id", outside="masked").collect()
    flat = _explode(read.rename(MEASURED))
    # Statistics may have been dropped for their age, and masks are not there where nothing was outside.
    return flat.join(_explode(masks), on=("sample_id", "position"), how="full", coalesce=True)


def _masks_known(reader: StoreReader, trace: FoundTrace) -> bool:
    """Say whether a sample without a row in token_masks had no masked token, rather than that none were kept."""
    if trace.lineage.updates is None:
        return False
    # Masks are written of samples with a masked token alone: no row is an answer only where rows were kept.
    if "token_masks" in trace.lineage.updates.tables:
        return not has_lost_rows(reader, [trace.lineage.updates], "token_masks")
    rows = reader.frames().rows([trace.lineage.updates], "updates").select("masked_fraction").collect()
    return len(rows) > 0 and not any(rows["masked_fraction"])


def _references(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return, by message and place, the log-probs under the reference."""
    credits = trace.lineage.samples
    made = reader.graph.sources(credits, "references") if credits else []
    rows = reader.frames().rows(made, "references").filter(pl.col("trace_id") == trace.trace_id)
    read = rows.select("message", reference_logprob="logprobs").collect()
    return _explode(read, "message", "place")


def _explode(rows: pl.DataFrame, name: str = "sample_id", number: str = "position") -> pl.DataFrame:
    """Return lists as one row for each of their values, with a number from 0."""
    lists = [column for column in rows.columns if column != name]
    length = pl.col(lists[0]).list.len()
    return rows.filter(length > 0).with_columns(pl.int_ranges(length).alias(number)).explode(number, *lists)

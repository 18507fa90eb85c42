"""Facts of a trace: what it earned, what a run made of it, and which policies stand before and after it."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries import batch
from flows.queries.outcomes import EXPIRED
from flows.queries.row_lineage import policy_version
from flows.queries.sentences import flat, sentence
from flows.queries.store_reader import StoreReader, lost
from flows.queries.trace import WEIGHTS, FoundTrace, outcome_of, packed_weights, samples
from flows.viewer import addresses
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STOPPED, TRAINED

Values = dict[str, Any]
TONES = {TRAINED: "good", FILTERED: "warn", REFUSED: "warn", NO_WEIGHT: "warn", ERRORED: "bad", STOPPED: "bad"}
TONES |= {PENDING: "going", QUARANTINED: "bad", EXPIRED: "warn"}
SPANS = ("setup", "generation", "scoring")


def outcome(library: StoreReader, found: FoundTrace) -> Values:
    """Return what the run made of the trace: a sentence, its outcome, the verdict's numbers, group and quarantines."""
    use = outcome_of(library, found)
    verdict = use["verdict"]
    return {
        "sentence": sentence({"trace": found.row}, use),
        "outcome": use["outcome"],
        "detail": use["detail"],
        "tone": TONES.get(use["outcome"], ""),
        "verdict": verdict and {name: verdict[name] for name in ("keep", "reason", "detected")},
        "evidence": [
            {"filter": name, "numbers": [{"name": path, "value": value} for path, value in flat(numbers)]}
            for name, numbers in (verdict or {"evidence": {}})["evidence"].items()
        ],
        "group": use["group"],
        "decision": use["decision"],
        "regrade": use["regrade"],
        "quarantines": use["quarantines"],
        "keys": use["keys"],
    }


def reward_parts(text: str) -> list[Values]:
    """Return the named rewards: name, score, weight and product; all three are null where it was not scored."""
    found = read_json(text)
    if not isinstance(found, Mapping):
        return []
    return [{"name": str(name), **_scored(each)} for name, each in found.items()]


def _scored(each: Any) -> Values:
    given = each if isinstance(each, Mapping) else {}
    score, weight = given.get("score"), given.get("weight")
    product = score * weight if isinstance(score, (int, float)) and isinstance(weight, (int, float)) else None
    return {"score": score, "weight": weight, "product": product}


def timing(row: Mapping[str, Any]) -> list[Values]:
    """Return the spans of a rollout in order: name, seconds; the generation with the model's share of it."""
    spans = [{"name": name, "seconds": row[f"{name}_seconds"], "inside": None} for name in SPANS]
    spans[1]["inside"] = {"name": "model", "seconds": row["model_seconds"]}
    return spans


def trained_in(library: StoreReader, found: FoundTrace) -> list[Values]:
    """Return the samples that the trace became, each with the batch row that it is in, and that row's address.

    The address is None where the step was done again since: the page of its batch has the rows that were trained last.
    `weights` are the sums of the weights by component that the row has for the sample, None where it is in none.
    """
    packed, made = found.lineage.batches, found.lineage.updates
    own = samples(library, found)
    sums = packed_weights(library, found, own).with_columns(pl.col(WEIGHTS).cast(pl.List(pl.Float64)).list.sum())
    weights = {row.pop("sample_id"): row for row in sums.to_dicts()}
    rows = own.drop("path").to_dicts()
    gone = packed is not None and lost(library, [packed], "batches")
    shown = batch.packed(library, found.run, packed.step).batches.key if packed else None
    for each in rows:
        known = packed is not None and each["row"] is not None
        told = packed and known and packed.key == shown
        each["address"] = addresses.row(found.run, packed.step, each["row"]) if packed and told else None
        each["weights"] = weights.get(each["sample_id"])
        each["trained"] = None if gone and not known else bool(known and made)
    return rows


def policies(library: StoreReader, found: FoundTrace) -> Values:
    """Return the policy that sampled the trace and the one that training on it made; null where there is none."""
    made, key = found.lineage.updates, str(found.row["policy_key"])
    after = {"run": found.run, "version": policy_version(made), "key": made.key} if made else None
    return {
        "sampled": _sampler(library, found, key) if key else None,
        "made": after and after | {"address": addresses.step(found.run, made.step)} if made else None,
    }


def _sampler(library: StoreReader, found: FoundTrace, key: str) -> Values:
    work = library.graph.works.get(key)
    version = found.row["policy_version"]
    known = {"key": key, "version": version, "run": None, "address": None}
    if work is None:
        return known
    run = found.run if found.run in work.runs else work.runs[0]
    trained = policy_version(work)
    address = addresses.step(run, trained - 1) if trained else addresses.run(run)
    return known | {"run": run, "version": trained, "address": address}


def read_json(text: str | None) -> Any:
    """Return what a JSON text says; a text that is none comes back as it is, for somebody wrote it."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text

"""prove: checks what a store records against its own files: each assignment ended once, each sample trained once,
digests of rows, weights and optimizer, which policy sampled what, each reward measured or named as failed.

Steps are checked one after the other, so memory is that of the largest step. Results are `PROVEN`, `WRONG`, or
`UNPROVEN`, where the store lacks what a proof would need.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader
from storage.errors import PolicyAbsent, StoreError
from storage.maintenance.repair import inspect_tables
from storage.policies.manifest import BASE_FILE, check_files
from storage.read.lineage import Work, row_identities
from storage.schemas.stage_tables import TABLES
from tasks.arrays.columns import texts
from tasks.arrays.samples import COMPONENTS, OF_SAMPLES, weight_streams
from tasks.learner.digest import OPTIMIZER_PREFIX, over_base, weights_sha256
from tasks.metrics.accounting import COLUMNS, AccountBreach, account_step, check_assignments
from tasks.stages import ROLLOUT

PROVEN, WRONG, UNPROVEN = "proven", "wrong", "unproven"
UNREAD = "its rows were dropped, or cannot be read"
CHECKS = {
    "logs": "every slice that the ledger names is in the log of its table",
    "rows": "the rows of every slice have the digest of the ledger, and no row of a piece of work is there twice",
    "assignments": "every assignment ended in one episode, and every rollout was assigned",
    "training": "every kept sample with a weight was trained once, and no other",
    "weights": "the files and tensors of every policy have their digests, and its step trained the policy before it",
    "optimizer": "the files of every saved optimizer state have their digests",
    "policies": "every rollout names a policy of the store, in the version that the store made",
    "rewards": "every reward is a finite number, or its rollout names an error",
}
"""What each line of the page checks."""
TRACE_FACTS = ["trace_id", "environment", "agent", "trainable", "policy_key", "policy_version", "reward", "error_class"]
STEP_COLUMNS = {
    **{"assignments": ["assignment_id"], "intakes": ["assignment_ids"], "stale_groups": ["assignment_ids"]},
    **{"traces": COLUMNS, "verdicts": ["trace_id", "keep", "reason"], "batches": ["sample_ids"]},
    **{"samples": ["sample_id", "trace_id", *OF_SAMPLES], "token_statistics": ["sample_id"]},
}
"""The tables that account for a step, with the columns that are read of them."""


@dataclass(frozen=True)
class Result:
    """One result of a check, of one or more things of a kind."""

    check: str
    kind: str
    text: str = ""
    count: int = 1


Results = Iterator[Result]


def prove(reader: StoreReader, run: str = "") -> list[dict[str, Any]]:
    """Return a row for each check of a store, or of what a run uses: how many were proven, wrong and not proven.

    `first_wrong` names the first counter-example with its ids, `why_unproven` the first reason. Raises NotThere for an
    unknown run.
    """
    works = [*reader.frames(run).graph.works.values()]
    counts, first = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    for result in _results(reader, works, [run] if run else reader.store.runs.names()):
        counts[result.check, result.kind] += result.count
        if result.count:
            first.setdefault((result.check, result.kind), result.text)
    return [
        {
            "check": check,
            **{kind: counts[check, kind] for kind in (PROVEN, WRONG, UNPROVEN)},
            "first_wrong": first.get((check, WRONG), ""),
            "why_unproven": first.get((check, UNPROVEN), ""),
            "claim": claim,
        }
        for check, claim in CHECKS.items()
    ]


def _results(reader: StoreReader, works: Sequence[Work], runs: Sequence[str]) -> Results:
    lost = inspect_tables(reader.store)
    yield from (Result("logs", WRONG, f"table {damage.table}: {', '.join(damage.what)}") for damage in lost)
    yield Result("logs", PROVEN, count=len({table for work in works for table in work.tables}) - len(lost))
    for work in works:
        yield from _rows(reader, work)
        for check, table in ((_policy, "policies"), (_check_sampling, "traces")):
            if work.finished and table in work.tables:
                yield from check(reader, work)
        if "assignments" in work.tables and not reader.graph.users(work, "assignments", made="traces"):
            yield Result("assignments", UNPROVEN, f"{_place(work)}: assigned and not sampled")
    seen = set[tuple[str, ...]]()
    for run in runs:
        history = reader.history(run)
        for step in history.sampled_steps:
            identity = row_identities((*step.work.values(), *step.traces))
            if identity not in seen:  # else another run shares all of it
                seen.add(identity)
                yield from _step(reader, step, f"run {run}, step {step.step}")
        for scored in history.evaluations:
            sources = reader.graph.sources(scored, "assignments")
            yield from _check_assigned(reader, sources, [scored], f"run {run}, evaluation of policy {scored.step}")


def _read(reader: StoreReader, works: Sequence[Work | None], table: str, columns: list[str]) -> pa.Table | None:
    """Return rows of a table; None where no work made any or they cannot be read, which check `rows` names."""
    pieces = [piece for work in works if work for piece in work.slices_of(table)]
    try:
        return reader.store.read(pieces, columns) if pieces else None
    except StoreError:
        return None


def _place(work: Work) -> str:
    return f"run {work.computed_by}, step {work.step}, stage {work.stage}, key {work.key[:12]}"


def _rows(reader: StoreReader, work: Work) -> Results:
    for table in sorted(work.tables):
        names, where = [], f"{_place(work)}, table {table}"
        pieces = work.slices_of(table)
        live = {*reader.store.slices.expired_slices.exclude(pieces)}
        for piece in pieces:
            if piece not in live:
                yield Result("rows", UNPROVEN, f"{where}: rows were dropped for their age")
                continue
            try:
                names.append(reader.store.read([piece]).select(TABLES[table].row_id))
                yield Result("rows", PROVEN)
            except StoreError as error:
                yield Result("rows", WRONG, f"{where}: {error.what}")
        ids = pa.concat_tables(names) if names else pa.table({})
        if names and ids.group_by(ids.column_names).aggregate([]).num_rows < ids.num_rows:
            yield Result("rows", WRONG, f"{where}: rows with the same {', '.join(ids.column_names)}")


def _policy(reader: StoreReader, work: Work) -> Results:
    rows = _read(reader, [work], "policies", ["weights_sha256", "has_optimizer"])
    if rows is None:
        yield Result("weights", UNPROVEN, f"{_place(work)}: {UNREAD}")
    for row in rows.to_pylist() if rows else ():
        checks = ["weights", *(["optimizer"] if row["has_optimizer"] else [])]
        policies = reader.store.policies
        try:
            directory, manifest = policies.directory(work.key, verify=False), policies.find(work.key)
        except StoreError as error:
            removed = isinstance(error, PolicyAbsent) and policies.removal_note(work.key)
            for check in checks:
                yield Result(check, UNPROVEN if removed else WRONG, f"{_place(work)}: {error.what}")
            continue
        for check in checks:
            files = [
                file
                for file in (manifest.files if manifest else ())
                if Path(file.path).name.startswith(OPTIMIZER_PREFIX) == (check == "optimizer")
            ]
            kind, why = (PROVEN, "") if files else (WRONG, "no file of it is there")
            try:
                check_files(directory, files)
                if files and check == "weights":
                    kind, why = _weights(reader, work, directory, row["weights_sha256"])
            except (StoreError, ValueError) as error:
                kind, why = WRONG, error.what if isinstance(error, StoreError) else str(error)
            yield Result(check, kind, f"{_place(work)}: {why}")


def _weights(reader: StoreReader, work: Work, directory: Path, recorded: str) -> tuple[str, str]:
    """Check the digests of a policy's tensors, and of the weights that its training began from; return kind and why."""
    made, base = weights_sha256(directory), directory / BASE_FILE
    if base.is_file():
        made = over_base(json.loads(base.read_text())["weights_sha256"], made)
    if made != recorded:
        return WRONG, f"its tensors have digest {made[:12]}, recorded is {recorded[:12]}"
    if "updates" not in work.tables:
        return PROVEN, ""
    updates = _read(reader, [work], "updates", ["policy_key_in", "weights_sha256_in", "weights_sha256"])
    before = _read(reader, [reader.graph.works.get(work.inputs.get("policy", ""))], "policies", ["weights_sha256"])
    if updates is None or before is None:
        return UNPROVEN, f"updates, or policy before: {UNREAD}"
    # One after the other: each update begins from the weights that the one before it made.
    chain = [texts(before["weights_sha256"])[0], *texts(updates["weights_sha256"])]
    begun = {*texts(updates["policy_key_in"])} == {work.inputs["policy"]}
    linked = begun and texts(updates["weights_sha256_in"]) == chain[:-1] and chain[-1] == recorded
    return (
        (PROVEN, "") if linked else (WRONG, "its updates do not lead from the weights of the policy before to its own")
    )


def _check_sampling(reader: StoreReader, work: Work) -> Results:
    traces = _read(reader, [work], "traces", TRACE_FACTS)
    if traces is None:
        yield from (Result(check, UNPROVEN, f"{_place(work)}: {UNREAD}") for check in ("policies", "rewards"))
    rows = traces.to_pylist() if traces else []
    scored = {(row["environment"], row["agent"]) for row in rows if row["reward"] is not None}
    for row in rows:
        where = f"{_place(work)}, trace {row['trace_id']}"
        if row["reward"] is not None:
            yield Result("rewards", PROVEN if math.isfinite(row["reward"]) else WRONG, f"{where}: {row['reward']}")
        elif row["error_class"]:
            yield Result("rewards", PROVEN)
        else:
            rewarded = (row["environment"], row["agent"]) in scored
            why = "no reward and no error" if rewarded else "its environment scored no rollout"
            yield Result("rewards", WRONG if rewarded else UNPROVEN, f"{where}: {why}")
        if row["policy_key"]:
            yield _sampler(reader, work, row, where)
        elif not row["error_class"]:
            yield Result("policies", UNPROVEN, f"{where}: no policy is named")


def _sampler(reader: StoreReader, work: Work, row: dict[str, Any], where: str) -> Result:
    key, maker = row["policy_key"], reader.graph.works.get(row["policy_key"])
    named = f"{where}: policy {key[:12]}, version {row['policy_version']}"
    if maker is None or "policies" not in maker.tables:
        return Result("policies", UNPROVEN, f"{named}: the store does not hold it")
    # Of a stream several policies sample, each of its own rollouts.
    other = work.stage == ROLLOUT and row["trainable"] and "stream" not in work.inputs
    if (
        (other and key != work.inputs.get("policy", key))
        or (maker.stage == "training" and row["policy_version"] != maker.step + 1)
        or (maker.stage == "policy_import" and row["trainable"] and row["policy_version"] != 0)
    ):
        return Result("policies", WRONG, f"{named}: the step was sampled by another policy or version")
    return Result("policies", PROVEN)


def _check_assigned(reader: StoreReader, sources: Sequence[Work], traces: Sequence[Work], where: str) -> Results:
    """Check the assignments of rollouts that were not packed."""
    assigned, rows = (
        _read(reader, works, table, STEP_COLUMNS[table])
        for works, table in ((sources, "assignments"), (traces, "traces"))
    )
    if assigned is None or rows is None or not all(work.finished for work in traces):
        yield Result("assignments", UNPROVEN, f"{where}: not all have ended", assigned.num_rows if assigned else 1)
        return
    try:
        check_assignments(texts(assigned["assignment_id"]), rows.to_pylist())
        yield Result("assignments", PROVEN, count=assigned.num_rows)
    except AccountBreach as error:
        yield Result("assignments", WRONG, f"{where}: table {error.table}: {error.what}")


def _step(reader: StoreReader, step: RecordedStep, where: str) -> Results:
    assigned, rolled = [*step.of("assignment").values()], [*step.of(ROLLOUT).values()]
    makers: dict[str, Sequence[Work | None]] = {
        **{"assignments": assigned, "intakes": rolled, "stale_groups": rolled, "traces": step.traces},
        **{"verdicts": [step.work.get("filtering")], "samples": [step.work.get("advantage")]},
        **{"batches": [step.batches], "token_statistics": [step.updates]},
    }
    read = {name: _read(reader, works, name, STEP_COLUMNS[name]) for name, works in makers.items()}
    tables = {name: rows for name, rows in read.items() if rows is not None}
    if step.batches is None:
        open_checks = ["training", *(["assignments"] if "intakes" in tables else [])] if not step.finished else []
        yield from (Result(check, UNPROVEN, f"{where}: not packed") for check in open_checks)
        if "intakes" not in tables:
            yield from _check_assigned(reader, assigned, step.traces, where)
        return
    try:
        account_step(tables)
    except KeyError as error:
        for check in ("assignments", "training"):
            yield Result(check, UNPROVEN, f"{where}: rows of table {error} are not there, or cannot be read")
    except AccountBreach as error:
        check = "assignments" if error.table in ("assignments", "traces") else "training"
        yield Result(check, WRONG, f"{where}: table {error.table}: {error.what}")
    else:
        imported = [work for work in step.traces if work.stage == "import"]
        ended = len({*texts(tables["traces"]["assignment_id"])})
        why = f"{where}: rollouts and assignments came from the same file"
        yield Result("assignments", UNPROVEN if imported else PROVEN, why, ended)
        yield from _check_training(step, tables, where)


def _check_training(step: RecordedStep, tables: dict[str, pa.Table], where: str) -> Results:
    packed = {str(name) for name in pc.list_flatten(tables["batches"]["sample_ids"]).to_pylist()}
    samples, section = tables["samples"], step.batches.entry.section if step.batches else {}
    borders, streams = weight_streams(samples, bool(section.get("packing", {}).get("zero_advantages")))
    weights = [streams[f"{component}_weights"] for component in COMPONENTS]
    for number, sample in enumerate(texts(samples["sample_id"])):
        own = slice(*borders[number : number + 2])
        if sample not in packed and any(weight[own].any() for weight in weights):
            yield Result("training", WRONG, f"{where}: sample {sample} has a weight and is in no batch")
    if step.updates is None:
        yield Result("training", UNPROVEN, f"{where}: packed and not trained on", len(packed))
    elif "token_statistics" not in tables:
        yield Result("training", UNPROVEN, f"{where}: the learner recorded no statistics of samples", len(packed))
    else:
        measured = Counter(texts(tables["token_statistics"]["sample_id"]))
        for sample in sorted(packed | measured.keys()):
            times = measured[sample] if sample in packed else 0
            text = (
                f"{where}: sample {sample} was packed {int(sample in packed)} times, trained {measured[sample]} times"
            )
            yield Result("training", PROVEN if times == 1 else WRONG, text)

"""Filtering: what is wrong with a trace, and whether it is kept for training.

Reads traces, messages; writes verdicts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa

from configs.filters import CustomFilter, ErroredFilter, filter_name
from configs.run import View
from storage.schemas.stage_tables import VERDICTS
from tasks.arrays.columns import texts, with_column
from tasks.arrays.finding import NO_TURNS, QUARANTINED, UNTRAINABLE, FilterInput, Finding, Flags, hits_from
from tasks.arrays.group_parts import group_parts
from tasks.arrays.message_graph import owners
from tasks.arrays.seats import JUDGE, OTHER_SEAT, seat_rules
from tasks.filtering.filters import FILTERS
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Stage, Tables
from tasks.runtime.stored_rows import StoredRows


@dataclass(frozen=True)
class FilteringInputs:
    """The rollouts of a step."""

    traces: StoredRows
    messages: StoredRows
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Reason by trace id of the traces that were found to be unfit after they were recorded."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        return cls(attempt.rows("traces"), attempt.rows("messages"), attempt.parameters or {})


def filtering(inputs: FilteringInputs, config: View) -> Tables:
    """Return one verdict per trace. Messages are read a part after the other, each with whole groups.

    Quarantined traces are excluded before anything else, so that no group, and no baseline, sees them. Every filter
    records what it finds; only an enforcing one excludes, and the first of those in config order is the reason.
    Filters of groups run last, on the traces that no other filter excluded, so that they judge the members of a
    baseline. Errored traces are excluded even if the config lists no such filter. A trace without tokens of the policy
    is excluded as untrainable, whatever else a filter found: another model's, or one of a seat that was never asked,
    which has a reward all the same. Excluded seats (`tasks.arrays.seats`) are a reason of their own. Raises
    LearnerSeatMissing if a trace has to name the learning seat and does not.
    """
    traces, messages = inputs.traces.table(), inputs.messages
    # What a user's filter compares nobody knows, unless it is said.
    alone = any(isinstance(each, CustomFilter) and not each.in_parts for each in config.filtering.filters)
    parts = [(traces, messages.table())] if alone else group_parts(traces, messages)
    return {"verdicts": pa.concat_tables([_judge(*part, config, inputs.quarantined) for part in parts])}


def _judge(traces: pa.Table, messages: pa.Table, config: View, quarantined: Mapping[str, str]) -> pa.Table:
    filters = config.filtering.filters
    if not any(settings.type == "errored" for settings in filters):
        filters = (ErroredFilter(), *filters)
    silent = _without_turns(traces)
    trainable = traces["trainable"].to_numpy().astype(np.bool_) & ~silent.hits
    names = enumerate(texts(traces["trace_id"]))
    said = {row: {"reason": quarantined[name]} for row, name in names if name in quarantined}
    unfit = hits_from(said, traces.num_rows)
    seats = seat_rules(traces, config.seat_rules)
    # Filters see the traces of seats that are left out as no more trainable than those of others.
    trained = pa.array(trainable & ~seats.dropped)
    seated = with_column(traces, "trainable", trained)
    owner = owners(messages, traces, "messages")
    eligible = trainable & ~unfit.hits & ~seats.dropped
    findings: dict[int, Finding] = {}
    # Twice: filters of groups judge what those of single traces left.
    for of_groups in (False, True):
        standing = eligible & ~_excluded_traces(filters, findings, traces.num_rows)
        vocab_size, learns, episodic = config.model.vocab_size, config.learns_from_equals, config.episode_agents
        material = FilterInput(seated, messages, owner, vocab_size, standing, learns, episodic)
        for place, settings in enumerate(filters):
            if _looks_last(settings) == of_groups:
                findings[place] = FILTERS[settings.type].detect(material, settings)
    found = [(QUARANTINED, True, unfit), (JUDGE, True, seats.judge), (OTHER_SEAT, True, seats.other)]
    found += [(NO_TURNS, True, silent)]
    found += [(filter_name(settings), settings.enforce, findings[place]) for place, settings in enumerate(filters)]
    return _verdicts(traces, found, trainable)


def _without_turns(traces: pa.Table) -> Finding:
    """Hit the faultless traces in which the policy was never asked: their seats had nothing to do in their episodes."""
    faultless = traces["trainable"].to_numpy().astype(np.bool_) & traces["error_class"].is_null().to_numpy()
    rows = np.flatnonzero(faultless & (traces["num_turns"].to_numpy() == 0))
    return hits_from({int(row): {"num_turns": 0} for row in rows}, traces.num_rows)


def _looks_last(settings: Any) -> bool:
    """Tell whether a filter compares the members of a group; a custom one says so itself."""
    return settings.of_groups if isinstance(settings, CustomFilter) else FILTERS[settings.type].of_groups


def _excluded_traces(filters: Sequence[Any], findings: Mapping[int, Finding], num_traces: int) -> Flags:
    """Return the traces that an enforcing filter has found something on so far."""
    enforced = [finding.hits for place, finding in findings.items() if filters[place].enforce]
    excluded: Flags = np.any([np.zeros(num_traces, np.bool_), *enforced], axis=0)
    return excluded


def _verdicts(traces: pa.Table, findings: Sequence[tuple[str, bool, Finding]], trainable: Flags) -> pa.Table:
    """Return the rows for findings by name, each with whether it excludes, in the order in which they give reasons."""
    detected: list[list[str]] = []
    reasons: list[str | None] = []
    evidence: list[str] = []
    for row in range(traces.num_rows):
        found = [(name, enforce, finding) for name, enforce, finding in findings if finding.hits[row]]
        enforced = [name for name, enforce, _ in found if enforce]
        # Who was never to be trained is not excluded for a finding; a quarantine is said of every trace alike.
        if not trainable[row] and QUARANTINED not in enforced:
            enforced = [UNTRAINABLE]
        detected.append([name for name, _, _ in found])
        reasons.append(next(iter(enforced), None))
        evidence.append(json.dumps({name: finding.evidence[row] for name, _, finding in found}))
    columns = {
        "trace_id": traces["trace_id"],
        "group_id": traces["group_id"],
        "keep": [reason is None for reason in reasons],
        "reason": reasons,
        "detected": detected,
        "evidence": evidence,
    }
    return pa.table(columns, schema=VERDICTS.arrow)


STAGE = Stage(
    name="filtering",
    version=3,
    reads=("traces", "messages"),
    writes=("verdicts",),
    sections=("filtering", "model", "learns_from_equals", "episode_agents", "seat_rules"),
    read_inputs=FilteringInputs.read,
    function=filtering,
)
task = as_task(STAGE)

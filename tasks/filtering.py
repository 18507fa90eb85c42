"""Filtering: what is wrong with a trace, and whether it is kept for training.

Reads traces, messages; writes verdicts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from configs.run import View
from configs.sections import ErroredFilter
from storage.schemas import VERDICTS
from tasks.branches import owners
from tasks.filters import FILTERS, Finding, Material
from tasks.filters.finding import Flags
from tasks.stage import Stage, Tables, as_task

UNTRAINABLE = "untrainable"


def filtering(tables: Tables, config: View) -> Tables:
    """Return one verdict per trace.

    Every filter records what it finds; only an enforcing one excludes, and the first of those in config order is the
    reason. Filters of groups look last, at what the others left standing, so that they judge the members that a
    baseline will be made of. Errored traces are excluded even if the config lists no such filter. A trace whose tokens
    are not the policy's is excluded as untrainable, whatever else was found.
    """
    traces, messages = tables["traces"], tables["messages"]
    filters = _with_errored(config.filtering.filters)
    trainable = traces["trainable"].to_numpy().astype(np.bool_)
    findings: dict[int, Finding] = {}
    standing = trainable
    for of_groups in (False, True):
        material = Material(traces, messages, owners(messages, traces, "messages"), config.model.vocab_size, standing)
        for place, settings in enumerate(filters):
            if FILTERS[settings.type].of_groups == of_groups:
                findings[place] = FILTERS[settings.type].detect(material, settings)
        standing = trainable & ~_excluded(filters, findings, traces.num_rows)
    return {"verdicts": _verdicts(traces, filters, [findings[place] for place in range(len(filters))], trainable)}


def _with_errored(filters: Sequence[Any]) -> Sequence[Any]:
    listed = any(settings.type == "errored" for settings in filters)
    return filters if listed else (ErroredFilter(), *filters)


def _excluded(filters: Sequence[Any], findings: Mapping[int, Finding], num_traces: int) -> Flags:
    """Return the traces that an enforcing filter has found something on so far."""
    enforced = [finding.hits for place, finding in findings.items() if filters[place].enforce]
    excluded: Flags = np.any([np.zeros(num_traces, np.bool_), *enforced], axis=0)
    return excluded


def _verdicts(traces: pa.Table, filters: Sequence[Any], findings: Sequence[Finding], trainable: Flags) -> pa.Table:
    detected: list[list[str]] = []
    reasons: list[str | None] = []
    evidence: list[str] = []
    for row in range(traces.num_rows):
        found = [(settings, finding) for settings, finding in zip(filters, findings, strict=True) if finding.hits[row]]
        enforced = [settings.type for settings, _ in found if settings.enforce]
        detected.append([settings.type for settings, _ in found])
        reasons.append(UNTRAINABLE if not trainable[row] else next(iter(enforced), None))
        evidence.append(json.dumps({settings.type: finding.evidence[row] for settings, finding in found}))
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
    version=1,
    reads=("traces", "messages"),
    writes=("verdicts",),
    sections=("filtering", "model"),
    function=filtering,
)
task = as_task(STAGE)

"""A step or an evaluation: figures, what was said, groups, and traces as a list to filter and sort."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from flows.queries.reader import read_rollouts
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import DERIVED, choice_of, choose
from flows.queries.rollouts import (
    evaluation_lineages,
    evaluation_traces,
    lineages_of,
    steps_of,
    traces_of,
)
from flows.queries.row_lineage import policy_version
from flows.queries.run_state import any_going
from flows.queries.scores import scored_evaluations
from flows.queries.step import figures, groups, updates
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader, expired_rows
from flows.viewer import addresses
from flows.viewer.addresses import Page

CARRIED = ("sort", "order", "size", "k")
"""What stays in the address on the way to the step before or after."""
MAX_GROUPS = 200
"""Groups that are listed; view `groups` has all."""
MAX_MEMBERS = 64
"""Rollouts of a group whose rewards stand in its row; the list has all."""


def step_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return a step. Raises NotThere, and BadQuestion where the request names what is not known."""
    run, step = request.path["run"], request.required_number("step")
    lineages = lineages_of(reader, run, step)
    frame = traces_of(reader, run, lineages, DERIVED.intersection([request.text("sort")]))
    values = {
        "run": run,
        "step": step,
        "evaluation": None,
        "retired": expired_rows(reader, [work for lineage in lineages for work in lineage.works]),
        **_step_values(reader, run, lineages),
        **list_values(reader, run, frame, request),
        **neighbours(steps_of(reader, run), step),
        "carried": {name: request.query[name] for name in CARRIED if request.query.get(name)},
    }
    return Page("step.html", f"Step {step}", values, ((run, addresses.run(run)),), any_going(reader, run))


def list_values(reader: StoreReader, run: str, frame: pl.DataFrame, request: PageRequest) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, come to: figures, groups, the list, and what was said."""
    rows, listed = choose(frame, choice_of(request))
    by, told = ["group_id", "agent"], pl.struct("trace_id", "key", "reward", "outcome")
    members = frame.group_by(by).agg(rollouts=told.head(MAX_MEMBERS))
    return {
        "figures": figures(frame),
        "groups": groups(frame).head(MAX_GROUPS).join(members, on=by, how="left", maintain_order="left").to_dicts(),
        "traces": listed,
        "read": read_rollouts(reader, run, rows, request),
        "policies": sorted(frame["policy_version"].unique()),
    }


def _step_values(reader: StoreReader, run: str, lineages: Sequence[StepLineage]) -> dict[str, Any]:
    judged = {lineage.verdicts.key for lineage in lineages if lineage.verdicts}
    trained = [lineage.updates for lineage in lineages if lineage.updates]
    return {
        "computed_by": sorted({lineage.traces.computed_by for lineage in lineages} - {run}),
        "finished": all(lineage.traces.finished for lineage in lineages),
        "num_batches": len(lineages),
        "num_judged_apart": len(judged),
        "packed": any(lineage.batches for lineage in lineages),
        "updates": updates(reader, run, trained),
        "new_policy": policy_version(trained[0]) if trained else None,
    }


def neighbours(places: Sequence[int], place: int) -> dict[str, int | None]:
    """Return the places before and after one; None at the ends."""
    return {
        "previous": max((each for each in places if each < place), default=None),
        "next": min((each for each in places if each > place), default=None),
    }


ALL = "all"
"""The value of `set` that asks for every set at once."""


def evaluation_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return an evaluation of a policy; `set` chooses one set. Raises NotThere and BadQuestion."""
    run, version = request.path["run"], request.required_number("step")
    lineages, frame = evaluation_lineages(reader, run, version), evaluation_traces(reader, run, version)
    sets = sorted(frame["set"].unique())
    chosen = _chosen_set(request, sets)
    frame = frame if chosen is None else frame.filter(set=chosen)
    values = {
        "run": run,
        "step": version,
        "retired": expired_rows(reader, [lineage.traces for lineage in lineages]),
        "evaluation": {
            "set": chosen,
            "sets": sets,
            "scores": _scores(reader, run, version, chosen),
            "num_replaced": frame["replaced"].sum(),
        },
        **_step_values(reader, run, lineages),
        **list_values(reader, run, frame, request),
        **neighbours(steps_of(reader, run, for_training=False), version),
        "carried": {name: request.query[name] for name in (*CARRIED, "set") if request.query.get(name)},
    }
    return Page(
        "step.html", f"Evaluation of policy {version}", values, ((run, addresses.run(run)),), any_going(reader, run)
    )


def _chosen_set(request: PageRequest, sets: list[str]) -> str | None:
    """Return the set that the request names; None for all."""
    given = request.text("set")
    if not given or given == ALL:
        return None
    if given not in sets:
        raise BadQuestion(f"set={given!r} is not known; there are {', '.join(each for each in sets if each) or 'none'}")
    return given


def _scores(reader: StoreReader, run: str, version: int, set_name: str | None) -> list[dict[str, Any]]:
    """Return the scores of the sets, as `stagecoach evals` has them; those that are still going on have none."""
    found = [scores.described for _, scores in scored_evaluations(reader, run, version)]
    wanted = [each for each in found if set_name in (None, each["set"])]
    return [{"set": each["set"], **score} for each in wanted for score in each["scores"]]

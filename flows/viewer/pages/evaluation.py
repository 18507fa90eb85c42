"""An evaluation: what a policy scored on held-out examples, with the same groups and list of traces as a step."""

from typing import Any

from flows.runtime.scores import recorded_evaluations
from flows.viewer.data import step_figures, step_traces
from flows.viewer.data.retired import retired
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, Page
from flows.viewer.pages.step import CARRIED, crumbs, is_going, neighbours, told
from storage.read.lineage import marks

ALL = "all"
"""The value of `set` that asks for every set at once."""


def page(library: Library, asked: Asked) -> Page:
    """Return an evaluation of a policy; `set` chooses one set. Raises NotThere and BadQuestion."""
    run, version = asked.path["run"], asked.place("step")
    every = step_traces.evaluation_traces(library, run, version)
    sets = sorted(every["set"].unique())
    chosen = _chosen(asked, sets)
    frame = every if chosen is None else step_traces.evaluation_traces(library, run, version, chosen)
    values = {
        "run": run,
        "step": version,
        "retired": retired(library, [c.traces for c in step_traces.evaluation_chains(library, run, version)]),
        "evaluation": {
            "set": chosen,
            "sets": sets,
            "scores": _scores(library, run, version, chosen),
            "num_replaced": frame["replaced"].sum(),
        },
        "stages": ["rollout"],
        "computed_by": [],
        "finished": all(chain.traces.finished for chain in step_traces.evaluation_chains(library, run, version)),
        "num_batches": 1,
        "num_judged_apart": 0,
        "packed": False,
        "updates": [],
        "policies": step_figures.policies(library, run, frame, ()),
        **told(library, run, frame, asked),
        **neighbours(step_traces.steps_of(library, run, for_training=False), version),
        "compared": None,
        "carried": {name: asked.query[name] for name in (*CARRIED, "set") if asked.query.get(name)},
    }
    return Page("step.html", f"Evaluation of policy {version}", values, crumbs(run), is_going(library, run))


def _chosen(asked: Asked, sets: list[str]) -> str | None:
    """Return the set that is asked for; None for all."""
    given = asked.text("set")
    if not given or given == ALL:
        return None
    if given not in sets:
        raise BadQuestion(f"set={given!r} is not known; there are {', '.join(each for each in sets if each) or 'none'}")
    return given


def _scores(library: Library, run: str, version: int, set_name: str | None) -> list[dict[str, Any]]:
    """Return the scores of the sets, as `stagecoach evals` has them; those that are still going on have none."""
    config = library.config(run)
    found = [each for each in recorded_evaluations(library.store, run, config) if each.version == version]
    wanted = [each for each in found if set_name in (None, each.set_name)]
    # The config, which may be another after a resume, says which seats are scored.
    rounds = tuple((each.set_name, marks(each.rounds)) for each in wanted)
    name = ("scores", run, len(library.store.runs.events(run)), rounds)
    scored = library.kept(name, lambda: [each.scored(library.store, config).described for each in wanted])
    return [{"set": each["set"], **score} for each in scored for score in each["scores"]]

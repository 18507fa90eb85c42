"""Two runs compared, told: what a replay was asked to do again, whether both are the same work, where they part."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.replay import redone
from configs.run import RunConfig
from flows.viewer.library import Library
from flows.views.diff_sheets import sentences
from flows.views.differences import DIFFERENT, ONLY_A, ONLY_B, SAME, STAGES, parting

Piece = Mapping[str, Any]


def told(found: Mapping[str, Any]) -> list[str]:
    """Return whether two runs are the same work and from where not, a sentence or two.

    Weights that only one brought in part nothing: a replay begins with those of the run that it goes through again.
    """
    if found["runs"][0]["run"] == found["runs"][1]["run"]:
        return ["This is the same run on both sides."]
    pieces = without_lone_import(found["pieces"])
    where = parting(pieces)
    shared = sum(piece["state"] == SAME for piece in pieces)
    if not shared:
        return ["They have nothing in common: no piece of work has the same key in both."]
    if where is None and not found["together"]["steps"]:
        return [f"No step is in both. Pieces of work with the same keys: {shared}."]
    same = all(piece["state"] == SAME for piece in pieces if piece["stage"] != "gate")
    # Examples belong to the run; a step that is there for their sake alone is no step that both have.
    alone = {step: each["only"] for step, each in by_step(pieces).items()}
    steps = [{**each, "only": alone.get(each["step"])} for each in found["steps"]]
    return sentences({**found, "pieces": pieces, "parting": where, "same_work": same, "steps": steps})[1:]


def parts_at(found: Mapping[str, Any]) -> int | None:
    """Return the first step of both that is not the same work; None where there is none."""
    where = parting(without_lone_import(found["pieces"]))
    return None if where is None else int(where["step"])


def without_lone_import(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of work without weights that only one of the runs brought in."""
    return [piece for piece in pieces if piece["stage"] != "policy_import" or (piece["a"] and piece["b"])]


def step_of(pieces: Iterable[Piece], step: int) -> dict[str, Any]:
    """Return how the work of one step compares; see `by_step`."""
    none: dict[str, Any] = {"pieces": [], "only": None, "first_difference": None}
    return by_step(each for each in pieces if each["step"] == step).get(step, none)


def by_step(pieces: Iterable[Piece]) -> dict[int, dict[str, Any]]:
    """Return by step its `pieces`, `only` (the side that alone has it) and the stage where it parts first.

    What came in before the first step, and evaluations, are of no step.
    """
    own: dict[int, list[Piece]] = {}
    for each in without_lone_import(list(pieces)):
        if each["stage"] not in ("examples", "evaluation"):
            own.setdefault(each["step"], []).append(each)
    return {step: {"pieces": found, **_apart(found)} for step, found in own.items()}


def _apart(own: Sequence[Piece]) -> dict[str, Any]:
    counting = [each for each in own if each["stage"] != "gate"]
    only = next((s for s in (ONLY_A, ONLY_B) if counting and all(each["state"] == s for each in counting)), None)
    first = next((each["stage"] for each in counting if each["state"] != SAME), None)
    return {"only": only, "first_difference": first}


def replays(library: Library, a: str, b: str, changed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each of the runs that is a replay, what it went through again; `changed` are settings that differ."""
    found = []
    for side, run, other in (("a", a, b), ("b", b, a)):
        config = library.config(run)
        if config.kind == "replay" and config.replay.run:
            beside = config.replay.run == other
            own = [each for each in changed if each["in_keys"]] if beside else []
            found.append({"side": side, "run": run, "beside_source": beside, **_replay(config), "changed": own})
    return found


def _replay(config: RunConfig) -> dict[str, Any]:
    asked = config.replay
    last = None if asked.last_step is None else asked.last_step - 1
    return {
        "of": asked.run,
        "from_stage": asked.from_stage,
        "until": asked.until,
        "stages": list(redone(asked)),
        "first_step": asked.first_step,
        "last_step": last,
        "policies": asked.policies if "training" in redone(asked) else None,
        "regraded": asked.regrade,
    }


def picture(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the ledger of both runs as rows of cells: `steps` across, `stages` down, None where neither has work.

    Work of evaluations stands in the column of the version that it scored.
    """
    steps = sorted({each["step"] for each in pieces})
    stages = list(dict.fromkeys(each["stage"] for each in sorted(pieces, key=_place)))
    states = {(each["stage"], each["step"]): each["state"] for each in pieces}
    rows = [{"stage": stage, "states": [states.get((stage, step)) for step in steps]} for stage in stages]
    counts = Counter(each["state"] for each in pieces)
    return {"steps": steps, "rows": rows, "counts": {s: counts[s] for s in (SAME, DIFFERENT, ONLY_A, ONLY_B)}}


def _place(piece: Piece) -> int:
    return STAGES.index(piece["stage"])

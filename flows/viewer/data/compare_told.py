"""Two runs compared, told: what a replay was asked to do again, whether both are the same work, where they part."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.replay import redone
from configs.run import RunConfig
from flows.viewer.library import Library
from flows.views.diff_sheets import sentences
from flows.views.differences import DIFFERENT, ONLY_A, ONLY_B, SAME, STAGES, by_step

Piece = Mapping[str, Any]


def told(found: Mapping[str, Any]) -> list[str]:
    """Return whether two runs are the same work and from where not, a sentence or two."""
    if found["runs"][0]["run"] == found["runs"][1]["run"]:
        return ["This is the same run on both sides."]
    shared = sum(piece["state"] == SAME for piece in found["pieces"])
    if not shared:
        return ["They have nothing in common: no piece of work has the same key in both."]
    if found["parting"] is None and not found["together"]["steps"]:
        return [f"No step is in both. Pieces of work with the same keys: {shared}."]
    return sentences(found)[1:]


def step_of(pieces: Iterable[Piece], step: int) -> dict[str, Any]:
    """Return how the work of one step compares; see `flows.views.differences.by_step`."""
    none: dict[str, Any] = {"pieces": [], "only": None, "first_difference": None}
    return by_step(each for each in pieces if each["step"] == step).get(step, none)


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

"""Tells how two runs differ in sentences and small tables of text, for a terminal, a page or Prefect."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from configs.errors import differing_parts
from configs.replay import replayed_stages
from configs.run import RunConfig
from flows.queries.compare import DIFFERENT, ONLY_A, ONLY_B, SAME, by_step
from flows.queries.compare_rows import MEASURES
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import compact_number
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED

LONGEST_VALUE = 60
SHOWN_IDS = 5
STEP_FIGURES = ("reward_mean", "num_kept", "fill", "loss", "grad_norm", "mismatch_kl", "masked_fraction")
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Sheet:
    """One table of text."""

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sentences(found: Found) -> list[str]:
    """Return what a person wants to know first: who, whether they are the same work, and from where not."""
    one, other = found["runs"]
    who = [f"{each['run']} ({each['kind']}, {each['state']}, steps: {each['num_steps']})" for each in (one, other)]
    return [f"a: {who[0]}   b: {who[1]}", *_work(found), *_apart(found)]


def sheets(found: Found) -> list[Sheet]:
    """Return the tables, those without a row left out, except the steps. A step of one run is not listed."""
    made = [_config(found), _stages(found), _figures(found), _evaluations(found), _steps(found)]
    made += _detail_sheets(found["detail"]) if "detail" in found else []
    return [sheet for sheet in made if sheet.rows or sheet.name == "steps"]


def both_numbers(a: float | None, b: float | None) -> str:
    """Return one number where both are the same, else both with as many digits as tell them apart."""
    if a == b:
        return compact_number(a)
    texts = [compact_number(each) for each in (a, b)]
    if texts[0] == texts[1]:
        # Two numbers that differ must not look alike.
        texts = [f"{each:.8g}" for each in (a, b)]
    return " → ".join(texts)


def _work(found: Found) -> list[str]:
    counts = Counter(piece["state"] for piece in found["pieces"] if piece["stage"] != "gate")
    parting = found["parting"]
    if found["same_work"]:
        return [f"The same work: all {counts[SAME]} results have the same keys, so their rows are equal."]
    if parting is None:
        return [f"The same work as far as both go: {counts[SAME]} results have the same keys.", *_only(found)]
    how = {DIFFERENT: "another key", ONLY_A: "only a has it", ONLY_B: "only b has it"}[parting["state"]]
    difference = (
        f"They differ from step {parting['step']}, stage {parting['stage']} on: {how}. Shared results: {counts[SAME]}."
    )
    return [difference, *_intakes(found["intakes"]), *_only(found)]


def _intakes(found: Found | None) -> list[str]:
    """Say from which step on two runs took other groups from their streams of rollouts."""
    if found is None:
        return []
    if found["step"] is None:
        return ["Their intakes are the same: each step took the same groups, of policies of the same versions."]
    own = [f"{run} alone took {', '.join(found[f'only_{run}'][:SHOWN_IDS]) or 'none'}" for run in "ab"]
    more = sum(max(0, len(found[f"only_{run}"]) - SHOWN_IDS) for run in "ab")
    left = f" and {more} more" if more else ""
    return [
        f"Their intakes differ from step {found['step']} on: of that step's groups {'; '.join(own)}{left}, and "
        f"{found['num_shared']} are the same. Which groups end first depends on time."
    ]


def _only(found: Found) -> list[str]:
    own = {state: [step["step"] for step in found["steps"] if step["only"] == state] for state in (ONLY_A, ONLY_B)}
    return [f"{state.capitalize()}: step {ranges(steps)}." for state, steps in own.items() if steps]


def _apart(found: Found) -> list[str]:
    between = found["together"]["between"]
    lines = []
    for run in "ab":
        if kept := between[f"kept_only_{run}"]:
            more = f" and {len(kept) - SHOWN_IDS} more" if len(kept) > SHOWN_IDS else ""
            lines.append(f"Kept in {run} only: {len(kept)} shared traces: {', '.join(kept[:SHOWN_IDS])}{more}.")
    if between["weights_equal"] is not None:
        part = found["weights_part_at"]
        lines.append("The weights are equal." if part is None else f"The weights part at step {part}.")
    return lines


def _config(found: Found) -> Sheet:
    rows = tuple(
        (each["key"], *map(_brief, _telling(each)), "yes" if each["in_keys"] else "no")
        for each in sorted(found["config"], key=lambda each: not each["in_keys"])
    )
    return Sheet("config", "settings that differ", ("setting", "a", "b", "can change rows"), rows)


def _stages(found: Found) -> Sheet:
    counts = {stage: Counter(p["state"] for p in found["pieces"] if p["stage"] == stage) for stage in COMPARED}
    states = (SAME, DIFFERENT, ONLY_A, ONLY_B)
    rows = tuple((stage, *(str(count[state]) for state in states)) for stage, count in counts.items() if count)
    return Sheet("stages", "results", ("stage", *states), rows)


def _figures(found: Found) -> Sheet:
    a, b, between = (found["together"][name] for name in ("a", "b", "between"))
    rows: list[tuple[str, ...]] = [
        (name, compact_number(a.get(name)), compact_number(b.get(name)), _change(a.get(name), b.get(name)))
        for name in (*MEANINGS, *MEASURES)
        if name in a or name in b
    ]
    reasons = [one.get("reasons", {}) for one in (a, b)]
    for reason in sorted({*reasons[0], *reasons[1]}):
        counts = [one.get(reason, 0) for one in reasons]
        rows.append((f"left out: {reason}", *map(str, counts), _change(*counts)))
    shared = [(name, "", "", compact_number(value)) for name, value in between.items() if _is_number(value)]
    steps = ranges(found["together"]["steps"])
    headings = ("figure", "a", "b", "b - a")
    return Sheet("figures", f"over the steps that both have ({steps or 'none'})", headings, (*rows, *shared))


def _evaluations(found: Found) -> Sheet:
    rows = tuple(
        (str(each["version"]), compact_number(each["a"]), compact_number(each["b"])) for each in found["evaluations"]
    )
    return Sheet("evaluations", "mean reward on held-out examples", ("policy version", "a", "b"), rows)


def _steps(found: Found) -> Sheet:
    headings = (
        "step",
        "first difference",
        *(name.replace("_", " ") for name in STEP_FIGURES),
        "max adv diff",
        "weights",
    )
    rows = tuple(_step_cells(step) for step in found["steps"] if step["only"] is None)
    return Sheet("steps", "step by step, where both have it", headings, rows)


def _step_cells(step: Found) -> tuple[str, ...]:
    between = step["between"]
    figures = (both_numbers(step["a"].get(name), step["b"].get(name)) for name in STEP_FIGURES)
    weights = {None: "-", True: "equal", False: "differ"}[between["weights_equal"]]
    farthest = compact_number(between["max_advantage_difference"])
    return str(step["step"]), step["first_difference"] or "none", *figures, farthest, weights


def _detail_sheets(detail: Found) -> list[Sheet]:
    titles = {
        "verdicts": "shared traces with another verdict",
        "samples": "shared samples whose advantages differ most",
        "groups": "shared groups that differ most",
    }
    return [_sheet_of(name, title, detail[name]) for name, title in titles.items()]


def _sheet_of(name: str, title: str, rows: Sequence[Found]) -> Sheet:
    headings = tuple(rows[0]) if rows else ()
    cells = tuple(
        tuple(each if isinstance(each, str) else compact_number(each) for each in row.values()) for row in rows
    )
    return Sheet(name, title, tuple(heading.replace("_", " ") for heading in headings), cells)


def ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers in few characters, such as 0-4, 7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(steps), lambda each: each[1] - each[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _change(a: float | None, b: float | None) -> str:
    if a is None or b is None or a == b:
        return "-" if a is None or b is None else "0"
    return f"{b - a:+,}" if isinstance(a, int) and isinstance(b, int) else f"{b - a:+.3g}"


def _telling(setting: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what differs of a setting: of versions with several parts, those that are not the same."""
    a, b = setting["a"], setting["b"]
    return differing_parts(a, b) if setting["key"].endswith(".version") and a and b else (a, b)


def _brief(value: Any) -> str:
    text = "-" if value is None else str(value) or "''"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Piece = Mapping[str, Any]


def summary_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return whether two runs are the same work and from where not, a sentence or two."""
    if found["runs"][0]["run"] == found["runs"][1]["run"]:
        return ["This is the same run on both sides."]
    shared = sum(piece["state"] == SAME for piece in found["pieces"])
    if not shared:
        return ["They have nothing in common: no result has the same key in both."]
    if found["parting"] is None and not found["together"]["steps"]:
        return [f"No step is in both. Results with the same keys: {shared}."]
    return sentences(found)[1:]


def step_of(pieces: Iterable[Piece], step: int) -> dict[str, Any]:
    """Return how the work of one step compares; see `flows.queries.compare.by_step`."""
    none: dict[str, Any] = {"pieces": [], "only": None, "first_difference": None}
    return by_step(each for each in pieces if each["step"] == step).get(step, none)


def replayed_settings(
    library: StoreReader, a: str, b: str, changed: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
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
        "stages": list(replayed_stages(asked)),
        "first_step": asked.first_step,
        "last_step": last,
        "policies": asked.policies if "training" in replayed_stages(asked) else None,
        "regraded": asked.regrade,
    }


def ledger_cells(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the ledger of both runs as rows of cells: `steps` across, `stages` down, None where neither has work.

    Work of evaluations stands in the column of the version that it scored.
    """
    steps = sorted({each["step"] for each in pieces})
    stages = list(dict.fromkeys(each["stage"] for each in sorted(pieces, key=_stage_order)))
    states = {(each["stage"], each["step"]): each["state"] for each in pieces}
    rows = [{"stage": stage, "states": [states.get((stage, step)) for step in steps]} for stage in stages]
    counts = Counter(each["state"] for each in pieces)
    return {"steps": steps, "rows": rows, "counts": {s: counts[s] for s in (SAME, DIFFERENT, ONLY_A, ONLY_B)}}


def _stage_order(piece: Piece) -> int:
    return COMPARED.index(piece["stage"])

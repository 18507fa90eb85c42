"""Rows and rollouts in words: one line for a row of a lineage, sentences for the outcome of a rollout and why."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flows.queries.row_lineage import WORK, RowNode, policy_names
from flows.queries.views import EXPIRED
from flows.reporting.formats import compact_number, error_words, one_line
from storage.read.lineage import Graph, Work
from tasks.arrays.finding import NO_TURNS, QUARANTINED, UNTRAINABLE
from tasks.inference.trace_rows.failures import GIVEN_UP, STALE
from tasks.metrics.accounting import ERRORED, EVALUATED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STOPPED, TRAINED

KEY = 8
"""Characters of a key that are shown; as many name it in a command."""
Facts = Mapping[str, Any]


def row_line(node: RowNode, facts: Facts, graph: Graph) -> str:
    """Return a row in one line: what it is, its numbers, and which work of which runs made it."""
    work = graph.works[node.key]
    if node.kind == WORK:
        return work_line(work)
    return f"{title_of(node, graph)}: {_ROW_LINES[node.kind](facts, graph)}  [{work_line(work)}]"


def title_of(node: RowNode, graph: Graph) -> str:
    """Return what a row is and how it is called."""
    if node.kind == WORK:
        return f"{node.id} {node.key[:KEY]}"
    return node.kind if node.kind == "verdict" else f"{node.kind} {name_of(node, graph)}"


def work_line(work: Work) -> str:
    """Return a piece of work in a few words."""
    unfinished = "" if work.finished else ", not finished"
    return f"{work.stage} {work.key[:KEY]}, step {work.step} of {', '.join(work.runs)}{_computed_by(work)}{unfinished}"


def _computed_by(work: Work) -> str:
    """Say who computed a work that several runs use."""
    return f"; computed by {work.computed_by}" if set(work.runs) != {work.computed_by} else ""


def name_of(node: RowNode, graph: Graph) -> str:
    """Return how a row is called in commands."""
    work = graph.works[node.key]
    if node.kind == "row":
        return f"{node.key[:KEY]}/{node.id}"
    return " = ".join((*policy_names(work), node.key[:KEY])) if node.kind == "policy" else node.id


def policy(key: str, graph: Graph) -> str:
    """Return how a policy is called, by its key."""
    return f"policy {policy_names(graph.works[key])[0]}" if key in graph.works else f"policy {key[:KEY]}"


def number(value: float | None) -> str:
    """Return a number in few digits; a missing one is not zero."""
    return compact_number(value, ".4g", "none")


def flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of a config section with their dotted names."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else name)
    elif isinstance(value, Sequence) and value and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}.{index}")
    else:
        yield path, value


def _trace(facts: Facts, graph: Graph) -> str:
    kind = facts["error_class"]
    failed = ("stale" if kind == STALE else "stopped") if kind in GIVEN_UP else f"failed, {kind}"
    ended = failed if facts["error_class"] else f"reward {number(facts['reward'])}"
    sampled = f", by {policy(facts['policy_key'], graph)}" if facts["policy_key"] else ""  # else it was demonstrated
    stale = f", {facts['staleness']} steps stale" if facts["staleness"] else ""
    return f"{ended}{sampled}{stale}"


def _verdict(facts: Facts, graph: Graph) -> str:
    noted = [name for name in facts["detected"] if name != facts["reason"]]
    noted_too = f" (noted: {', '.join(noted)})" if noted else ""
    return ("kept" if facts["keep"] else f"left out by {facts['reason']}") + noted_too


def _update(facts: Facts, graph: Graph) -> str:
    numbers = ", ".join(f"{name.replace('_', ' ')} {number(facts[name])}" for name in ("loss", "grad_norm"))
    return f"{numbers}, from {policy(facts['policy_key_in'], graph)}"


_ROW_LINES: dict[str, Callable[[Facts, Graph], str]] = {
    "example": lambda facts, graph: f"split {facts['split']}",
    "assignment": lambda facts, graph: f"seed {facts['seed']}",
    "trace": _trace,
    "tokens": lambda facts, graph: f"{facts['num_tokens']} tokens, by {policy(facts['policy_key'], graph)}",
    "verdict": _verdict,
    "sample": lambda facts, graph: _worth(facts),
    "row": lambda facts, graph: f"{len(facts['sample_ids'])} samples, for update {facts['update']}",
    "update": _update,
    "policy": lambda facts, graph: f"weights {facts['weights_sha256'][:16]}",
}
Found = Mapping[str, Any]
LONGEST_VALUE = 1000
"""Characters of a value that a sentence has room for, of its name a tenth: of an error, a reason, of evidence."""
PENDING_STAGES = ("rollout", "demonstration", "regrade", "filtering", "reference", "advantage", "packing", "gate")


def head(found: Found) -> str:
    """Return what the rollout is."""
    trace = found["trace"]
    tokens = trace["num_input_tokens"] + trace["num_output_tokens"]
    runs = ", ".join(dict.fromkeys(use["run"] for use in found["runs"])) or "no run"
    earned = "it has no reward" if trace["reward"] is None else f"its reward is {number(trace['reward'])}"
    return (
        f"Trace {trace['trace_id']}: agent {trace['agent']} on example {trace['environment']}/{trace['example_id']}, "
        f"assignment {trace['assignment_id']}, step {trace['step']}; {earned}; {tokens} tokens, "
        f"{trace['num_output_tokens']} of them sampled. Used by: {runs}."
    )


def sentence(found: Found, use: Found) -> str:
    """Return what one run made of the rollout."""
    sentences = [SENTENCES[use["outcome"]](found, use), *_before(use), *_again(use), *_note_sentences(use)]
    if use["outcome"] != EVALUATED:
        sentences.append(_group(use))
    return " ".join(sentences)


def in_quarantine(each: Found) -> str:
    """Return which quarantine a rollout is in, and why."""
    return f"It is in quarantine {each['quarantine']}: {_brief(each['reason'])} (where {_brief(each['where'])})."


def _trained_sentence(found: Found, use: Found) -> str:
    samples = "; ".join(
        f"sample {each['sample_id']} ({_worth(each)}) in row {each['row']} of batch "
        f"{use['keys']['packing'][:KEY]}, update {each['update']}"
        for each in use["samples"]
        if each["row"] is not None
    )
    return f"Run {use['run']} trained on it at step {use['step']}: {samples}. That made policy {use['policy']}."


ENDED = {"errored": "failed", "stopped": "stopped"}
"""Words for rollouts of a group that earned nothing, by what they are counted under."""
SEATS = {
    NO_TURNS: "the policy was never asked in its seat, so that there is no token to train on; its reward counts",
    UNTRAINABLE: "its seat is not trained: another model plays it, or the environment or its config says so",
    "judge": "the judge's seat is not trained (drop_judge), for its reward is zero by construction",
    "other_seat": "another seat learned in its episode (learner_seat)",
}
"""Why a rollout is left out for the seat that it was made in."""


def _filtered_sentence(found: Found, use: Found) -> str:
    silent = use["detail"] == UNTRAINABLE and NO_TURNS in use["verdict"]["detected"]
    if said := SEATS.get(NO_TURNS if silent else use["detail"]):
        return f"{_not(use)}: {said}."
    return f"{_not(use)}: filter {use['detail']} left it out{_evidence(use, use['detail'])}."


def _errored_sentence(found: Found, use: Found) -> str:
    trace = found["trace"]
    what = error_words(": ".join(filter(None, (trace["error_type"], trace["error_message"]))), LONGEST_VALUE)
    return (
        f"{_not(use)}: the rollout failed with an error of class {use['detail']}{f' ({what})' if what else ''}. "
        f"Failed rollouts are in no baseline and in no batch."
    )


def _stopped_sentence(found: Found, use: Found) -> str:
    return f"{_not(use)}: it was {_brief(found['trace']['error_message'] or 'stopped')}."


def _quarantined_sentence(found: Found, use: Found) -> str:
    return f"{_not(use)}: it is in quarantine: {_brief(use['verdict']['evidence'][QUARANTINED]['reason'])}."


def _refused_sentence(found: Found, use: Found) -> str:
    decision = use["decision"]
    figures = ", ".join(f"{name} {_value(value)}" for name, value in decision["figures"].items())
    return (
        f"{_not(use)}: the {decision['gate']} gate held back the whole batch. "
        f"Decided by {_brief(decision['decided_by'])}: {_brief(decision['reason'])}. The figures were: {figures}."
    )


def _no_weight(found: Found, use: Found) -> str:
    worth = "; ".join(f"{each['sample_id']}: {_worth(each)}" for each in use["samples"])
    return f"{_not(use)}: it was kept, but none of its tokens has a weight in the loss ({worth or 'no samples'})."


def _pending(found: Found, use: Found) -> str:
    # From the end: the furthest stage that is done.
    last = next((stage for stage in reversed(PENDING_STAGES) if stage in use["keys"]), "the rollouts")
    return (
        f"Run {use['run']} has not trained on it: of step {use['step']} nothing is done after {last}. "
        f"The run's last event is: {use['state']}."
    )


def _evaluated_sentence(found: Found, use: Found) -> str:
    failed = f" It failed with an error of class {use['detail']}." if use["detail"] else ""
    return f"Run {use['run']} sampled it to score policy {use['scored']}, not to train on.{failed}"


def _expired_sentence(found: Found, use: Found) -> str:
    did = f"that step made policy {use['policy']}" if use["policy"] else "that step made no policy"
    return (
        f"Whether run {use['run']} trained on it at step {use['step']} is not known any more: rows that say it were "
        f"dropped for their age (`stagecoach maintain --retain`); {did}."
    )


SENTENCES: dict[str, Callable[[Found, Found], str]] = {
    TRAINED: _trained_sentence,
    FILTERED: _filtered_sentence,
    ERRORED: _errored_sentence,
    STOPPED: _stopped_sentence,
    STALE: _stopped_sentence,
    QUARANTINED: _quarantined_sentence,
    REFUSED: _refused_sentence,
    NO_WEIGHT: _no_weight,
    PENDING: _pending,
    EVALUATED: _evaluated_sentence,
    EXPIRED: _expired_sentence,
}


def _not(use: Found) -> str:
    return f"Run {use['run']} did not train on it at step {use['step']}"


def _worth(sample: Found) -> str:
    numbers = ", ".join(f"{name} {number(sample[name])}" for name in ("advantage", "reward", "baseline"))
    return f"{numbers}, {sample['num_tokens']} tokens"


def _evidence(use: Found, name: str) -> str:
    found = (use["verdict"] or {}).get("evidence", {}).get(name) or {}
    description = ", ".join(
        f"{_brief(path.replace('_', ' '), LONGEST_VALUE // 10)} {_value(value)}" for path, value in flat(found)
    )
    return f" ({description})" if description else ""


def _before(use: Found) -> list[str]:
    return [
        f"Before that step was done again, the run trained on it in {places} of batch {each['keys']['packing'][:KEY]}: "
        f"training {each['keys']['training'][:KEY]}."
        for each in use["earlier"]
        if (places := ", ".join(f"row {sample['row']}" for sample in each["samples"]))
    ]


def _again(use: Found) -> list[str]:
    if use["regrade"] is None:
        return []
    before, now = (number(use["regrade"][name]) for name in ("reward_before", "reward"))
    return [f"It was scored again: its reward was {before} and is {now}."]


def _note_sentences(use: Found) -> list[str]:
    detected = (use["verdict"] or {}).get("detected", [])
    # The filter that decided is named already, and a quarantine has a sentence of its own.
    noted = [f"{name}{_evidence(use, name)}" for name in detected if name not in (use["detail"], QUARANTINED)]
    return [f"Noted, without keeping it out: {'; '.join(noted)}."] if noted else []


def _group(use: Found) -> str:
    group = use["group"]
    scored = (
        f"rewards from {number(group['lowest'])} to {number(group['highest'])}, mean {number(group['mean'])}"
        if group["num_rewarded"]
        else "no rewards"
    )
    ended = "".join(f", {group[f'num_{name}']} {word}" for name, word in ENDED.items() if group[f"num_{name}"])
    return f"Its group {group['group_id']} has {group['num_rollouts']} rollouts{ended}: {scored}."


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else "none" if value is None else _brief(str(value))


def _brief(text: str, most: int = LONGEST_VALUE) -> str:
    return one_line(text, most)

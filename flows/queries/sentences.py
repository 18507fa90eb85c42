"""Rows and rollouts in words: one line for a row of a lineage, sentences for the outcome of a rollout and why."""

from collections.abc import Callable, Mapping
from typing import Any

from flows.queries.row_lineage import RowNode, policy_name, policy_names
from flows.queries.store_reader import flat
from flows.queries.views import EXPIRED
from flows.reporting.formats import compact_number, error_words, one_line
from storage.read.lineage import Graph, Work
from tasks.arrays.finding import NO_TURNS, QUARANTINED, UNTRAINABLE
from tasks.inference.trace_rows.failures import GIVEN_UP
from tasks.metrics.accounting import ERRORED, EVALUATED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED

KEY = 8
"""Characters of a key that are shown; as many name it in a command."""
MAX_VALUE_CHARS = 1000
"""Characters of an error, a reason or a value of evidence in a sentence; of a name a tenth."""
PENDING_STAGES = ("rollout", "demonstration", "regrade", "filtering", "reference", "advantage", "packing", "gate")
SEATS = ("judge", "other_seat", UNTRAINABLE)
"""Reasons to leave a rollout out that its seat gives."""
Facts = Mapping[str, Any]


def row_line(node: RowNode, facts: Facts, graph: Graph) -> str:
    """Return a row in one line: what it is, its numbers, and which work of which runs made it."""
    return f"{title_of(node, graph)}: {_ROW_LINES[node.kind](facts, graph)}  [{_work_line(graph.works[node.key])}]"


def title_of(node: RowNode, graph: Graph) -> str:
    """Return what a row is and how commands call it."""
    key, kind = node.key[:KEY], node.kind
    names = {"verdict": "", "row": f"{key}/{node.id}"}
    names["policy"] = " = ".join((*policy_names(graph.works[node.key]), key)) if kind == "policy" else ""
    return f"{kind} {names.get(kind, node.id)}".rstrip()


def _work_line(work: Work) -> str:
    computed = f"; computed by {work.computed_by}" if set(work.runs) != {work.computed_by} else ""
    unfinished = "" if work.finished else ", not finished"
    return f"{work.stage} {work.key[:KEY]}, step {work.step} of {', '.join(work.runs)}{computed}{unfinished}"


def number(value: float | None) -> str:
    """Return a number in few digits; a missing one is not zero."""
    return compact_number(value, ".4g", "none")


def _policy(key: str, graph: Graph) -> str:
    return f"policy {policy_name(graph, key) or key[:KEY]}"


def _trace(facts: Facts, graph: Graph) -> str:
    kind = facts["error_class"]
    failed = f"failed, {kind}" if kind not in GIVEN_UP else STALE if kind == STALE else STOPPED
    ended = failed if kind else f"reward {number(facts['reward'])}"
    sampled = f", by {_policy(facts['policy_key'], graph)}" if facts["policy_key"] else ""  # else it was demonstrated
    return ended + sampled + (f", {facts['staleness']} steps stale" if facts["staleness"] else "")


def _verdict(facts: Facts, graph: Graph) -> str:
    noted = ", ".join(name for name in facts["detected"] if name != facts["reason"])
    return ("kept" if facts["keep"] else f"left out by {facts['reason']}") + (f" (noted: {noted})" if noted else "")


def _worth(sample: Facts) -> str:
    numbers = ", ".join(f"{name} {number(sample[name])}" for name in ("advantage", "reward", "baseline"))
    return f"{numbers}, {sample['num_tokens']} tokens"


_ROW_LINES: dict[str, Callable[[Facts, Graph], str]] = {
    "example": lambda facts, _: f"split {facts['split']}",
    "assignment": lambda facts, _: f"seed {facts['seed']}",
    "trace": _trace,
    "tokens": lambda facts, graph: f"{facts['num_tokens']} tokens, by {_policy(facts['policy_key'], graph)}",
    "verdict": _verdict,
    "sample": lambda facts, _: _worth(facts),
    "row": lambda facts, _: f"{len(facts['sample_ids'])} samples, for update {facts['update']}",
    "update": lambda facts, graph: (
        f"loss {number(facts['loss'])}, grad norm {number(facts['grad_norm'])}, "
        f"from {_policy(facts['policy_key_in'], graph)}"
    ),
    "policy": lambda facts, _: f"weights {facts['weights_sha256'][:16]}",
}


def head(found: Facts) -> str:
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


def sentence(found: Facts, use: Facts) -> str:
    """Return what one run made of the rollout."""
    outcome = use["outcome"]
    begin = "" if outcome in SAID_WHOLE else f"Run {use['run']} did not train on it at step {use['step']}: "
    sentences = [f"{begin}{SENTENCES[outcome](found['trace'], use)}."]
    if use["regrade"]:
        before, now = (number(use["regrade"][name]) for name in ("reward_before", "reward"))
        sentences.append(f"It was scored again: its reward was {before} and is {now}.")
    detected = (use["verdict"] or {}).get("detected", [])
    # The filter that decided is named already, and a quarantine has a sentence of its own.
    if noted := [f"{name}{_evidence(use, name)}" for name in detected if name not in (use["detail"], QUARANTINED)]:
        sentences.append(f"Noted, without keeping it out: {'; '.join(noted)}.")
    return " ".join(sentences if outcome == EVALUATED else [*sentences, _group(use["group"])])


def in_quarantine(quarantine: Facts) -> str:
    """Return which quarantine a rollout is in, and why."""
    reason, where = _brief(quarantine["reason"]), _brief(quarantine["where"])
    return f"It is in quarantine {quarantine['quarantine']}: {reason} (where {where})."


def _trained_sentence(trace: Facts, use: Facts) -> str:
    batch = use["keys"]["packing"][:KEY]
    samples = "; ".join(
        f"sample {sample['sample_id']} ({_worth(sample)}) in row {sample['row']} of batch {batch}, "
        f"update {sample['update']}"
        for sample in use["samples"]
        if sample["row"] is not None
    )
    return f"Run {use['run']} trained on it at step {use['step']}: {samples}. That made policy {use['policy']}"


def _filtered_sentence(trace: Facts, use: Facts) -> str:
    reason = use["detail"]
    if reason == NO_TURNS or (reason == UNTRAINABLE and NO_TURNS in use["verdict"]["detected"]):
        return "the policy was never asked in its seat, so that there is no token to train on; its reward counts"
    if reason in SEATS:
        return f"its seat is not trained ({reason})"
    return f"filter {reason} left it out{_evidence(use, reason)}"


def _errored_sentence(trace: Facts, use: Facts) -> str:
    words = error_words(": ".join(filter(None, (trace["error_type"], trace["error_message"]))), MAX_VALUE_CHARS)
    error = f" of class {use['detail']}{f' ({words})' if words else ''}"
    return f"the rollout failed with an error{error}. Failed rollouts are in no baseline and in no batch"


def _refused_sentence(trace: Facts, use: Facts) -> str:
    decision = use["decision"]
    figures = ", ".join(f"{name} {_value(value)}" for name, value in decision["figures"].items())
    return (
        f"the {decision['gate']} gate held back the whole batch. Decided by {_brief(decision['decided_by'])}: "
        f"{_brief(decision['reason'])}. The figures were: {figures}"
    )


def _no_weight(trace: Facts, use: Facts) -> str:
    worth = "; ".join(f"{sample['sample_id']}: {_worth(sample)}" for sample in use["samples"])
    return f"it was kept, but none of its tokens has a weight in the loss ({worth or 'no samples'})"


def _pending(trace: Facts, use: Facts) -> str:
    # From the end: the furthest stage that is done.
    last = next((stage for stage in reversed(PENDING_STAGES) if stage in use["keys"]), "the rollouts")
    return (
        f"Run {use['run']} has not trained on it: of step {use['step']} nothing is done after {last}. "
        f"The run's last event is: {use['state']}"
    )


def _evaluated_sentence(trace: Facts, use: Facts) -> str:
    failed = f". It failed with an error of class {use['detail']}" if use["detail"] else ""
    return f"Run {use['run']} sampled it to score policy {use['scored']}, not to train on{failed}"


def _expired_sentence(trace: Facts, use: Facts) -> str:
    made = f"policy {use['policy']}" if use["policy"] else "no policy"
    return (
        f"Whether run {use['run']} trained on it at step {use['step']} is not known any more: rows that say it were "
        f"dropped for their age (`stagecoach maintain --retain`); that step made {made}"
    )


def _stopped_sentence(trace: Facts, use: Facts) -> str:
    return f"it was {_brief(trace['error_message'] or 'stopped')}"


SENTENCES: dict[str, Callable[[Facts, Facts], str]] = {
    **{
        TRAINED: _trained_sentence,
        FILTERED: _filtered_sentence,
        ERRORED: _errored_sentence,
        STOPPED: _stopped_sentence,
        STALE: _stopped_sentence,
    },
    **{
        REFUSED: _refused_sentence,
        NO_WEIGHT: _no_weight,
        PENDING: _pending,
        EVALUATED: _evaluated_sentence,
        EXPIRED: _expired_sentence,
    },
    QUARANTINED: lambda _, use: f"it is in quarantine: {_brief(use['verdict']['evidence'][QUARANTINED]['reason'])}",
}
"""Of a trace and its use in a run: why the run did not train on it, or of SAID_WHOLE a whole sentence."""
SAID_WHOLE = (TRAINED, PENDING, EVALUATED, EXPIRED)


def _evidence(use: Facts, name: str) -> str:
    evidence = (use["verdict"] or {}).get("evidence", {}).get(name) or {}
    names = [(_brief(path.replace("_", " "), MAX_VALUE_CHARS // 10), value) for path, value in flat(evidence)]
    text = ", ".join(f"{name} {_value(value)}" for name, value in names)
    return f" ({text})" if text else ""


def _group(group: Facts) -> str:
    ends = f"{number(group['lowest'])} to {number(group['highest'])}, mean {number(group['mean'])}"
    scored = f"rewards from {ends}" if group["num_rewarded"] else "no rewards"
    counts = {"failed": group["num_errored"], "stopped": group["num_stopped"]}
    lost = "".join(f", {count} {word}" for word, count in counts.items() if count)
    return f"Its group {group['group_id']} has {group['num_rollouts']} rollouts{lost}: {scored}."


def _value(value: Any) -> str:
    return number(value) if value is None or isinstance(value, float) else _brief(str(value))


def _brief(text: str, most: int = MAX_VALUE_CHARS) -> str:
    return one_line(text, most)

"""Metrics of a step's rollouts: reward, lengths, errors, time and what the filters found.

Every metric of rollouts exists for all of them, in the scope `all`, and by environment: `reward/all/mean`,
`reward/reverse-text/mean`. Means are over all rollouts, also those that the filters leave out of training; a rollout
that was not scored is in no mean of rewards, for that is not a reward of zero. Those that were stopped because enough
others had ended (oversampling) have a share of their own, `stragglers/all`, and so have those of a stream that no step
took in time, `stale/all`. Both are in no other number but the sums of tokens, `rollout/all/input_tokens` and
`rollout/all/output_tokens`. Where several agents of an environment were scored, each has a mean of its own,
`reward/debate/affirmative/mean`: that of all of them is 0 in every game in which one wins what the other loses.

Re-tokenised turns are replies whose text went back to the model as other tokens than those that it had sampled. A
renderer that cannot add to a conversation's tokens renders the whole of it anew. Where what comes out differs from what
was sampled, verifiers begins another branch there (verifiers.v1.graph): the reply is in the trace twice, once sampled
and once as a part of a later prompt. The sampled one is trained on, once, in its own branch.
"""

import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pyarrow as pa

from tasks.inference.trace_rows.failures import GIVEN_UP, STALE, STRAGGLER, UNSCORED
from tasks.metrics.figures import ALL, Values, mean, named_scores, rank_correlation, score_means, spread

_log = logging.getLogger("stagecoach")
_MEANS = ("num_turns", "num_input_tokens", "num_output_tokens", "is_truncated", "staleness")
SPANS = ("setup", "generation", "model", "scoring")
"""What the wall-clock of a rollout consists of; `model` is a part of `generation`."""
MAX_COMPARED = 8
"""Named rewards that are compared with each other, the first by name."""
COLUMNS = (
    *("trace_id", "environment", "agent", "trainable", "policy_version", "reward", "rewards", "metrics"),
    *("num_branches", "error_class"),
    *_MEANS,
    *(f"{span}_seconds" for span in SPANS),
)
"""What is read of traces: numbers and names, no text that a model wrote."""
Rows = Sequence[Mapping[str, Any]]


def rollout_metrics(
    traces: pa.Table,
    verdicts: pa.Table,
    filters: Sequence[str] = (),
    retokenised: Mapping[str, int] | None = None,
    token_policies: pa.Table | None = None,
) -> Values:
    """Return the metrics of a step's rollouts.

    `verdicts` has no rows where nothing was filtered. `filters` names those configured, so that one that found nothing
    is there as zero; `retokenised` says how many turns of which trace were tokenised again, None where nobody counted.
    `token_policies` is None where each rollout is of one policy: then the staleness of tokens is that of rollouts.
    What was not measured has no entry; values may be NaN or infinite.
    """
    verdict = {row["trace_id"]: row for row in verdicts.to_pylist()}
    rows = [row | {"verdict": verdict.get(row["trace_id"])} for row in traces.select(COLUMNS).to_pylist()]
    names = sorted({*filters, *(name for row in verdict.values() for name in row["detected"])})
    environments = sorted({row["environment"] for row in rows})
    found: Values = {}
    for scope in (ALL, *environments):
        members = rows if scope == ALL else [row for row in rows if row["environment"] == scope]
        ended = [row for row in members if row["error_class"] not in GIVEN_UP]
        found |= _values_of_scope(scope, _of_all(members), _of_ended(ended), _of_filters(ended, names))
        if token_policies is not None:
            ages = mean_and_max(ages_of_tokens(ended, token_policies))
            found |= _values_of_scope(scope, ((f"token_staleness/{name}", value) for name, value in ages))
        if scope != ALL:
            found |= _values_of_scope(scope, _of_agents(ended))
        if retokenised is not None:
            found[scope, "rollout/retokenised_turns"] = float(sum(retokenised.get(row["trace_id"], 0) for row in ended))
    if verdict:
        found["", "kept"] = mean(row["keep"] for row in verdict.values())
        left_out = Counter(row["reason"] for row in verdict.values() if row["reason"] is not None)
        found |= {("", f"reasons/{reason}"): float(count) for reason, count in sorted(left_out.items())}
    return found


Measures = Iterator[tuple[str, float]]


def _values_of_scope(scope: str, *parts: Measures) -> Values:
    return {(scope, measure): value for part in parts for measure, value in part}


def _of_all(rows: Rows) -> Measures:
    """Yield the shares of rollouts that were stopped, stale or unscored where there are any, and the tokens of all."""
    for name, kind in (("stragglers", STRAGGLER), ("stale", STALE), (UNSCORED, UNSCORED)):
        if given_up := sum(row["error_class"] == kind for row in rows):
            yield name, given_up / len(rows)
    for name in ("input_tokens", "output_tokens"):
        yield f"rollout/{name}", float(sum(row[f"num_{name}"] for row in rows))


def _of_ended(rows: Rows) -> Measures:
    """Yield reward, lengths, errors and time of the rollouts that ended by themselves."""
    yield "rollouts", float(len(rows))
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    if rewards:
        for name, value in spread(rewards).items():
            yield f"reward/{name}", value
    yield from _of_rewards(rows)
    if not rows:
        return
    for name in _MEANS:
        yield name, mean(row[name] for row in rows)
    yield "samples_per_rollout", mean(row["num_branches"] for row in rows)
    yield "longest_output", float(max(row["num_output_tokens"] for row in rows))
    for span in SPANS:
        yield f"timing/{span}", mean(row[f"{span}_seconds"] for row in rows)
    errors = Counter(row["error_class"] for row in rows if row["error_class"] not in (None, UNSCORED))
    yield "errored_rollout", errors.total() / len(rows)
    for kind, count in sorted(errors.items()):
        yield f"errored_rollout/{kind}", count / len(rows)
    yield from _of_environment(rows)


def runs_of_policies(token_policies: pa.Table) -> dict[str, list[tuple[int, int]]]:
    """Return, of traces that several policies sampled, the version and the number of tokens of each run of theirs."""
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run in token_policies.select(["trace_id", "policy_version", "num_tokens"]).to_pylist():
        runs[run["trace_id"]].append((run["policy_version"], run["num_tokens"]))
    return runs


def ages_of_tokens(rows: Rows, token_policies: pa.Table | None) -> Counter[int]:
    """Return how many sampled tokens of some traces have which age: steps since the policy that sampled each."""
    runs = runs_of_policies(token_policies) if token_policies is not None else {}
    ages = Counter[int]()
    for row in rows:
        step = row["staleness"] + row["policy_version"]
        for version, count in runs.get(row["trace_id"], [(row["policy_version"], row["num_output_tokens"])]):
            ages[step - version] += count
    return +ages


def mean_and_max(ages: Counter[int]) -> Measures:
    """Yield the mean and the greatest age of tokens; nothing where there are none."""
    if tokens := ages.total():
        yield "mean", sum(age * count for age, count in ages.items()) / tokens
        yield "max", float(max(ages))


def _by_name(values: Iterable[tuple[str, float]]) -> list[tuple[str, list[float]]]:
    groups = defaultdict[str, list[float]](list)
    for name, value in values:
        groups[name].append(value)
    return sorted(groups.items())


def _of_agents(rows: Rows) -> Measures:
    """Yield the mean reward of each agent of an environment; nothing where there is only one."""
    rewards = _by_name((row["agent"], row["reward"]) for row in rows if row["reward"] is not None)
    # With one agent its mean is that of the environment.
    for agent, values in rewards if len(rewards) > 1 else ():
        yield f"reward/{agent}/mean", mean(values)


def _of_rewards(rows: Rows) -> Measures:
    """Yield the mean score of each named reward, and how far each two of them agree."""
    for name, value in score_means(rows).items():
        yield f"rewards/{name}/mean", value
    yield from _of_pairs([named_scores(row) for row in rows])


def _of_pairs(scores: Sequence[Mapping[str, float]]) -> Measures:
    """Yield the rank correlation of each two named rewards, such as a judge and a rule, over rollouts with both."""
    for pair in combinations(sorted({name for each in scores for name in each})[:MAX_COMPARED], 2):
        both = [(each[pair[0]], each[pair[1]]) for each in scores if each.keys() >= {*pair}]
        finite = [values for values in both if all(map(math.isfinite, values))]
        if (value := rank_correlation(*zip(*finite, strict=True)) if finite else None) is not None:
            yield f"agreement/{'/'.join(pair)}", value


def _of_environment(rows: Rows) -> Measures:
    """Yield the means of what the environment measured, each over the rollouts that have it."""
    for name, values in _by_name(_environment_metrics(rows)):
        yield f"metrics/{name}", mean(values)


def _environment_metrics(rows: Rows) -> Measures:
    for row in rows:
        for name, value in json.loads(row["metrics"] or "{}").items():
            # Environments also note texts and lists, which have no mean.
            if isinstance(value, (int, float)):
                try:
                    yield name, float(value)
                except OverflowError:
                    _log.warning("metric %r of a rollout is left out: an integer beyond float64", name)


def _of_filters(rows: Rows, names: Sequence[str]) -> Measures:
    """Yield the share of rollouts that each filter found, that any filtered, and that are left to train on."""
    judged = [row for row in rows if row["verdict"] is not None]
    if not judged:
        return
    for name in names:
        yield f"filters/{name}", mean(name in row["verdict"]["detected"] for row in judged)
    yield "filters/is_filtered", mean(not row["verdict"]["keep"] for row in judged)
    trainable = sum(row["verdict"]["keep"] and row["trainable"] for row in judged)
    yield "trainable/count", float(trainable)
    yield "trainable/ratio", trainable / len(judged)


RETOKENISED_COLUMNS = ["trace_id", "message", "parent", "role", "sampled", "body"]
"""The columns of messages that say which replies were tokenised again."""


def retokenised_turns(messages: pa.Table) -> dict[str, int]:
    """Return how many replies of which trace were tokenised again; traces without any are not there.

    A message that was not sampled counts, of role assistant, where one that was sampled says the same after the same
    conversation. Thoughts are not compared, for those are what templates take out.
    """
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in messages.select(RETOKENISED_COLUMNS).to_pylist():
        traces[row["trace_id"]].append(row)
    counts = {trace: _num_retokenised(rows) for trace, rows in traces.items()}
    return {trace: count for trace, count in counts.items() if count}


def _num_retokenised(rows: list[dict[str, Any]]) -> int:
    """Return how often a trace's replies were tokenised again; a number stands for a conversation up to a message."""
    numbers: dict[tuple[int | None, str], int] = {}
    conversations: dict[int, int] = {}
    sampled, again = set[int](), Counter[int]()
    # By number, because a parent has a smaller one than its children.
    for row in sorted(rows, key=lambda row: row["message"]):
        before = None if row["parent"] is None else conversations[row["parent"]]
        number = numbers.setdefault((before, _content(row["body"])), len(numbers))
        conversations[row["message"]] = number
        if row["sampled"]:
            sampled.add(number)
        elif row["role"] == "assistant":
            again[number] += 1
    return sum(again[number] for number in sampled)


def _content(body: str) -> str:
    """Return what a message says, whatever was thought before; an empty text is none."""
    message = json.loads(body)
    kept = {name: message.get(name) or None for name in ("role", "content", "tool_calls", "tool_call_id")}
    # The same call may come back with other blanks or in another order of names.
    for call in kept["tool_calls"] or ():
        call["arguments"] = _normalise(call.get("arguments"))
    return json.dumps(kept, sort_keys=True)


def _normalise(arguments: Any) -> Any:
    """Return a call's arguments without what their writing decides: the order of names, and blanks."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError):
        return arguments

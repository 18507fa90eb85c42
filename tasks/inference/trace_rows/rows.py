"""Converts finished and failed rollouts to rows of the tables traces and messages, and back."""

import base64
import datetime
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import MESSAGES, ROUTED_EXPERTS, TOKEN_POLICIES, TRACES
from tasks.inference.trace_rows.failures import LIMITS, Failure, failure_of_trace, is_chat_only
from tasks.inference.trace_rows.images import extract_images

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace

Row = dict[str, Any]
EXPERTS = "routed_experts"
"""Field of a node and key of a message's row that is no column: an array of experts, (tokens, layers, k)."""
NODE_COLUMNS = frozenset({"parent", "message", "sampled", "token_ids", "mask", "is_content", "logprobs", EXPERTS})
"""Fields of a node that are columns of messages, or a table of their own; its others are in the trace's record."""
TRACE_COLUMNS = frozenset({"id", "rewards", "metrics", "info"})
"""Fields of a trace that are columns of traces and not in its record."""
POLICIES_FIELD = "token_policies"
"""Field of a trace's info, as it comes over the wire, that says which policies sampled a reply's tokens: by the seed of
the call, a list of keys and numbers of tokens. Rows have it in a table of its own."""
TURNS_FIELD = "kept_turns"
"""Field of a trace's info, as it comes over the wire, with the last answers of a rollout whose turns are kept."""
STATE_FIELD = "recorded_state"
"""Field of a trace's info, as it comes over the wire, with the state of its rollout; rows have it in the record."""
PLAYER_FIELD = "played_by"
"""Field of a trace's info with the name of the frozen model that played the seat, by a binding or as the base."""
POLICIES = "policies"
"""Key of a message's row that is no column: its runs of tokens that one policy sampled."""


@dataclass(frozen=True)
class RolloutOrigin:
    """What all rows of one rollout share: its assignment, and the policy and temperature that sampled it."""

    assignment: Mapping[str, Any]
    policy_key: str
    policy_version: int
    step: int
    temperature: float
    versions: Mapping[str, int] = field(default_factory=dict)
    """The versions of the policies that may sample a part of it, by key; none where one policy samples all of it, as no
    weights are exchanged meanwhile."""

    def of_oldest(self, keys: Iterable[str]) -> "RolloutOrigin":
        """Return the origin of a rollout that these policies sampled, by the oldest of them; itself without any.

        Raises UnknownPolicy for a key that is not known.
        """
        if not self.versions or not (sampled := set(keys)):
            return self
        if unknown := sampled - self.versions.keys():
            raise UnknownPolicy(f"the engine says that tokens were sampled with {sorted(unknown)}, {_UNKNOWN}")
        oldest = min(sampled, key=self.versions.__getitem__)
        return replace(self, policy_key=oldest, policy_version=self.versions[oldest])

    @property
    def columns(self) -> Row:
        """The columns of traces that do not depend on how the rollout ended."""
        names = ("assignment_id", "group_id", "environment", "example_id")
        return {
            **{name: self.assignment[name] for name in names},
            "policy_key": self.policy_key,
            "policy_version": self.policy_version,
            "staleness": self.step - self.policy_version,
            "temperature": self.temperature,
        }


class UnknownPolicy(RuntimeError):
    """Tokens were sampled, and nobody knows with which policy of this run."""


class UnattributedTokens(UnknownPolicy):
    """A trace does not say for all of its sampled tokens which policy sampled them."""


_UNKNOWN = (
    "which this run does not know. All groups before it are safe. Let the run start the engine and serve the "
    'environment itself, or set rollout.weight_update = "wait" and rollout.keep_turns = false'
)


def trace_tables(traces: list[Row], messages: list[Row], records_experts: bool = False) -> dict[str, pa.Table]:
    """Return rows as Arrow tables with exactly the contract's schemas.

    Images are by reference, in a table of their own, and so are the policies of tokens where a trace has several, and
    experts where they are recorded.
    """
    tables = extract_images(
        pa.Table.from_pylist(traces, schema=TRACES.arrow), pa.Table.from_pylist(messages, schema=MESSAGES.arrow)
    )
    if runs := _runs_of_several_policies(traces, messages):
        tables["token_policies"] = pa.Table.from_pylist(runs, schema=TOKEN_POLICIES.arrow)
    if records_experts:
        ours = {row["trace_id"] for row in traces if row["policy_key"]}
        routed = [_expert_row(row) for row in messages if EXPERTS in row and row["trace_id"] in ours]
        tables[EXPERTS] = pa.Table.from_pylist(routed, schema=ROUTED_EXPERTS.arrow)
    return tables


def _expert_row(message: Row) -> Row:
    experts = message[EXPERTS]
    _, layers, top_k = experts.shape
    wide = experts.astype(experts.dtype.newbyteorder("<"))
    sizes = {"width": experts.itemsize, "num_layers": layers, "top_k": top_k, "experts": wide.tobytes()}
    return {"trace_id": message["trace_id"], "message": message["message"], **sizes}


def _runs_of_several_policies(traces: Iterable[Row], messages: Iterable[Row]) -> list[Row]:
    """Return the runs of all messages of the traces that several policies of the store sampled."""
    ours = {row["trace_id"] for row in traces if row["policy_key"]}
    runs: dict[str, list[Row]] = {}
    for row in messages:
        if row["trace_id"] in ours:
            runs.setdefault(row["trace_id"], []).extend(row.get(POLICIES, ()))
    return [run for each in runs.values() if len({run["policy_key"] for run in each}) > 1 for run in each]


def by_policy(traces: pa.Table) -> Any:
    """Return a column of whether the policy of a step sampled each trace, and no frozen model."""
    is_frozen = pc.match_substring(traces["info"], f'"{PLAYER_FIELD}":')
    return pc.and_(pc.not_equal(traces["policy_key"], pa.scalar("")), pc.invert(is_frozen))


def require_policies(trace: Row, messages: Iterable[Row]) -> None:
    """Raise UnattributedTokens where a trace does not say of all sampled tokens which policy sampled them."""
    for row in messages:
        sampled = sum(row["mask"])
        if sampled != sum(run["num_tokens"] for run in row.get(POLICIES, ())):
            raise UnattributedTokens(
                f"trace {trace['trace_id']!r}, message {row['message']}: {sampled} tokens were sampled with a policy "
                + _UNKNOWN
            )


def rows_of_record(record: Row, origin: RolloutOrigin, episode_id: str) -> tuple[Row, list[Row]]:
    """Return a trace's row and its messages' rows; `wire_record` made the record, which is taken apart.

    Nothing is lost: see `rebuild`.
    """
    record["info"].pop(TURNS_FIELD, None)
    if STATE_FIELD in record["info"]:
        record["state"] = record["info"].pop(STATE_FIELD)
    spans = _spans_by_node(record)
    origin = origin.of_oldest(key for node_spans in spans.values() for key, _ in node_spans)
    messages = message_rows(record)
    for row in messages if origin.versions else ():
        row[POLICIES] = _policy_runs(row, spans.get(row["message"], ()), origin.versions)
    return _trace_row(record, origin, episode_id, failure_of_trace(record)), messages


def _spans_by_node(record: Row) -> dict[int, Sequence[tuple[str, int]]]:
    """Take the spans of policies out of a record's info; return them by the number of the reply's node."""
    by_seed = record["info"].pop(POLICIES_FIELD, {})
    answered = (call for call in record["calls"] if call["node"] is not None)
    nodes = {str((call["sampling"] or {}).get("seed")): call["node"] for call in answered}
    return {nodes[seed]: spans for seed, spans in by_seed.items() if seed in nodes}


def _policy_runs(message: Row, runs: Iterable[tuple[str, int]], versions: Mapping[str, int]) -> list[Row]:
    """Return the runs of a message's sampled tokens as rows of token_policies."""
    places = [place for place, sampled in enumerate(message["mask"]) if sampled]
    keys = [key for key, count in runs for _ in range(count)]
    if len(places) != len(keys):
        return []  # found by `require_policies`
    rows = []
    # What was not sampled ends a run too: the difference of place and number is the same within one.
    numbered = enumerate(zip(places, keys, strict=True))
    for (key, _), run in groupby(numbered, key=lambda each: (each[1][1], each[1][0] - each[0])):
        start, *rest = [place for _, (place, _) in run]
        row = {"trace_id": message["trace_id"], "message": message["message"], "start": start}
        rows.append({**row, "num_tokens": 1 + len(rest), "policy_key": key, "policy_version": versions[key]})
    return rows


def wire_record(trace: "WireTrace") -> Row:
    """Return a trace as plain JSON values: all digits, NaN and infinities included, the engine's API key left out."""
    from verifiers.v1.trace import EXCLUDE_FIELDS

    record: Row = trace.model_dump(
        mode="json", exclude=EXCLUDE_FIELDS | {"info": True}, context={"float_decimals": None}, serialize_as_any=True
    )
    for node, stored in zip(trace.nodes, record["nodes"], strict=True):
        if node.routed_experts is not None:
            stored[EXPERTS] = node.routed_experts
    # By hand: pydantic's JSON mode refuses bytes that are not UTF-8, and one such note would fail the batch.
    record["info"] = _json_value(trace.info)
    # JSON mode turns a reward that is no number into null, which would read as "not scored".
    for name, reward in trace.rewards.items():
        if reward is not None:
            record["rewards"][name] = {"score": reward.score, "weight": reward.weight}
    record["metrics"] = dict(trace.metrics)
    if client := record["agent"]["config"].get("client"):
        client["headers"] = {}  # they hold the engine's API key
    return record


def _trace_row(record: Row, origin: RolloutOrigin, episode_id: str, failure: Failure | None) -> Row:
    temperature = (record["agent"]["config"]["sampling"] or {}).get("temperature")  # a seat may have its own
    return {
        **origin.columns,
        "temperature": origin.temperature if temperature is None else temperature,
        "trace_id": record["id"],
        "episode_id": episode_id,
        **outcome_columns(record, failure),
        **_token_counts(record),
        "record": strict_json(_remaining_record(record)),
    }


def outcome_columns(record: Row, failure: Failure | None) -> Row:
    """Return the columns of a trace's row that say how it ended, from its record."""
    unscored = failure is not None or not record["rewards"]
    timing, calls = record["timing"], record["calls"]
    parents = {node["parent"] for node in record["nodes"]}
    return {
        "agent": record["agent"]["name"],
        "trainable": record["agent"]["trainable"],
        "reward": None if unscored else sum(each["score"] * each["weight"] for each in record["rewards"].values()),
        "rewards": compact_json(record["rewards"]),
        "metrics": compact_json(record["metrics"]),
        "info": compact_json(record["info"]),
        "stop_condition": record["stop_condition"],
        "is_truncated": is_truncated(record),
        "num_turns": sum(node["sampled"] for node in record["nodes"]),
        "num_branches": sum(number not in parents for number in range(len(record["nodes"]))),
        **error_columns(failure),
        "started_at": _timestamp(timing["start"]),
        "setup_seconds": _duration(timing["boot"]) + _duration(timing["setup"]),
        "generation_seconds": _duration(timing["agent"]),
        "model_seconds": sum(_duration(call["time"]) for call in calls),
        "scoring_seconds": _duration(timing["scoring"]),
    }


def _duration(span: Row) -> float:
    return max(0.0, span["end"] - span["start"]) if span["end"] else 0.0


def is_truncated(record: Row) -> bool:
    """Tell whether a limit ended the trace: one of the framework's, or that on the length of the last response."""
    last = next((call for call in reversed(record["calls"]) if call["error"] is None), None)
    return record["stop_condition"] in LIMITS or (last is not None and last["finish_reason"] == "length")


def _token_counts(record: Row) -> dict[str, int]:
    """Return the numbers of input tokens, each counted once, and of sampled ones; the provider's for a chat API."""
    if is_chat_only(record):
        num_sampled = sum(call["usage"]["completion_tokens"] for call in record["calls"] if call["usage"])
        return {"num_input_tokens": record["num_input_tokens"], "num_output_tokens": num_sampled}
    num_tokens = sum(len(node["mask"]) for node in record["nodes"])
    num_sampled = sum(sum(node["mask"]) for node in record["nodes"])
    return {"num_input_tokens": num_tokens - num_sampled, "num_output_tokens": num_sampled}


def _remaining_record(record: Row) -> Row:
    """Return the record without the fields that columns of messages or traces hold exactly."""
    nodes = [{name: node[name] for name in node if name not in NODE_COLUMNS} for node in record["nodes"]]
    return {name: record[name] for name in record if name not in TRACE_COLUMNS} | {"nodes": nodes}


def error_columns(failure: Failure | None) -> Row:
    """Return the four error columns; all null without a failure."""
    return {
        "error_class": failure and failure.kind,
        "error_type": failure and failure.type,
        "error_message": failure and failure.message,
        "error_traceback": failure and failure.traceback,
    }


def message_rows(record: Row) -> list[Row]:
    """Return the rows of a trace's messages from its record: plain JSON values, with all lists of every node."""
    return [
        {
            "trace_id": record["id"],
            "message": number,
            "parent": node["parent"],
            "role": node["message"]["role"],
            "content": message_text(node["message"].get("content")),
            "body": strict_json(node["message"]),
            "sampled": node["sampled"],
            "token_ids": node["token_ids"],
            "mask": node["mask"],
            "is_content": node["is_content"],
            "logprobs": spread_logprobs(node["logprobs"], node["mask"]),
            **({EXPERTS: node[EXPERTS]} if EXPERTS in node else {}),
        }
        for number, node in enumerate(record["nodes"])
    ]


def spread_logprobs(logprobs: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """Return one value per token: the log-probs in order where the mask is set, 0.0 elsewhere.

    There must be one log-prob for every set position; anything else is a fault of the engine's client.
    """
    assert len(logprobs) == sum(mask), f"{len(logprobs)} log-probs for {sum(mask)} sampled tokens"
    values = iter(logprobs)
    return [next(values) if sampled else 0.0 for sampled in mask]


def row_without_trace(failure: Failure | None, origin: RolloutOrigin, started_at: float, seconds: float) -> Row:
    """Return the row of a rollout that left no trace, with a new trace id."""
    return {
        **origin.columns,
        "trace_id": uuid.uuid4().hex,
        "episode_id": uuid.uuid4().hex,
        "agent": "agent",
        "trainable": True,
        "reward": None,
        **dict.fromkeys(("rewards", "metrics", "info", "record"), "{}"),
        "stop_condition": None,
        "is_truncated": False,
        **dict.fromkeys(("num_turns", "num_branches", "num_input_tokens", "num_output_tokens"), 0),
        **error_columns(failure),
        "started_at": _timestamp(started_at),
        **dict.fromkeys(("setup_seconds", "model_seconds", "scoring_seconds"), 0.0),
        "generation_seconds": seconds,
    }


def rebuild(trace_row: Mapping[str, Any], message_rows: Sequence[Mapping[str, Any]]) -> Row:
    """Return the trace as it came over the wire, from its row and messages; `{}` for a row without a trace."""
    record: Row = json.loads(trace_row["record"])
    if "nodes" not in record:
        return {}
    record["id"] = trace_row["trace_id"]
    for name in ("rewards", "metrics", "info"):
        record[name] = json.loads(trace_row[name])
    # Rows of a table have no order of their own: sorted by their number, they are the nodes again.
    for node, row in zip(record["nodes"], sorted(message_rows, key=lambda row: row["message"]), strict=True):
        node.update({name: row[name] for name in ("parent", "sampled", "token_ids", "mask", "is_content")})
        node["message"] = json.loads(row["body"])
        node["logprobs"] = [value for value, sampled in zip(row["logprobs"], row["mask"], strict=True) if sampled]
    return record


def _json_value(value: Any) -> Any:
    """Return a trace's info as JSON values: NaN stays NaN, bytes become text if they are UTF-8, else base64.

    It came over the wire as msgpack, which has bytes and keys of any plain type.
    """
    if isinstance(value, dict):
        return {_json_key(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _json_key(name: Any) -> str:
    plain = _json_value(name)
    return plain if isinstance(plain, str) else json.dumps(plain)


def message_text(content: Any) -> str | None:
    """Return a message's text: a line for each of its text parts, if it has parts; None without any text."""
    if content is None or isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text"]
    return "\n".join(texts) if texts else None


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces; NaN is spelt NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def compact_json(value: Any) -> str:
    """Return JSON without spaces, in which NaN and infinities stay as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def strict_json(value: Any) -> str:
    """Return JSON without spaces. Raises ValueError or TypeError for what JSON has not, NaN among it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _timestamp(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

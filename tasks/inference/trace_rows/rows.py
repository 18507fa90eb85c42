"""Converts finished and failed rollouts to rows of the tables traces and messages, and back."""

import base64
import datetime
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.inference.trace_rows.failures import Failure, failure_of_trace, is_chat_only
from tasks.inference.trace_rows.images import extract_images

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace

Row = dict[str, Any]
NODE_COLUMNS = ("parent", "message", "sampled", "token_ids", "mask", "is_content", "logprobs")
"""Fields of a node that are columns of messages; its other fields are in the trace's record."""


@dataclass(frozen=True)
class RolloutOrigin:
    """What all rows of one rollout share: its assignment, and the policy and temperature that sampled it."""

    assignment: Mapping[str, Any]
    policy_key: str
    policy_version: int
    step: int
    temperature: float

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


def trace_tables(traces: Iterable[Row], messages: Iterable[Row]) -> dict[str, pa.Table]:
    """Return rows as Arrow tables with exactly the contract's schemas; images by reference, in a table of their own."""
    return extract_images(
        pa.Table.from_pylist(list(traces), schema=TRACES.arrow),
        pa.Table.from_pylist(list(messages), schema=MESSAGES.arrow),
    )


def rows_of_trace(trace: "WireTrace", origin: RolloutOrigin, episode_id: str) -> tuple[Row, list[Row]]:
    """Return one trace's row and its messages' rows. Nothing is lost: see `rebuild`."""
    record = wire_record(trace)
    return _trace_row(trace, record, origin, episode_id, failure_of_trace(record)), message_rows(record)


def wire_record(trace: "WireTrace") -> Row:
    """Return a trace as plain JSON values: all digits, NaN and infinities included, the engine's API key left out."""
    from verifiers.v1.trace import EXCLUDE_FIELDS

    record: Row = trace.model_dump(
        mode="json", exclude=EXCLUDE_FIELDS | {"info": True}, context={"float_decimals": None}, serialize_as_any=True
    )
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


def _trace_row(trace: "WireTrace", record: Row, origin: RolloutOrigin, episode_id: str, failure: Failure | None) -> Row:
    unscored = failure is not None or not record["rewards"]
    timing, sampling = trace.timing, trace.agent.config.sampling
    own_temperature = None if sampling is None else sampling.temperature  # a seat may have its own
    return {
        **origin.columns,
        "temperature": origin.temperature if own_temperature is None else own_temperature,
        "trace_id": trace.id,
        "episode_id": episode_id,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "reward": None if unscored else trace.reward,
        "rewards": compact_json(record["rewards"]),
        "metrics": compact_json(record["metrics"]),
        "info": compact_json(record["info"]),
        "stop_condition": trace.stop_condition,
        "is_truncated": trace.is_truncated,
        "num_turns": trace.num_turns,
        "num_branches": trace.num_branches,
        **_token_counts(trace, record),
        **error_columns(failure),
        "started_at": _timestamp(timing.start),
        "setup_seconds": timing.boot.duration + timing.setup.duration,
        "generation_seconds": timing.agent.duration,
        "model_seconds": sum(call.time.duration for call in trace.calls),
        "scoring_seconds": timing.scoring.duration,
        "record": compact_json(_remaining_record(record)),
    }


def _token_counts(trace: "WireTrace", record: Row) -> dict[str, int]:
    """Return the numbers of input tokens, each counted once, and of sampled ones; the provider's for a chat API."""
    if is_chat_only(record):
        num_sampled = trace.usage.completion_tokens if trace.usage else 0
        return {"num_input_tokens": trace.num_input_tokens, "num_output_tokens": num_sampled}
    mask = [own for node in record["nodes"] for own in node["mask"]]
    return {"num_input_tokens": mask.count(False), "num_output_tokens": mask.count(True)}


def _remaining_record(record: Row) -> Row:
    """Return the record without the fields that columns of messages or traces hold exactly."""
    nodes = [{name: value for name, value in node.items() if name not in NODE_COLUMNS} for node in record["nodes"]]
    rest = {name: value for name, value in record.items() if name not in ("id", "rewards", "metrics", "info")}
    return {**rest, "nodes": nodes}


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
            "content": _text(node["message"].get("content")),
            "body": compact_json(node["message"]),
            "sampled": node["sampled"],
            "token_ids": node["token_ids"],
            "mask": node["mask"],
            "is_content": node["is_content"],
            "logprobs": spread_logprobs(node["logprobs"], node["mask"]),
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


def row_of_failure(failure: Failure, origin: RolloutOrigin, started_at: float, seconds: float) -> Row:
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

    It came over the wire as msgpack, which has bytes and keys of any plain type. JSON has neither, and one value that
    cannot be written must not fail the whole batch.
    """
    if isinstance(value, dict):
        return {name if isinstance(name, str) else _json_key(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _json_key(name: Any) -> str:
    plain = _json_value(name)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _text(content: Any) -> str | None:
    """Return a message's text: a line for each of its text parts, if it has parts; None without any text."""
    if content is None or isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("type") == "text"]
    return "\n".join(texts) if texts else None


def compact_json(value: Any) -> str:
    """Return JSON without spaces, in which NaN and infinities stay as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _timestamp(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

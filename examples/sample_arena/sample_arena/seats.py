"""Seats: which member of an episode learns, and the tasks that each sits down to."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from sample_arena.errors import ArenaError, MemberFailed, PlayError, PromptTooLong

ALTERNATE = "alternate"
TOO_LONG = frozenset({"max_total_tokens", "max_input_tokens"})
"""Why verifiers stops a rollout whose conversation no longer fits; a truncation, not an error."""


def require_learner(setting: str, rivals: Sequence[str]) -> None:
    """Raise ArenaError where the setting names nobody who can learn."""
    if setting not in ("", ALTERNATE, *rivals):
        raise ArenaError(f"learner_seat = {setting!r}: name one of {list(rivals)}, {ALTERNATE!r}, or leave it empty")


def learner(setting: str, rivals: Sequence[str], key: str) -> str | None:
    """Return who learns in the episodes of the example `key`; None where nobody is singled out.

    `alternate` draws by hash: all episodes of an example have the same learner, and examples share out the seats. A
    name pins the seat, as evaluations do so that checkpoints compare.
    """
    if setting != ALTERNATE:
        return setting or None
    return rivals[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(rivals)]


def require_text(data: vf.TaskData) -> None:
    """Raise ArenaError where the task shows images: what one member may see and others hear is kept in text alone."""
    for message in data.prompt if isinstance(data.prompt, list) else ():
        parts = message.content if isinstance(message.content, list) else ()
        if strange := sorted({part.type for part in parts if part.type != "text"}):
            raise ArenaError(
                f"task {data.idx}: its prompt has {strange[0]}, and an arena passes text alone between its members. "
                "Play it with one agent, or describe the image in words"
            )


def seated(task: vf.Task, system: str | None) -> vf.Task:
    """Return the task as a member gets it: the same data, opened by the arena, with the member's system prompt."""
    return type(task)(task.data.model_copy(update={"prompt": None, "system_prompt": system}), task.config)


def unfinished(member: str, trace: vf.Trace) -> PlayError:
    """Return why a member's turn ended without a reply."""
    if not trace.errors and not trace.is_timeout and trace.stop_condition in TOO_LONG:
        return PromptTooLong(member, str(trace.stop_condition))
    last = trace.errors[-1] if trace.errors else None
    return MemberFailed(member, f"{last.type}: {last.message}" if last else str(trace.stop_condition))


def flag_unreadable(trace: vf.Trace) -> None:
    """Note that the last reply could not be read, by its number in the trace: it must not be trained on."""
    sampled = [number for number, node in enumerate(trace.nodes) if node.sampled]
    info: dict[str, Any] = trace.info
    info.setdefault("parse_errors", []).append(sampled[-1])


def reply_of(segment: vf.Segment) -> str:
    """Return the text of a segment's last reply, white space and all; thoughts that were set apart are not in it."""
    said = [message.content for message in segment.messages if message.role == "assistant"]
    return (said[-1] if said else None) or ""


def noted(traces: Mapping[str, vf.Trace], seat: str | None, stop: str | None = None) -> None:
    """Write onto every trace who learns, and why the play ended."""
    for trace in traces.values():
        if seat is not None:
            trace.info["learner_seat"] = seat
        if stop is not None:
            trace.info["stop"] = stop

"""Traces of any shape, built turn by turn through verifiers' own graph, and sent as a server sends them.

The renderer here is the simplest that is honest: a role's token, a token for each byte, an end. What was reasoned is
in a reply's tokens when it is sampled and not in later prompts, as with templates that are not stable prefixes.
"""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END, FIRST = 5, 10
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict_mode": [1.5, None]}
WORDS = st.text(max_size=8) | st.sampled_from(
    ["", "\x00", "é漢🎉", "<|im_end|>", "stagecoach-image:sha256:0", "x" * 300]
)
PICTURES = st.binary(max_size=6).map(lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}")
URLS = PICTURES | st.sampled_from(["https://a.example/b.png", "data:image/png;base64,=broken", "stagecoach-image:x"])
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": WORDS})
    | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": URLS})}),
    max_size=3,
)
CONTENT = WORDS | PARTS
CALL = st.fixed_dictionaries({"name": st.just("look"), "arguments": WORDS | st.just('{"a": 1e400}')})
REPLY = st.fixed_dictionaries(
    {"content": st.none() | WORDS, "reasoning_content": st.none() | WORDS, "calls": st.lists(CALL, max_size=2)}
)
MOVE = st.sampled_from(["asks", "answers", "rewinds", "compacts", "delegates"])
SCRIPT = st.lists(st.tuples(MOVE, CONTENT, REPLY), min_size=1, max_size=5)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
NOTES = st.dictionaries(
    WORDS,
    st.recursive(st.none() | st.booleans() | NUMBERS | WORDS | URLS, lambda one: st.lists(one, max_size=2)),
    max_size=2,
)


def codes(text: str) -> list[int]:
    """The tokens of a text: one for each byte."""
    return [FIRST + byte for byte in text.encode()]


def body(message: dict[str, Any]) -> str:
    """What of a message a prompt shows."""
    shown = [message.get("content"), [call["arguments"] for call in message.get("tool_calls") or []]]
    return json.dumps(shown, ensure_ascii=False)


def rendered(messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[tuple[int, int]], list[bool]]:
    """A prompt's tokens, each message's span, and which tokens are content; the reply's opening at the end."""
    ids: list[int] = []
    spans, content = [], list[bool]()
    for message in messages:
        own = codes(body(message))
        spans.append((len(ids), len(ids) + len(own) + 2))
        ids += [ROLES[message["role"]], *own, END]
        content += [False, *[True] * len(own), False]
    return [*ids, ROLES["assistant"]], spans, [*content, False]


class Player:
    """Plays scripts on a trace: each move leads to one model call."""

    def __init__(self, trace: Any) -> None:
        self.trace = trace
        self.history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        self.num_prompt_tokens = 0
        """What a record of whole prompts would hold."""

    def move(self, kind: str, content: Any, reply: dict[str, Any]) -> None:
        """Change the history as `kind` says, and let the model reply to it."""
        last = self.history[-1]
        if kind == "compacts":  # the past is told in a sentence: a new root
            self.history = [{"role": "system", "content": f"So far: {len(self.history)}"}]
        elif kind == "delegates":
            self.history = [{"role": "system", "content": "You help."}]
        elif kind == "rewinds":
            self.history = self.history[: max(1, len(self.history) - 3)]
        if kind == "answers" and last.get("tool_calls"):
            for call in last["tool_calls"]:
                self.history.append({"role": "tool", "tool_call_id": call["id"], "name": "look", "content": content})
        else:
            self.history.append({"role": "user", "content": content})
        self.history.append(self._sampled(reply))

    def _sampled(self, reply: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.trace import ModelCall, TimeSpan
        from verifiers.v1.types import Response, Tool, TurnTokens, Usage

        number = len(self.trace.calls)
        calls = [{"id": f"c{number}.{i}", **call} for i, call in enumerate(reply["calls"])]
        said = {"role": "assistant", "content": reply["content"], "tool_calls": calls or None}
        prompt_ids, spans, content = rendered(self.history)
        completion = [*codes((reply["reasoning_content"] or "") + body(said)), END]
        message = messages([said | {"reasoning_content": reply["reasoning_content"]}])[0]
        turn = prepare_turn(self.trace, messages(self.history), [Tool.model_validate(TOOL)])
        tokens = TurnTokens(
            prompt_ids=prompt_ids,
            completion_ids=completion,
            completion_logprobs=[-(i + 1) / 8 - number for i in range(len(completion))],
            message_spans=spans,
            is_content=content,
        )
        response = Response(id=str(number), created=0, model="m", message=message, finish_reason="stop", tokens=tokens)
        node = turn.commit(response)
        used = Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(completion))
        when = TimeSpan(start=1000.0 + number, end=1000.25 + number)
        self.trace.calls.append(ModelCall(node=node, model="m", finish_reason="stop", usage=used, time=when))
        self.num_prompt_tokens += len(prompt_ids) + len(completion)
        return said | {"reasoning_content": reply["reasoning_content"]}


def messages(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The messages as verifiers types them."""
    from pydantic import TypeAdapter
    from verifiers.v1.types import Message

    kind: TypeAdapter[Any] = TypeAdapter(Message)
    return [kind.validate_python(row) for row in rows]


def blank(agent: str = "agent", **task: Any) -> Any:
    """A trace of `agent` before its first turn; `task` are fields of the task that nobody here knows."""
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, TraceTask, WireTrace

    data = WireTaskData.model_validate({"idx": 3, "prompt": None, **task})
    stamp = TraceTask(type="Task", data=data, key="k")
    config = WireAgentConfig.model_validate(WireAgentConfig().model_dump())  # else a default of it is 3600, not 3600.0
    return WireTrace(task=stamp, agent=AgentInfo(config=config, name=agent), ok=True, is_completed=True)


async def sent(traces: Sequence[Any], turns: Sequence[Callable[[], None]]) -> Any:
    """Play `turns` on a server's traces; return the episode that a client has in the end, delta by delta."""
    from verifiers.v1.episode import Episode, WireEpisode
    from verifiers.v1.serve.delta import DeltaStreamer, EpisodeAssembly, TraceSummary, dump, pack, unpack

    assembly = EpisodeAssembly()

    async def send(delta: dict[str, Any]) -> None:
        assembly.apply(unpack(pack(delta)))

    streamer = DeltaStreamer(lambda: traces, send)
    for turn in turns:
        turn()
        await streamer.flush()
    episode = Episode(task=traces[0].task, ok=True)
    head = unpack(pack(dump(episode, exclude={"traces"})))
    sizes = [TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls)) for trace in traces]
    return WireEpisode.model_validate(assembly.finish(head, sizes))

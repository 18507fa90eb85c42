"""Rollouts of an enemy: texts that try to act where they are shown, and runs whose every text is made of them.

`hostile_store` walks the real pipeline in this process, in which sampling and training are played.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import View
from flows.runtime import evaluation as evaluating
from flows.runtime import loops as walks
from flows.runtime.pipeline import GateRefused
from flows.runtime.session import record_run
from storage.schemas.stage_tables import EXAMPLES
from storage.store import Store
from tasks.gate.stage import Answer, Question
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Tables
from tests.builders import example, message, table, trace
from tests.crash import fixed
from tests.flows import rehearsal, replays

TEXTS: dict[str, str] = {
    "script": "<script>alert(1)</script>",
    "script_end": "</script><script src=//evil.example/x.js></script>",
    "handler": "<img src=x onerror=alert(1)>",
    "double_quote": '" onmouseover="alert(1)" x="',
    "single_quote": "' onfocus='alert(1)' autofocus='",
    "textarea": "</textarea></title></style></pre></template><b onclick=alert(1)>",
    "comment": "<!-- --><!--><img src=x onerror=alert(1)>-->",
    "cdata": "<![CDATA[<b>]]><?php echo 1 ?>",
    "svg": "<svg/onload=alert(1)><a xlink:href=javascript:alert(1)><text>x</text></a></svg>",
    "frame": '<iframe srcdoc="<script>alert(1)</script>"></iframe><base href=//evil.example/><meta http-equiv=refresh '
    "content=0;url=//evil.example/><form action=//evil.example/><input name=x></form>",
    "css": "red;background:url(//evil.example/x);} body{display:none} </style>",
    "link": "javascript:alert(1) data:text/html,<script>alert(1)</script> //evil.example/x https://evil.example/x",
    "entity": "&lt;script&gt; &#x3c;img src=x onerror=alert(1)&#x3e; &amp;amp;",
    "template": "{{7*7}} {% raw %} {%for x in ().__class__.__base__.__subclasses__()%}{# #} ${7*7} #{7*7} %s {0!r}",
    "json": '"},"x":{"__proto__":{"a":1}} \\" \\u003cscript\\u003e \\ud800 \\',
    "separators": "a\u2028alert(1)\u2029b",
    "colours": "\x1b[31;5mred\x1b[0m \x1b[8mhidden\x1b[28m",
    "screen": "\x1b[2J\x1b[3J\x1b[H\x1b[1A\x1b[2K\x1b[?1049h\x1bc gone",
    "title": "\x1b]0;root@host\x07 \x1b]2;x\x1b\\ \x1b]52;c;ZXZpbA==\x07",
    "osc_link": "\x1b]8;;https://evil.example/\x1b\\click\x1b]8;;\x1b\\",
    "device": "\x1bP1$r0m\x1b\\ \x1b[6n \x1b[c \x1b_Gx\x1b\\ \x1b^p\x1b\\ \x1b#8",
    "eight_bit": "\x9b31mred\x9b0m \x9d0;title\x9c \x90q\x9c \x84\x85\x88\x8d",
    "controls": "nul \0 bell \x07 back\b\b\b line\rover vertical\v feed\f shift\x0e\x0f delete\x7f end",
    "rich": "[bold red]x[/] [/] [link=https://evil.example]y[/link] [@click=app.bell]z[/] :smile: :bomb: [",
    "markdown": "![i](https://evil.example/i.png) [a](https://evil.example) <https://evil.example> ![r][1] [1]: //evil",
    "markdown_blocks": "\n\n# heading\n\n| a | b |\n|---|---|\n| <b>x</b> | y |\n\n- item\n\n> quote\n\n```\nc\n```\n"
    "\n---\n\n[ref]: https://evil.example 'x'\n\n[ref]\n\n<div onclick=alert(1)>\n\n<b>x</b>\n\n</div>\n\n~~~\n<i>",
    "markdown_ends": "\\| a \\` ` `` ``` *x* __y__ ~~z~~ www.evil.example a@evil.example https://evil.example/<br>\\",
    "overrides": "user\u202egnp.exe\u202c \u2067right\u2069 \u200fmark\u200e \u061c",
    "hidden": "a\u200bb\u200cc\u200dd\u2060e\ufefff\xadg\u180eh\u3164i\U000e0041\U000e007f\ufe0f\u034f",
    "noncharacters": "\ufffe \uffff \U0010ffff \ufdd0 \ue000 \ufffd",
    "zalgo": "z" + "\u0301\u0316\u0489" * 40 + "a" + "\u0338" * 200 + "lgo",
    "scripts": "naïve עִבְרִית مرحبا हिन्दी ไทย 日本語 👩\u200d👩\u200d👧 👍🏽 ﷽ 𒐫",
    "formula": "=cmd|' /C calc'!A0,+1+1,-1,@SUM(1)",
    "path": "../../etc/passwd",
    "url": "a/b?c=d&e#f%2e%2e%2f%00;g:h@i[j]",
    "sql": "'; drop table traces; --",
    "long": "w" * 5000 + " " + "x " * 2000,
    "lines": "line\n" * 500,
    "blank": " \t \n ",
    "empty": "",
}
"""What is written, by what it tries; all of it is valid UTF-8, as what is not cannot be stored."""
ALL = "\n".join(f"{name}: {text}" for name, text in TEXTS.items())
SHORT = [text for name, text in TEXTS.items() if name not in ("long", "lines", "blank", "empty", "markdown_blocks")]
"""Those that may be a name or an id."""
HUGE = "<b>\x1b[31m\u202ex" * (10 * 2**20 // 13)
"""10 MB of one line."""
ENVIRONMENT = "<b onclick=alert(1)>[red]x[/]\x1b[31m\u202e| a |"
HELD_OUT = "![i](https://evil.example/i.png)\x1b[2J\u202e"
_ACTING = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff\U000e0000-\U000e0fff\U0010ffff]"
)
"""Characters that act on a terminal, turn what is read or hide; flows.reporting.texts says what is done with them."""


def acting(text: str) -> set[str]:
    """Return the characters of a printed text that act or hide; a newline and a tab do not."""
    return set(_ACTING.findall(text))


@dataclass(frozen=True)
class Hostile:
    """A store of hostile runs and what is worth opening in it."""

    store: Store
    run: str
    """A run of two finished steps, with evaluations and decisions of a person."""
    replayed: str
    """The same, credited by another algorithm, without rollouts in quarantine; its last event is a failure."""
    refused: str
    """A run whose first batch a person refused."""
    traces: tuple[str, ...]
    """The ids of the first run's rollouts for training."""
    questions: tuple[Question, ...]
    """What the person was asked."""


class Person:
    """Answers what is asked at a gate, in words of an enemy."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[Question] = []

    def __call__(self, question: Question) -> Answer:
        self.asked.append(question)
        return Answer(self.answers.pop(0), SHORT[0] + TEXTS["colours"], ALL)


def hostile_store(root: Path) -> Hostile:
    """Make a store at `root` in which every text that a model, an environment or a person can set is hostile."""
    person, harsh = Person(True, True), Person(False)
    shared = {"environments": ({"name": ENVIRONMENT, "taskset": {"id": fixed.ENVIRONMENT}},), "gate": {"type": "pause"}}
    shared |= {"filtering": {"filters": ({"type": "errored"}, NOTICED)}}
    evaluated = {"every": 2, "num_examples": 2, "attempts": 2, "pass_at": (1, 2), "sets": ({"name": HELD_OUT},)}
    store = _train(root, "base", person, **shared, evaluation=evaluated)
    with pytest.raises(GateRefused):
        _train(root, "refused", harsh, **shared, seed=8)
    names = [row["trace_id"] for row in _traces(store, "base")]
    unfit = [row["trace_id"] for row in _traces(store, "base") if row["error_class"] is None][:2]
    store.quarantines.record(unfit, where=ALL, reason=ALL, run="base")
    replays.walk(replays.ask(root, name="replayed", overrides=[replays.RLOO]))
    store.runs.record(run="replayed", event="failed", message=ALL)
    return Hostile(store, "base", "replayed", "refused", tuple(names), (*person.asked, *harsh.asked))


NOTICED: dict[str, Any] = {
    "type": "custom",
    "name": TEXTS["handler"] + TEXTS["rich"] + TEXTS["colours"],
    "function": "tests.hostile:noticed",
}
"""A filter of one's own that finds something hostile in every rollout, and lets all of them through."""


def noticed(material: Any) -> dict[int, dict[str, Any]]:
    """Return hostile evidence for every rollout."""
    return {row: {ALL: ALL, "found": TEXTS["script"]} for row in range(material.traces.num_rows)}


def _train(root: Path, name: str, person: Person, **changes: Any) -> Store:
    session = rehearsal.session_for(root, name, person, **changes)
    with _played(), record_run(session):
        walks.loop_train(session)
    return session.place.store


@contextmanager
def _played() -> Iterator[None]:
    """Within the block, the walks of flows sample what an enemy would."""
    own: dict[str, Callable[..., Tables]] = {"examples": _examples, "rollout": sampled}

    class Playing(rehearsal.Rehearsal):
        def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Any:
            stage = rehearsal.STAND_INS.get(task.stage.name, task.stage)
            stage = replace(stage, function=own[stage.name]) if stage.name in own else stage
            return super(rehearsal.Rehearsal, self).__call__(rehearsal.Played(stage), *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "Executor", Playing)
        patch.setattr(evaluating, "Executor", Playing)
        yield


def _examples(tables: Tables, view: View) -> Tables:
    task = json.dumps({"prompt": ALL, ALL: {"tier": [ALL]}, "half": "\ud800"})
    splits = ["train"] * fixed.NUM_EXAMPLES + ["eval"] * 4
    rows = [
        example(f"{SHORT[number % len(SHORT)]} {number}", ENVIRONMENT, split) | {"task": task}
        for number, split in enumerate(splits)
    ]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


def sampled(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
    """Stand in for sampling: the tokens and rewards of the fixed rollouts, the texts of an enemy."""
    found = rehearsal.sampled(tables, config, step=step, policy=policy)
    names, traces, messages = {}, [], []
    for number, row in enumerate(found["traces"].to_pylist()):
        names[row["trace_id"]] = f"{SHORT[number % len(SHORT)]} {row['trace_id']}"
        traces.append(_trace(row | {"trace_id": names[row["trace_id"]]}, fails=number % 6 == 5))
    texts = count()
    for row in found["messages"].to_pylist():
        messages.append(_message(row | {"trace_id": names[row["trace_id"]]}, next(texts)))
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


def _trace(row: Mapping[str, Any], fails: bool) -> dict[str, Any]:
    """Return a rollout with hostile words in every column for words; one that fails has no reward."""
    noted = {ALL: ALL, "list": [ALL, {ALL: None}], "half": "\\ud800", "deep": _deep(200)}
    words: dict[str, Any] = {
        "agent": TEXTS["handler"] + TEXTS["rich"] + "\x1b[31m",
        "stop_condition": ALL,
        "episode_id": f"{SHORT[0]} {row['trace_id']}",
    }
    words |= {"rewards": json.dumps({text: {"score": 0.5, "weight": 1.0} for text in SHORT} | {ALL: None})}
    words |= {"metrics": json.dumps({text: 0.25 for text in SHORT} | {"none": float("nan")})}
    words |= {"info": json.dumps(noted, ensure_ascii=False), "record": json.dumps(_record())}
    if fails:
        words |= {"reward": None, "error_class": "environment", "error_type": SHORT[0] + TEXTS["colours"]}
        words |= {"error_message": ALL, "error_traceback": f"Traceback (most recent call last):\n{ALL}"}
    return trace(**{**row, **words})


def _record() -> dict[str, Any]:
    task = {"type": ALL, "data": {"prompt": ALL, "half": "\ud800", ALL: ALL}, "key": ALL, "hash": ALL}
    tool = {"type": "function", "name": SHORT[0], "description": ALL, "parameters": {"properties": {ALL: {}}}}
    agent = {"config": {"model": ALL, "harness": {"id": ALL}}, "name": ALL, "trainable": True}
    return {
        "version": 1,
        "task": task,
        "agent": agent,
        "tools": [tool],
        "nodes": [{"timestamp": 0.0, "tools": [tool]}, {}],
    }


def _message(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with one of the texts, or all; answers call tools in words of their own."""
    text = [*TEXTS.values(), ALL][number % (len(TEXTS) + 1)]
    body: dict[str, Any] = {"role": row["role"], "content": [{"type": "text", "text": text}, {"type": ALL, ALL: ALL}]}
    if row["sampled"]:
        arguments = [json.dumps({ALL: ALL, "half": "\ud800"}), ALL, json.dumps(_deep(500)), TEXTS["json"]]
        calls = [
            {"id": ALL, "type": "function", "name": SHORT[place], "arguments": each}
            for place, each in enumerate(arguments)
        ]
        body |= {"content": text, "reasoning_content": ALL, "tool_calls": calls, "provider_state": {ALL: ALL}}
    role = row["role"] if row["sampled"] else TEXTS["handler"] + "\x1b[31m"
    return message(**{**row, "content": text, "body": json.dumps(body), "role": role})


def _deep(levels: int) -> Any:
    """Return a value of many levels of lists."""
    value: Any = TEXTS["script"]
    for _ in range(levels):
        value = [value]
    return value


def _traces(store: Store, run: str) -> list[dict[str, Any]]:
    """Return the rows of a run's rollouts for training that say which they are and whether they failed."""
    entries = [
        each for each in store.ledger.entries(run=run, stage="rollout") if each.slices("traces") and not each.part
    ]
    rows = [store.read(each.slices("traces"), ["trace_id", "group_id", "error_class"]).to_pylist() for each in entries]
    return [row for each in rows for row in each if not row["group_id"].startswith("eval-")]

"""What rollouts of many turns cost, in time and in the store: `python -m benchmarks.rollouts_of_turns [NUM]`.

Samples NUM rollouts (1,000 unless given) of `calc_tools` with up to 6 turns, and a quarter as many with up to 4, 2 and
1, through a real engine and environment servers into a real store. Those with 6 are sampled a second time with their
turns kept (`rollout.keep_turns`). The model is a small one that was shown such conversations for seconds. Prints the
tables of rollouts_of_turns.md: time by turns, where it goes, and the bytes of the tables beside those of the naive
form, in which each turn is a row with its whole prompt.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from benchmarks.breakdown.processor import difference, processor_seconds
from configs.run import RunConfig, View
from storage.schemas.stage_tables import MESSAGES, TRACES
from storage.store import open_store
from storage.turns import KeptTurns
from tasks.inference.engine.client import Engine, ServedModel
from tasks.inference.environments import servers as environments
from tasks.inference.sampling.attempts import OF_POLICY
from tasks.inference.sampling.rollouts import BatchSampler, SamplingPlan
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, SECTIONS, assigned, engine_of, served
from tests.fixtures.warming import taught

NUM, SHARE, TURNS, GROUP = 1000, 4, (1, 2, 4, 6), 10
CALLS = max(TURNS) - 1
NUM_SHOWN = 600
SETTINGS = {"enable_thinking": False}
PROCESSES = ("engine", "environment server", "client")
LISTS = ("token_ids", "mask", "is_content", "logprobs")
Row = dict[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Measured:
    """One limit of turns: what was sampled, how long it took, and how much of that each process was busy."""

    turns: int
    traces: Rows
    messages: Rows
    seconds: float
    processor: dict[str, float]

    @property
    def num_turns(self) -> int:
        """Model turns of all rollouts."""
        return sum(row["num_turns"] for row in self.traces)


def main() -> None:
    """Measure every limit of turns and print the tables."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else NUM
    directory = Path(tempfile.mkdtemp())
    try:
        model = warmed(directory / "model")
        found = []
        with engine_of(model, directory / "engine.json", config(model, 1).engine) as engine:
            print_names()
            for turns, keeps in [*((each, False) for each in TURNS), (TURNS[-1], True)]:
                num_rollouts = num if turns == TURNS[-1] else num // SHARE
                each = measured(engine, model, directory, turns, num_rollouts, keeps)
                print_times(each, ", kept" if keeps else "")
                found += [] if keeps else [each]
        print(f"\nload {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
        print_spans(found)
        print_bytes(directory / "forms", found[-1])
    finally:
        shutil.rmtree(directory)


def warmed(directory: Path) -> Path:
    """A small model that calls the calculator at every turn: with what does not matter, and is hard to guess."""
    from sample_calc_tools.demonstrations import answered
    from sample_calc_tools.sums import chains, prompt
    from sample_calc_tools.words import SCHEMA, words

    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=words())
    draw = random.Random(1)
    conversations = []
    for chain in chains(NUM_SHOWN, CALLS, seed=1):
        calls = [f"{draw.randint(10, 99)}{draw.choice('+-*')}{draw.randint(2, 9)}" for _ in range(max(TURNS))]
        asked = {"role": "user", "content": prompt(chain)}
        conversations.append(([asked, *answered(calls, 0)[:-2]], [SCHEMA]))  # without the last result and the answer
    return taught(directory, SETTINGS, conversations, batch=4)


def config(model: Path, turns: int) -> RunConfig:
    """The settings of one limit of turns."""
    environment = {
        "name": f"calc{turns}",
        "taskset": {"id": "sample_calc_tools", "num_calls": CALLS},
        "max_turns": turns,
    }
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "renderer": "qwen3", "renderer_settings": SETTINGS},
            "environments": [environment],
            "rollout": {"max_tokens": 48, "max_in_flight": 64},
            "engine": {"max_model_len": 768, "memory_gib": 0.5},
        }
    )


def measured(engine: Engine, model: Path, directory: Path, turns: int, num: int, keeps: bool) -> Measured:
    """Sample `num` rollouts into the store at `directory`, a group at a time, their turns kept meanwhile or not."""
    settings = config(model, turns)
    (environment,) = settings.environments
    examples = environments.examples(environment)
    store, groups = open_store(directory / "store"), list[dict[str, pa.Table]]()

    def keep(group_id: str, tables: dict[str, pa.Table]) -> None:
        groups.append(tables)
        for name, rows in tables.items():
            store.append(name, rows, run=f"turns{turns}", step=0, key=group_id, attempt=uuid4().hex)
        if kept:
            kept.forget([group_id])

    keeping = KeptTurns(store, f"turns{turns}") if keeps else nullcontext()
    (own := directory / f"{turns}{keeps}").mkdir()  # where the server says that it is ready
    with keeping as kept, served(environment, own) as report:
        sampler = partial(
            BatchSampler,
            served={OF_POLICY: ServedModel(engine.url, KEY, salt="kept" if keeps else "policy")},
            addresses={environment.name: (report["address"],)},
            policy=Policy("policy", 0),
            step=0,
            config=View(settings, SECTIONS, "rollout"),
            plan=SamplingPlan(turns=kept),
        )
        first, *others = examples["example_id"].to_pylist()[: num // GROUP + 1]
        # Starts the tool server, among others.
        sampler(on_group=lambda *_: None).sample(assigned(environment.name, [first], 2), examples)
        before, clock = processor_seconds(), time.monotonic()
        sampler(on_group=keep).sample(assigned(environment.name, others, GROUP), examples)
        seconds, processor = time.monotonic() - clock, difference(processor_seconds(), before)
    traces, messages = ([row for one in groups for row in one[name].to_pylist()] for name in ("traces", "messages"))
    return Measured(turns, traces, messages, seconds, processor)


def print_names() -> None:
    """Print the head of the table of times; its rows follow as they are measured, for that takes minutes."""
    processors = " | ".join(f"{name}, cpu ms a turn" for name in PROCESSES)
    print(f"| at most | rollouts | errors | turns each | ms each | ms a turn | {processors} |")
    print("|---|---:|---:|---:|---:|---:|" + "---:|" * len(PROCESSES), flush=True)


def print_times(each: Measured, how: str) -> None:
    """Print how long rollouts took, and which process was busy."""
    num, turns = len(each.traces), each.num_turns
    errors = sum(row["error_class"] is not None for row in each.traces)
    cells = [f"{each.turns} turns{how}", num, errors, f"{turns / num:.2f}", f"{each.seconds / num * 1e3:.1f}"]
    cells += [f"{each.seconds / turns * 1e3:.2f}"]
    cells += [f"{each.processor.get(name, 0.0) / turns * 1e3:.2f}" for name in PROCESSES]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_spans(found: Sequence[Measured]) -> None:
    """Print the parts of a rollout's own time."""
    spans = ("setup_seconds", "generation_seconds", "model_seconds", "scoring_seconds")
    print(f"| at most | {' | '.join(name.removesuffix('_seconds') + ', s' for name in spans)} |")
    print("|---|" + "---:|" * len(spans))
    for each in found:
        means = [sum(row[name] for row in each.traces) / len(each.traces) for name in spans]
        print(f"| {each.turns} turns | {' | '.join(f'{mean:.3f}' for mean in means)} |")


def print_bytes(root: Path, each: Measured) -> None:
    """Print the bytes of what was sampled, each form written once by the same writer."""
    tokens = sum(len(row["token_ids"]) for row in each.messages)
    naive = naive_rows(each)
    forms = {
        "traces": pa.Table.from_pylist(each.traces, schema=TRACES.arrow),
        "messages": pa.Table.from_pylist(each.messages, schema=MESSAGES.arrow),
        "a row for each turn": pa.Table.from_pylist(naive, schema=MESSAGES.arrow),
    }
    seen = sum(len(row["token_ids"]) for row in naive)
    print(f"\n{tokens} tokens of {len(each.traces)} rollouts; {seen} in whole prompts")
    print("\n| form | rows | token cells | bytes on disk | bytes a token |")
    print("|---|---:|---:|---:|---:|")
    sizes = []
    for number, (name, rows) in enumerate(forms.items()):
        table = "traces" if name == "traces" else "messages"
        piece = open_store(root / str(number)).append(table, rows, run="r", step=0, key="k", attempt="a")
        cells = 0 if name == "traces" else len(rows["token_ids"].combine_chunks().flatten())
        size = sum(file.size for file in piece.files)
        sizes.append(size)
        print(f"| {name} | {rows.num_rows} | {cells} | {size} | {size / tokens:.2f} |")
    print(f"\na row for each turn takes {sizes[2] / sizes[1]:.2f} times the bytes of messages")


def naive_rows(each: Measured) -> Rows:
    """The same rollouts as rows of turns: what the model saw and said, whole, for every turn of its own."""
    found, above = list[Row](), dict[tuple[str, int], Row]()
    for message in each.messages:
        parent = above.get((message["trace_id"], message["parent"]))
        whole = message if parent is None else {**message, **{n: parent[n] + message[n] for n in LISTS}}
        above[message["trace_id"], message["message"]] = whole = {
            **whole,
            "body": (parent or {"body": ""})["body"] + message["body"],
        }
        if message["sampled"]:
            found.append(whole | {"content": None})
    return found


if __name__ == "__main__":
    main()

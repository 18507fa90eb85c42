"""Memory and time of a step of many rollouts: `python -m benchmarks.large_step [ROLLOUTS] [TOKENS] [DIRECTORY]`.

Five kinds of processes, each started anew, so that its peak of resident memory is its own:

- one writes generated rollouts as the rollout stage commits them, finished groups after finished groups;
- one runs the stages filtering, advantage and packing on them, as a flow does;
- two read the packed rows as the two ranks of a learner do: both verify, plan and read, and no model is computed;
- one writes meanwhile the learner's file of what it measured on tokens, with generated numbers, as rank 0 does;
- one takes that file over into the tables of the training stage and runs the stage metrics, as a flow does.

Prints the table of large_step.md. The store is removed at the end.
"""

import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.run import RunConfig
from storage.refs import Entry, Slice
from storage.schemas.stage_tables import ASSIGNMENTS, MESSAGES, TOKEN_MASKS, TOKEN_STATISTICS, TRACES, UPDATES
from storage.store import open_store
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.arrays.ragged import Ragged
from tasks.filtering.stage import STAGE as FILTERING
from tasks.learner.protocol import STATISTICS_FILE
from tasks.metrics.figures import ALL, full_name, metric_values
from tasks.metrics.stage import STAGE as METRICS
from tasks.packing.stage import STAGE as PACKING
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Outputs, Ref, Stage, perform, ref_of
from tasks.training.stage import token_tables, updates_table
from tests.fixtures.builders import stage_of, trace

GROUP = 16
GROUPS_OF_PART = 16
"""Groups that end between two commits of the rollout stage."""
PROMPT = 192
TOKENS_PER_ROW = 32_768
VOCABULARY = 151_936
RANKS = 2
KEY = "rollouts"


def main() -> None:
    """Run all processes one kind after the other, and print what they took."""
    rollouts, tokens = (int(each) for each in (*sys.argv[1:3], 1_000, 8_192)[:2])
    directory = Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else None))
    cores = os.cpu_count()
    print(f"{rollouts:,} rollouts of {tokens:,} tokens; {platform.machine()}, {cores} cores, {datetime.now(UTC):%F %T}")
    print("| process | minutes | of processor | peak resident GiB | load before | GiB in the store |")
    print("|---" * 6 + "|", flush=True)
    try:
        root = directory / "store"
        line("rollouts written", root, partial(measured, write_rollouts, str(root), rollouts, tokens))
        line("filtering, advantage, packing", root, partial(measured, run_stages, str(root)))
        with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool:
            meeting, load = str(directory / "meeting"), os.getloadavg()[0]
            ranks = [pool.submit(measured, read_rows, str(root), rank, meeting) for rank in range(RANKS)]
            line("learner's file written", root, partial(measured, write_statistics, str(root), str(directory)))
            for rank, each in enumerate(ranks):
                said, *figures = each.result()
                show(f"rank {rank}: {said}", root, figures, load)
        line("training's tables, metrics", root, partial(measured, run_metrics, str(root), str(directory)))
    finally:
        shutil.rmtree(directory)


def line(name: str, root: Path, work: Callable[[], list[Any]]) -> None:
    """Do some work in a process of its own and print a line for it, and one for each part that it names."""
    load = os.getloadavg()[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        said, *figures = pool.submit(work).result()
    show(f"{name}: {said}", root, figures, load)


def show(name: str, root: Path, figures: list[float], load: float) -> None:
    """Print a line of the table."""
    minutes, processor, peak = figures
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 2**30
    print(f"| {name} | {minutes:.1f} | {processor:.1f} | {peak:.2f} | {load:.1f} | {size:.2f} |", flush=True)


def measured(work: Callable[..., str], *arguments: Any) -> list[Any]:
    """Return the text of some work, its minutes, those of the processor, and the peak of its process in GiB."""
    began, used = time.monotonic(), time.process_time()
    text = work(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [text, (time.monotonic() - began) / 60, (time.process_time() - used) / 60, peak]


def config_of(root: str) -> RunConfig:
    """Return the config of the step."""
    packing = {"tokens_per_row": TOKENS_PER_ROW}
    return RunConfig.model_validate(
        {"name": "large", "store": root, "model": {"vocab_size": VOCABULARY}, "packing": packing}
    )


def write_rollouts(root: str, rollouts: int, tokens: int) -> str:
    """Write rollouts and the ledger row of their stage."""
    store, rng, pieces = open_store(root), np.random.default_rng(0), list[Slice]()
    words = rng.integers(97, 123, 1 << 22, np.uint8)
    words[rng.random(len(words)) < 0.2] = 32
    text = words.tobytes().decode()
    for first in range(0, rollouts, GROUP * GROUPS_OF_PART):
        names = [f"{number:032x}" for number in range(first, min(first + GROUP * GROUPS_OF_PART, rollouts))]
        rows = {"traces": traces_of(names, tokens), "messages": messages_of(names, tokens, rng, text)}
        own = [
            store.append(name, table, run="large", step=0, key=KEY, attempt="rollouts") for name, table in rows.items()
        ]
        store.ledger.commit(entry_of(uuid4().hex, own))
        pieces += own
    store.ledger.commit(entry_of("", pieces))
    assigned = store.append(
        "assignments", assignments(rollouts), run="large", step=0, key="assigned", attempt="assigned"
    )
    store.ledger.commit(replace(entry_of("", [assigned]), stage="assignment", key="assigned", attempt="assigned"))
    return f"{rollouts * tokens / 1e6:.0f} M tokens in {len(pieces) // 2} parts"


def entry_of(part: str, pieces: list[Slice]) -> Entry:
    """Return the ledger row of the rollouts, or of a part of them."""
    now = datetime.now(UTC)
    return Entry("large", 0, "rollout", 1, KEY, part, "rollouts", {}, {}, tuple(pieces), now, now)


def assignments(rollouts: int) -> pa.Table:
    """Return the assignments of the rollouts."""
    rows = [
        {
            "assignment_id": f"g{number // GROUP}/{number:032x}",
            "group_id": f"g{number // GROUP}",
            "member": number % GROUP,
            "environment": "reverse",
            "example_id": "e0",
            "seed": number,
        }
        for number in range(rollouts)
    ]
    return pa.Table.from_pylist(rows, schema=ASSIGNMENTS.arrow)


def traces_of(names: list[str], tokens: int) -> pa.Table:
    """Return a part's traces; half of each group is right, so that all of them are packed."""
    rows = [
        trace(
            name,
            group_id=f"g{int(name, 16) // GROUP}",
            reward=float(int(name, 16) % 2),
            num_input_tokens=PROMPT,
            num_output_tokens=tokens - PROMPT,
            record='{"nodes": [], "note": "' + "x" * 500 + '"}',
        )
        for name in names
    ]
    return pa.Table.from_pylist(rows, schema=TRACES.arrow)


def messages_of(names: list[str], tokens: int, rng: np.random.Generator, text: str) -> pa.Table:
    """Return a prompt and an answer for each trace, with about four letters for each token."""
    lengths = np.tile([PROMPT, tokens - PROMPT], len(names))
    sampled = np.tile([False, True], len(names))
    of_token = np.repeat(sampled, lengths)
    starts = rng.integers(0, len(text) - 4 * tokens, len(lengths)).tolist()
    contents = [text[start : start + 4 * length] for start, length in zip(starts, lengths.tolist(), strict=True)]
    roles = ["user", "assistant"] * len(names)
    said_by = list(zip(roles, contents, strict=True))
    ids = rng.integers(0, VOCABULARY, lengths.sum(), np.int32)
    logprobs = np.where(of_token, -rng.exponential(0.5, len(ids)).astype(np.float32), np.float32(0))
    kinds = {name: MESSAGES.arrow.field(name).type for name in MESSAGES.arrow.names}
    columns = {
        "trace_id": pa.array(np.repeat(names, 2)),
        "message": pa.array(np.tile([0, 1], len(names)), pa.int32()),
        "parent": pa.array([None, 0] * len(names), pa.int32()),
        "role": pa.array(roles),
        "content": pa.array(contents),
        "body": pa.array([f'{{"role":"{role}","content":"{said}"}}' for role, said in said_by]),
        "sampled": pa.array(sampled),
        "token_ids": Ragged.from_lengths(ids, lengths).arrow(kinds["token_ids"]),
        "mask": Ragged.from_lengths(of_token, lengths).arrow(kinds["mask"]),
        "is_content": pa.array([[]] * len(lengths), kinds["is_content"]),
        "logprobs": Ragged.from_lengths(logprobs, lengths).arrow(kinds["logprobs"]),
    }
    return pa.table(columns, schema=MESSAGES.arrow)


def run_stages(root: str) -> str:
    """Run the stages on tables alone, as a flow does."""
    flow = Flow(root)
    with flow.context.queue_commits():
        verdicts = flow.do(FILTERING, flow.made("rollout"))
        credits = flow.do(ADVANTAGE, flow.made("rollout"), verdicts)
        batches = flow.do(PACKING, credits, flow.made("rollout"))
    return f"{batches.tokens / 1e6:.0f} M tokens in {batches.num_rows('batches')} rows; {flow.took()}"


class Flow:
    """Runs stages one after the other and notes minutes and the peak of memory after each."""

    def __init__(self, root: str) -> None:
        self.context = RunContext(open_store(root), "large", config_of(root), {})
        self._took: list[str] = []

    def made(self, stage: str) -> Ref:
        """Return what a stage has made."""
        (entry,) = (each for each in self.context.store.ledger.entries(run="large", stage=stage) if not each.part)
        return ref_of(entry, computed=False)

    def do(self, stage: Stage[Any], *refs: Ref, parameters: Any = None) -> Ref:
        """Run a stage."""
        began = time.monotonic()
        ref = perform(stage, self.context, 0, refs, parameters=parameters)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._took.append(f"{stage.name} until {peak:.2f} GiB {(time.monotonic() - began) / 60:.1f} min")
        return ref

    def took(self) -> str:
        """Return what was noted."""
        return ", ".join(self._took)


def write_statistics(root: str, directory: str) -> str:
    """Write what a learner would have measured, into the file that it leaves beside the weights."""
    flow, rng, path = Flow(root), np.random.default_rng(1), Path(directory, STATISTICS_FILE)
    schema = TOKEN_STATISTICS.arrow.append(TOKEN_MASKS.arrow.field("masked"))
    with pa.ipc.new_stream(str(path), schema) as file:
        for part in flow.context.rows("batches", [flow.made("packing")]).parts(
            ["sample_ids", "cu_seqlens", "logprobs"]
        ):
            lengths = np.concatenate([np.diff(borders) for borders in part["cu_seqlens"].to_numpy()])
            engine = Ragged.of(part["logprobs"]).values
            streams = {
                "logprobs": np.minimum(engine + rng.normal(0, 0.01, len(engine)).astype(np.float32), np.float32(0)),
                "entropies": rng.exponential(0.5, len(engine)).astype(np.float32),
                "masked": rng.random(len(engine)) < 0.01,
            }
            columns = [
                Ragged.from_lengths(each, lengths).arrow(schema.field(name).type) for name, each in streams.items()
            ]
            file.write_table(pa.table([pc.list_flatten(part["sample_ids"]), *columns], schema=schema))
    return f"{path.stat().st_size / 2**30:.2f} GiB"


def run_metrics(root: str, directory: str) -> str:
    """Take the learner's file into tables and make the metrics of the step, as a flow does."""

    def trained(tables: Any, config: Any) -> Outputs:
        return {"updates": updates_table([update]), **token_tables(Path(directory, STATISTICS_FILE))}

    flow = Flow(root)
    made = {name: flow.made(name) for name in ("assignment", "rollout", "filtering", "advantage", "packing")}
    update: dict[str, Any] = {field.name: "" if pa.types.is_string(field.type) else 0 for field in UPDATES.arrow}
    update |= {"has_optimizer": False, "masked_fraction": 0.01, "metrics": {}}
    writes = ("updates", "token_statistics", "token_masks")
    training = stage_of("training", trained, writes, ("batches",), optional=("token_masks",))
    with flow.context.queue_commits():
        made["training"] = flow.do(training, made["packing"])
        found = flow.do(METRICS, *made.values(), parameters=1)
    values = metric_values(flow.context.table("metrics", [found]))
    summary = ", ".join(
        f"{full_name(*name)} {values[name]:.17g}" for name in ((ALL, "rl_tokens"), (ALL, "mismatch_kl/std"))
    )
    return f"{flow.took()}; {len(values)} metrics, {summary}"


def read_rows(root: str, rank: int, meeting: str) -> str:
    """Read a rank's rows."""
    import torch.distributed as dist

    from storage.read.groups import open_groups
    from tasks.learner.distributed import World
    from tasks.learner.protocol import BatchReference
    from tasks.learner.rows import BatchReader

    store = open_store(root)
    (entry,) = store.ledger.entries(run="large", stage="packing")
    reference = BatchReference(root, entry.slices("batches"))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    world, began = World(rank, RANKS, rank), time.monotonic()
    (batch,) = BatchReader(open_groups(root), reference).plan(rank, world.gather, RANKS)
    planned, read, digest = (time.monotonic() - began) / 60, 0, 0
    for plan in batch.on_rank(rank, RANKS):
        if plan is not None:
            row = batch.load(plan)
            read += row.num_tokens
            digest = zlib.crc32(row.token_ids.data, digest)
    dist.destroy_process_group()
    own = f"{read / 1e6:.0f} M tokens read after {planned:.1f} min of verifying {len(entry.slices('batches'))} files"
    return f"{own} (checksum {digest:08x})"


if __name__ == "__main__":
    main()

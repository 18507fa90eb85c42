"""Makes a large store to look at: a run as training leaves it, walked by the real loop and the real stages on tables.

Rollouts, and what a learner would measure on them, are generated; the same arguments make the same rows. The other
runs of the store sample and train the last steps again with another learning rate, and credit them by another
algorithm.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from configs.run import RunConfig, View
from flows.runtime import loops
from flows.runtime.session import record_run
from storage.keys import content_key
from storage.maintenance.compact import maintain
from storage.schemas.contract import FLOATS
from storage.schemas.stage_tables import EXAMPLES, TOKEN_STATISTICS
from storage.store import Store, open_store
from tasks.arrays.ragged import Ragged
from tasks.runtime import execute
from tasks.runtime.execute import Parts
from tasks.runtime.stage import Policy, Tables
from tasks.training import policy as policy_import
from tasks.training import stage as training
from tests.fixtures import fixed, rehearsal, replays
from tests.fixtures.builders import example, failed, message, safetensors, table, trace

RUN, FORK, CREDITED = "large", "large-again", "large-rloo"
VOCABULARY, FIRST_WORD, RARE = 4096, 32, 4000
"""Size of the vocabulary, the first token id of a word, and the first that only the filter of gibberish knows."""
COMMITS_OF_STEP = 4
SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ki", "lo", "mu", "na", "pe", "qua", "ri", "so", "ti", "ve")
FILTERS = (
    {"type": "errored"},
    {"type": "truncated", "enforce": True},
    {"type": "zero_advantage"},
    {"type": "gibberish", "token_id_threshold": RARE},
    {"type": "repetition", "enforce": True, "window": 10},
)


def make(
    root: Path,
    steps: int = 200,
    rollouts: int = 512,
    group_size: int = 16,
    fork: int | None = None,
    messages: int | None = None,
    maintained: bool = False,
) -> Store:
    """Make the store at `root` with the run RUN; return it.

    A step has `rollouts` in groups of `group_size`, each of 3 to 7 messages, or of `messages`. With `fork` the store
    has the runs FORK and CREDITED, which begin at that step. `maintained` compacts the store at the end.
    """
    settings: dict[str, Any] = {
        "steps": steps,
        "assignment": {"groups_per_step": rollouts // group_size, "group_size": group_size},
        "filtering": {"filters": FILTERS},
        "packing": {"tokens_per_row": max(8192, 64 * (messages or 0))},
        "model": {"vocab_size": VOCABULARY},
        "evaluation": {"num_examples": min(32, rollouts // 16 + 1), "every": 50},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rehearsal.STAND_INS, "training", training.STAGE)
        patch.setitem(rehearsal.STAND_INS, "policy_import", policy_import.STAGE)
        patch.setattr(execute, "PAUSE_RATIO", 0.0)  # no sampling takes time between two commits
        stages: dict[str, Any] = {"examples": examples, "rollout": partial(sampled, messages)}
        with rehearsal.play_stages(**stages, policy_import=imported, training=trained):
            session = rehearsal.session_for(root, RUN, **settings)
            with record_run(session):
                loops.loop_train(session)
            if fork is not None:
                config = session.context.config
                slower = {"training": config.training.model_dump(mode="json") | {"learning_rate": 1e-4}}
                replays.walk(_fork(config, FORK, fork, ("rollout", "training"), slower))
                rloo = {"algorithm": {"type": "rloo"}}
                replays.walk(_fork(config, CREDITED, fork, ("advantage", "packing"), rloo))
    if maintained:
        maintain(open_store(root))
    return open_store(root)


def _fork(config: RunConfig, name: str, first: int, stages: tuple[str, str], changes: Mapping[str, Any]) -> RunConfig:
    """Return the config of a replay of the run's steps from `first` on; `stages` are its first and its last."""
    bounds: dict[str, Any] = {"run": config.name, "from_stage": stages[0], "until": stages[1]}
    bounds |= {"first_step": first, "last_step": config.steps}
    whole = config.model_dump(mode="json")
    replayed = {"name": name, "kind": "replay", "steps": config.steps - first, "replay": bounds}
    return RunConfig.model_validate(whole | replayed | changes)


def examples(tables: Tables, view: View) -> Tables:
    """Return 300 examples, of which every eighth is held out."""
    rows = [example(f"example-{number}", fixed.ENVIRONMENT, "train" if number % 8 else "eval") for number in range(300)]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


def sampled(messages: int | None, tables: Tables, config: View, *, step: int, policy: Policy, parts: Parts) -> Tables:
    """Hand over the rollouts of a quarter of the groups at a time, each after the commit of the one before."""
    tokens = parts.tokens
    for rows in _quarters(tables["assignments"].to_pylist()):
        traces, conversations = zip(*(rollout(row, step, policy, messages) for row in rows), strict=True)
        parts.put({"traces": table("traces", traces), "messages": table("messages", [*chain(*conversations)])})
        tokens += sum(row["num_input_tokens"] + row["num_output_tokens"] for row in traces)
        while parts.tokens < tokens:
            parts.finished_units()  # raises what a commit raised
            time.sleep(0.002)
    return {}


def _quarters(rows: list[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    groups = sorted({row["group_id"] for row in rows})
    for chosen in np.array_split(groups, min(COMMITS_OF_STEP, len(groups))):
        yield [row for row in rows if row["group_id"] in set(chosen)]


def rollout(
    assignment: dict[str, Any], step: int, policy: Policy, num_messages: int | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a trace and its messages; a 25th of the traces failed, a 25th is truncated."""
    digest = hashlib.sha256(f"{policy.key}/{assignment['assignment_id']}/{assignment['seed']}".encode()).hexdigest()
    chance, name = np.random.default_rng(int(digest[:16], 16)), digest[:32]
    mishap, luck = chance.random(2)
    rows = [said(name, number, chance) for number in range(num_messages or 3 + 2 * int(chance.integers(0, 3)))]
    skill = 0.25 + 0.55 * (1 - np.exp(-policy.version / 60))
    score = {"answer": {"score": float(luck < skill), "weight": 0.9}, "form": {"score": round(luck, 2), "weight": 0.1}}
    columns = {key: assignment[key] for key in ("assignment_id", "group_id", "environment", "example_id")}
    columns |= {"policy_key": policy.key, "policy_version": policy.version, "staleness": step - policy.version}
    columns |= {
        "num_input_tokens": sum(len(row["token_ids"]) for row in rows if not row["sampled"]),
        "num_output_tokens": sum(len(row["token_ids"]) for row in rows if row["sampled"]),
        "num_turns": sum(row["sampled"] for row in rows),
        "generation_seconds": round(0.5 + chance.gamma(4.0, 1.5), 3),
        "record": json.dumps({"nodes": [], "note": "x" * 1500}),
    }
    if mishap < 0.04:
        return failed(name, **columns), rows
    reward = sum(part["score"] * part["weight"] for part in score.values())
    return trace(name, reward=reward, rewards=json.dumps(score), is_truncated=bool(mishap > 0.96), **columns), rows


def said(name: str, number: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return a message of 10 to 40 words; those of even numbers above 0 are sampled."""
    count, sampled = int(chance.integers(10, 41)), bool(number and number % 2 == 0)
    ids = (chance.random(count) ** 3 * (RARE - FIRST_WORD)).astype(int) + FIRST_WORD
    role = "assistant" if sampled else "user" if number else "system"
    text = " ".join(SYLLABLES[i % 16] + SYLLABLES[i // 16 % 16] + SYLLABLES[i // 256 % 16] for i in ids.tolist())
    logprobs = (-chance.exponential(0.5, count) if sampled else np.zeros(count)).astype(np.float32)
    columns: dict[str, Any] = {
        "parent": number - 1 if number else None,
        "sampled": sampled,
        "role": role,
        "content": text,
    }
    columns |= {"logprobs": logprobs.tolist(), "body": json.dumps({"role": role, "content": text})}
    return message(name, number, tokens=ids.tolist(), **columns)


def imported(tables: Tables, config: View, *, key: str, source: str, directory: Path) -> Tables:
    """Return the policy that the run begins with."""
    return {"policies": _policy(key, 0, None, directory)}


def _policy(key: str, version: int, parent: str | None, directory: Path) -> pa.Table:
    """Write weights that hold the key alone and return the row of the policy."""
    (directory / "model.safetensors").write_bytes(safetensors(key.encode()))
    row = {"policy_key": key, "version": version, "parent_key": parent, "weights_sha256": content_key(key)}
    row |= {"has_optimizer": False, "probe_token_ids": [1, 2], "probe_logprobs": [0.0, -8.0]}
    return table("policies", [row])


def trained(tables: Any, config: View, *, step: int, key: str, policy: Policy, directory: Path) -> Tables:
    """Return an update and statistics of tokens: the learner's log-probs are the engine's with some noise."""
    batches = tables["batches"].table()
    chance, engine = np.random.default_rng(step), Ragged.of(batches["logprobs"]).values
    weighted = np.any([Ragged.of(batches[f"{each}_weights"]).values != 0 for each in ("rl", "ce", "ref_kl")], axis=0)
    logprobs = np.minimum(engine + chance.normal(0, 0.01, len(engine)), 0) * weighted
    entropies = chance.exponential(0.5, len(engine)) * weighted
    lengths = np.concatenate([np.diff(borders) for borders in batches["cu_seqlens"].to_numpy()])
    columns = [
        Ragged.from_lengths(values.astype(np.float32), lengths).arrow(FLOATS) for values in (logprobs, entropies)
    ]
    statistics = pa.table([pc.list_flatten(batches["sample_ids"]), *columns], schema=TOKEN_STATISTICS.arrow)
    made = rehearsal.trained(tables, config, step=step, key=key, policy=policy)
    return made | {"token_statistics": statistics, "policies": _policy(key, step + 1, policy.key, directory)}

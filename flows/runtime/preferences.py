"""Pairs of recorded rollouts, from the view `preferences` of the runs that a run of kind dpo learns from."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.algorithms import PreferencesConfig, TeacherConfig, teacher_of
from configs.errors import ConfigError
from configs.run import RunConfig
from flows.queries.step_history import StepHistory
from flows.queries.store_reader import recorded_run
from flows.queries.views import select
from storage.keys import content_key
from storage.read.frames import Frames
from storage.store import Store
from tasks.arrays.columns import texts

Pairs = tuple[Sequence[Mapping[str, Any]], Mapping[str, str]]
"""Pairs as examples, and what names them in a key: their digest and the work that they are of."""


def recorded_pairs(store: Store, config: RunConfig) -> Pairs:
    """Return the pairs that a run learns from, in the order of runs, steps and groups; of one that has begun its own.

    Raises RunUnknown for a run that the store lacks, ConfigError where none of them has a pair, or one shows images.
    """
    if begun := [entry for entry in store.ledger.entries(run=config.name, stage="examples") if "pairs" in entry.inputs]:
        tasks = texts(store.read(begun[0].slices("examples"), ["task"])["task"])
        return [json.loads(task) for task in tasks], begun[0].inputs
    frames = Frames(store)
    histories = [StepHistory(frames.graph, recorded_run(store, run)[0]) for run in dict.fromkeys(config.data.runs)]
    lineages = [lineage for history in histories for lineage in history.lineages if lineage.traces.finished]
    rows = select(frames, lineages, "select chosen, rejected, traces from preferences order by run, step, chosen")
    if not len(rows):
        raise ConfigError(
            f"data.runs: no group of {', '.join(config.data.runs)} has two different rewards, so there is no pair to "
            "learn from; name runs that trained on such groups"
        )
    scored = list(dict.fromkeys(rows["traces"]))
    origins = {key: frames.graph.origins(frames.graph.works[key], "messages") for key in scored}
    if any(origin.num_rows("images") for several in origins.values() for origin in several):
        raise ConfigError("data.runs: rollouts that show images cannot be compared yet; name runs of text")
    pairs = [{**row, "messages": [origin.key for origin in origins[row["traces"]]]} for row in rows.to_dicts()]
    # Work that an input names stays in the store: what scored rollouts, and what sampled them.
    works = dict.fromkeys([*scored, *(origin.key for several in origins.values() for origin in several)])
    return pairs, {"pairs": content_key(pairs)} | {f"rollout.{number}": key for number, key in enumerate(works)}


def require_tokenizer(store: Store, config: RunConfig) -> None:
    """Raise ConfigError where a run in data.runs has another tokenizer, RunUnknown where there is no such run."""
    for run in config.data.runs:
        if recorded_run(store, run)[1].model.tokenizer_digest != config.model.tokenizer_digest:
            raise ConfigError(
                f"data.runs: the tokens of run {run!r} are of another tokenizer than those of model.path, "
                f"{config.model.path}; take weights with the tokenizer of the run"
            )


def with_reference(config: RunConfig) -> RunConfig:
    """Return the config with the weights that the run starts from as reference, where it names no other."""
    if config.kind != "dpo" or teacher_of(config.algorithm) != TeacherConfig():
        return config
    algorithm = {"type": "preferences", "teacher": {"path": config.model.path}}
    return config.model_copy(update={"algorithm": PreferencesConfig.model_validate(algorithm)})

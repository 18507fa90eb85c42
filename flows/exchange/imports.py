"""Imports files of rollouts that others made as a run of the store, which can be replayed from filtering on.

A step of an imported run has the ledger rows of a step up to its rollouts: `examples` once, `assignment`, `import`.
The files' content and how they are read are in the keys, so that the same files again compute nothing.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from configs.environments import EnvironmentConfig
from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from configs.store_paths import relative_paths
from flows.runtime.machine_facts import config_versions, versions
from flows.runtime.resolve_run import assignments
from storage.errors import border
from storage.keys import content_key
from storage.roots import open_root
from storage.store import FORMAT, Store, open_store
from tasks.exchange import trace_import
from tasks.exchange.episodes import SAMPLED, TRAIN, Episode, ImportContext, ImportRefused, Unfit, count_reasons, refusal
from tasks.exchange.files import STEP, read_files, require_regular
from tasks.exchange.trace_import import ImportedRollouts, arrange, split_repeated, with_unique_ids
from tasks.exchange.traces import MARK
from tasks.inference.engine import model_info
from tasks.inference.engine.model_info import file_digest, model_directory, tokenizer_digest
from tasks.inference.trace_rows.demonstrations import DemonstrationUnusable, demonstration_renderer
from tasks.inference.trace_rows.image_tensors import processor_directory
from tasks.metrics import stage as metrics
from tasks.runtime.run_context import RunContext, StageKeys
from tasks.runtime.stage import perform

HELD_OUT = "an attempt at a held-out example (import them with --held-out, to train on them)"


UNKNOWN = "imported"
"""The environment that is named while that of the rollouts is not known."""


@dataclass(frozen=True)
class ImportRequest:
    """What somebody wants imported, as given; empty leaves the choice to us."""

    files: Sequence[Path]
    overrides: Sequence[str] = ()
    name: str = ""
    store: str = ""
    model: str = ""
    """Directory or hub id of the model whose tokenizer makes tokens of text; of its weights nothing is read."""
    environment: str = ""
    skip_bad: bool = False
    held_out: bool = False
    """Whether attempts at held-out examples come in as well, to be trained on."""


@dataclass(frozen=True)
class ImportOutcome:
    """What an import brought in."""

    run: str
    store: str
    num_computed: int
    """Stage results that were not there before."""
    num_steps: int
    figures: dict[str, int]
    """Rollouts by where their tokens come from, and what else is worth knowing."""
    groups: dict[str, int]
    """How many groups there are, and of how many a baseline can be made."""
    left_out: dict[str, int]
    """Lines left out, by reason."""


def import_files(request: ImportRequest) -> ImportOutcome:
    """Bring the rollouts of the files into the store as a run; nothing is written unless all lines are good.

    With `skip_bad`, lines that are not are left out and count_reasons; so are attempts at held-out examples, which only
    `held_out` brings in. A store is made only once there is something to write. Raises ImportRefused for files that
    cannot be imported, and for a name that another run has.
    """
    config = imported_config(request)
    inputs = inputs_of_import(request, config)
    # The key of the first stage stands for the whole import: it has the files and how they are read.
    key = StageKeys(config)(trace_import.EXAMPLES_STAGE, 0, inputs)
    config = config.model_copy(update={"name": config.name or f"import-{key[:8]}"})
    root = open_root(config.store)
    with border("looking for a store", root.address):
        exists = root.exists(FORMAT)  # no store is made for asking
    if exists:
        _require_free(open_store(config.store), config.name, key)
    rollouts, figures, left_out = _read(request, config)
    config = with_contents(config, rollouts)
    store = open_store(config.store)
    is_new = store.runs.last_event(config.name) != "finished"  # the same import again finds all of its results

    def record(event: str, message: str) -> None:
        settings = relative_paths(config, store.root.directory).model_dump(mode="json")
        if is_new:
            store.runs.record(run=config.name, event=event, kind="train", config=settings, message=message)

    record("started", f"import of {', '.join(map(str, request.files))}")
    computed = _write(RunContext(store, config.name, config, versions(config)), rollouts, inputs)
    groups = rollouts.groups()
    record("finished", json.dumps({"rollouts": figures, "groups": groups, "left out": left_out}))
    return ImportOutcome(config.name, config.store, computed, len(rollouts.steps), figures, groups, left_out)


def _require_free(store: Store, name: str, key: str) -> None:
    """Refuse the name of a run that is anything else than this import."""
    if name in store.runs.names() and {e.key for e in store.ledger.entries(run=name, stage="examples")} - {key}:
        raise ImportRefused(
            f"run {name!r} is in {store.root.address} with other rollouts, or was read from these files in another "
            f"way. Nothing was written. Give this import a name of its own (--name)."
        )


def _read(request: ImportRequest, config: RunConfig) -> tuple[ImportedRollouts, dict[str, int], dict[str, int]]:
    """Return what the files hold, figures about it, and how many lines were left out by reason."""
    reading = ImportContext(request.environment, config.model.vocab_size, renderer_of(config))
    episodes, problems = read_files(request.files, reading)
    # Across all files: a trace that is in two of them would count twice.
    episodes, again = split_repeated(episodes)
    names = [str(file) for file in request.files]
    problems = sorted([*problems, *again], key=lambda problem: (names.index(problem.file), problem.line))
    if problems and not request.skip_bad:
        raise refusal(problems)
    left_out = count_reasons(problems)
    if not request.held_out:
        training = [episode for episode in episodes if episode.split == TRAIN]
        left_out |= {HELD_OUT: len(episodes) - len(training)} if len(training) < len(episodes) else {}
        episodes = training
    if not episodes:
        reasons = "".join(f"; {number} x {reason}" for reason, number in left_out.items())
        raise ImportRefused(f"the files hold no rollouts{reasons}. Nothing was written.")
    found = arrange(with_unique_ids(episodes))
    return replace(found, model=config.model), _figures(episodes), left_out


def _figures(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the number of traces, and how many of them have tokens of which origin or no temperature."""
    counts: Counter[str] = Counter()
    for row in (row for episode in episodes for row in episode.traces):
        mark = json.loads(row["record"]).get(MARK, {})
        counts["traces"] += 1
        counts[f"with {mark.get('tokens') or ('sampled' if row['policy_key'] else 'rendered')} tokens"] += 1
        counts["of unknown temperature"] += "temperature" in mark and mark["tokens"] == SAMPLED
    return {name: number for name, number in counts.items() if number}


def _write(context: RunContext, found: ImportedRollouts, inputs: Mapping[str, str]) -> int:
    """Write every step as its stages; return how many stage results were computed."""
    examples = perform(trace_import.EXAMPLES_STAGE, context, 0, parameters=found, extra_inputs=inputs)
    done = [examples]
    for step in found.steps:
        assigned = perform(trace_import.ASSIGNMENT_STAGE, context, step, (examples,), parameters=found)
        traces = perform(trace_import.STAGE, context, step, (assigned, examples), parameters=found)
        measured = perform(metrics.STAGE, context, step, (assigned, traces), parameters=1)
        done += [assigned, traces, measured]
    return sum(ref.computed for ref in done)


def imported_config(request: ImportRequest) -> RunConfig:
    """Return the config of the imported run, its environments and steps still to be filled in."""
    named = {"name": request.environment or UNKNOWN, "taskset": {"id": request.environment or UNKNOWN}}
    given = {"name": request.name, "store": request.store, "model.tokenizer": request.model}
    # Options come last: they win over overrides that say the same.
    later = [*request.overrides, *assignments({name: value for name, value in given.items() if value})]
    config = load((), later, base={"kind": "train", "environments": [named], "seed": 0})
    # A replay says by model.path which weights it starts from; an imported run has none.
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": "", "tokenizer": tokenizer})
    found = config_versions(config.model_copy(update={"model": model, "environments": ()}))
    resolved = resolve(config.model_copy(update={"model": model}), found | {"model": _model(model)})
    return resolved.model_copy(update={"name": config.name})


def with_contents(config: RunConfig, found: ImportedRollouts) -> RunConfig:
    """Return the config with the environments and the number of steps that the files turned out to hold."""
    names = sorted({row["environment"] for row in found.example_rows})
    environments = tuple(EnvironmentConfig(name=name, taskset={"id": name.rpartition("+")[2]}) for name in names)
    return config.model_copy(update={"environments": environments, "steps": max(found.steps) + 1})


def _model(model: Any) -> dict[str, Any]:
    """Return what makes tokens of text: the renderer and the tokenizer's digest; nothing where no model was named."""
    if not model.tokenizer:
        return {}
    directory = model_directory(model.tokenizer)
    sized = (directory / "config.json").is_file()
    return {
        "vocab_size": model_info.read(directory).vocab_size if sized else 0,
        "renderer": model_info.renderer_name(model.renderer, model.tokenizer, directory),
        "tokenizer_digest": tokenizer_digest(directory),
    }


def inputs_of_import(request: ImportRequest, config: RunConfig) -> dict[str, str]:
    """Return everything that may change the rows, as inputs of their keys: the files and how they are read."""
    for file in request.files:
        require_regular(file)  # before any of it is read: of a pipe nothing would be left for the second reading
    with border("reading the files to import", ", ".join(map(str, request.files)), "nothing was written"):
        digests = [file_digest(file) for file in request.files]
    reading: dict[str, Any] = {
        "form": "auto",  # in the keys of imports from when lines had several forms
        "environment": request.environment,
        "groups_per_step": 0,  # in the keys of imports from when groups could be dealt to steps
        "skip_bad": request.skip_bad,
        "steps": [found and found[1] for found in (STEP.search(str(file)) for file in request.files)],
        "model": config.model.model_dump(mode="json", include={"renderer", "tokenizer_digest", "vocab_size"}),
    }
    # Only where they are used, so that imports of before these options keep their keys.
    later = {"held_out": request.held_out, "tensors_of_images": bool(processor_directory(config.model))}
    reading |= {name: True for name, used in later.items() if used}
    if config.model.renderer_settings:
        reading["model"]["renderer_settings"] = config.model.renderer_settings
    return {"files": content_key(digests), "reading": content_key(reading)}


def renderer_of(config: RunConfig) -> Any:
    """Return what makes tokens of text, loaded when the first text comes; None where no model was named."""
    model = config.model
    if not model.tokenizer:
        return None

    @cache
    def renderer() -> Any:
        directory = model_directory(model.tokenizer)
        return demonstration_renderer(directory, model.renderer, model.renderer_settings)

    def render(*arguments: Any) -> Any:
        try:
            return renderer()(*arguments)
        except DemonstrationUnusable as error:
            raise Unfit("the renderer cannot render it", str(error)) from error

    return render


def outcome_lines(outcome: ImportOutcome) -> list[str]:
    """Return the lines that report the imported rollouts, the excluded lines, and how to train on the run."""
    steps = "1 step" if outcome.num_steps == 1 else f"{outcome.num_steps} steps"
    figures = ", ".join(f"{number} {name}" for name, number in outcome.figures.items())
    imported = figures if outcome.num_computed else "these files were imported before, nothing was computed"
    total, several, differ = outcome.groups.values()
    lines = [
        f"run {outcome.run}: {steps}; {imported}",
        f"{total} group{'s' * (total != 1)}: {several} of more than one rollout, {differ} with differing rewards",
    ]
    if not differ:
        lines.append("No group has differing rewards: a baseline of the group (grpo, rloo) leaves nothing to train on.")
    lines += [f"left out: {number} x {reason}" for reason, number in outcome.left_out.items()]
    text = outcome.figures.keys() & {"with rendered tokens", "with given tokens"}
    supervised = " algorithm.type=supervised" if text else ""
    replay = f"stagecoach replay {outcome.run} --from filtering --set model.path=DIR{supervised}"
    return [*lines, f"train on it with: {replay} --store {shlex.quote(outcome.store)}"]

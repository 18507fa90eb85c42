"""Import: files of rollouts that others made become a run of the store, which can be replayed from filtering on.

A step of an imported run has the ledger rows of a step up to its rollouts: `examples` once, `assignment`, `import`.
The files' content is in their keys, so that the same files again compute nothing.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from configs.run import RunConfig
from flows.exchange.import_config import Request, imported_config, inputs_of_import, renderer_of, with_contents
from flows.exchange.import_outcome import Outcome, said
from flows.runtime.versions import versions
from storage.errors import border
from storage.refs import Entry
from storage.roots import open_root
from storage.store import FORMAT, Store, open_store
from tasks.exchange import trace_import
from tasks.exchange.episodes import SAMPLED, TRAIN, Episode, Reading
from tasks.exchange.files import read_files
from tasks.exchange.naming import told_apart
from tasks.exchange.placing import Imported, doubled, place
from tasks.exchange.problems import ImportRefused, counted, refusal
from tasks.exchange.traces import MARK
from tasks.metrics import stage as metrics
from tasks.runtime.execute import perform
from tasks.runtime.run_context import RunContext, key_of

HELD_OUT = "an attempt at a held-out example (import them with --held-out, to train on them)"


def import_files(request: Request) -> Outcome:
    """Bring the rollouts of the files into the store as a run; nothing is written unless all lines are good.

    With `skip_bad`, lines that are not are left out and counted; so are attempts at held-out examples, which only
    `held_out` brings in. A store is made only once there is something to write. Raises ImportRefused for files that
    cannot be imported, and for a name that another run has.
    """
    config = imported_config(request)
    inputs = inputs_of_import(request, config)
    key = key_of(config, trace_import.EXAMPLES_STAGE, 0, inputs)
    config = config.model_copy(update={"name": config.name or f"import-{key[:8]}"})
    if _is_store(config.store):
        store = open_store(config.store)
        _require_free(store, config.name, key)
        earlier = _finished(store, config.name, key)
        if earlier is not None:
            return _adopted(store, config, earlier)
    found, figures, left_out = _read(request, config)
    config = with_contents(config, found)
    store = open_store(config.store)
    _record(store, config, "started", f"import of {', '.join(str(file) for file in request.files)}")
    computed = _write(RunContext(store, config.name, config, versions(config)), found, inputs)
    _record(
        store, config, "finished", json.dumps({"rollouts": figures, "groups": found.groups(), "left out": left_out})
    )
    return Outcome(config.name, config.store, computed, len(found.steps), figures, found.groups(), left_out)


def _is_store(address: str) -> bool:
    """Tell whether there is a store already; none is made for asking."""
    root = open_root(address)
    with border("looking for a store", root.address):
        return root.exists(FORMAT)


def _require_free(store: Store, name: str, key: str) -> None:
    """Refuse the name of a run that is anything else than this import."""
    if name in store.runs.names() and {e.key for e in store.ledger.entries(run=name, stage="examples")} - {key}:
        raise ImportRefused(
            f"run {name!r} is in {store.root.address} with other rollouts, or was read from these files in another "
            f"way. Nothing was written. Give this import a name of its own (--name)."
        )


def _finished(store: Store, name: str, key: str) -> list[Entry] | None:
    """Return the ledger rows of an import of the same files in the same way that finished, this run's own first."""
    runs = [entry.run for entry in store.ledger.entries(stage="examples") if entry.key == key]
    for run in sorted(runs, key=lambda run: run != name):
        if any(event.event == "finished" for event in store.runs.events(run)):
            return [
                entry
                for entry in store.ledger.entries(run=run)
                if entry.key == key or entry.inputs.get("examples") == key
            ]
    return None


def _adopted(store: Store, config: RunConfig, entries: Sequence[Entry]) -> Outcome:
    """Make the finished work of another import part of this run; nothing is computed."""
    run = entries[0].run
    if run != config.name:
        same = RunConfig.model_validate({**store.runs.config(run), "name": config.name})
        _record(store, same, "started", f"the import {run}")
        for entry in entries:
            RunContext(store, same.name, same, {}).adopt(entry, entry.step)
        _record(store, same, "finished", f"the import {run}")
    return Outcome(config.name, config.store, 0, sum(entry.stage == trace_import.STAGE.name for entry in entries))


def _read(request: Request, config: RunConfig) -> tuple[Imported, dict[str, int], dict[str, int]]:
    """Return what the files hold, figures about it, and how many lines were left out by reason."""
    reading = Reading(request.environment, config.model.vocab_size, renderer_of(config))
    episodes, problems = read_files(request.files, request.form, reading)
    episodes, again = doubled(episodes)
    names = [str(file) for file in request.files]
    problems = sorted([*problems, *again], key=lambda problem: (names.index(problem.file), problem.line))
    if problems and not request.skip_bad:
        raise refusal(problems)
    left_out = counted(problems)
    if not request.held_out:
        training = [episode for episode in episodes if episode.split == TRAIN]
        left_out |= {HELD_OUT: len(episodes) - len(training)} if len(training) < len(episodes) else {}
        episodes = training
    if not episodes:
        raise ImportRefused(f"the files hold no rollouts{_reasons(left_out)}. Nothing was written.")
    return place(told_apart(episodes), request.groups_per_step), _figures(episodes), left_out


def _reasons(left_out: Mapping[str, int]) -> str:
    return "".join(f"; {number} x {reason}" for reason, number in left_out.items())


def _figures(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the number of traces, and how many of them have tokens of which origin, an error, no reward."""
    counts: Counter[str] = Counter()
    for row in (row for episode in episodes for row in episode.traces):
        mark = json.loads(row["record"]).get(MARK, {})
        counts["traces"] += 1
        counts[f"with {mark.get('tokens') or ('sampled' if row['policy_key'] else 'rendered')} tokens"] += 1
        counts["errored"] += row["error_class"] is not None
        counts["without a reward"] += row["reward"] is None
        counts["of unknown temperature"] += "temperature" in mark and mark["tokens"] == SAMPLED
    return {name: number for name, number in counts.items() if number}


def _write(place_of_run: RunContext, found: Imported, inputs: Mapping[str, str]) -> int:
    """Write every step as its stages; return how many pieces of work were computed."""
    source = {"source": found}
    examples = perform(trace_import.EXAMPLES_STAGE, place_of_run, 0, parameters=source, extra_inputs=inputs)
    done = [examples]
    for step in found.steps:
        assigned = perform(trace_import.ASSIGNMENT_STAGE, place_of_run, step, (examples,), parameters=source)
        traces = perform(trace_import.STAGE, place_of_run, step, (assigned, examples), parameters=source)
        counts = {"num_batches": 1}
        done += [assigned, traces, perform(metrics.STAGE, place_of_run, step, (assigned, traces), parameters=counts)]
    return sum(ref.computed for ref in done)


def _record(store: Store, config: RunConfig, event: str, message: str) -> None:
    store.runs.record(
        run=config.name, event=event, kind="train", config=config.model_dump(mode="json"), message=message
    )


def main(request: Request) -> int:
    """Import files as asked and say what came of it; return the exit status."""
    for line in said(import_files(request)):
        print(line)
    return 0

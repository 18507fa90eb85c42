"""Import: files of rollouts that others made become a run of the store, which can be replayed from filtering on.

A step of an imported run has the ledger rows of a step up to its rollouts: `examples` once, `assignment`, `import`.
The files' content is in their keys, so that the same files again compute nothing.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from configs.run import RunConfig
from flows.exchange.import_config import Request, imported_config, inputs_of_import, renderer_of, with_contents
from flows.facts import versions
from storage.refs import Entry
from storage.store import Store, open_store
from tasks import trace_import
from tasks.exchange.episodes import SAMPLED, Episode, Reading
from tasks.exchange.files import read_files
from tasks.exchange.naming import told_apart
from tasks.exchange.placing import Imported, doubled, place
from tasks.exchange.problems import ImportRefused, Problem, counted, refusal
from tasks.exchange.traces import MARK
from tasks.stage import Place, key_of, perform


@dataclass(frozen=True)
class Outcome:
    """What an import brought in."""

    run: str
    store: str
    num_computed: int
    """Pieces of work that were not there before."""
    num_steps: int
    figures: dict[str, int] = field(default_factory=dict)
    """Rollouts by where their tokens come from, and what else is worth knowing; of what was computed."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason."""


def import_files(request: Request) -> Outcome:
    """Bring the rollouts of the files into the store as a run; nothing is written unless all lines are good.

    With `skip_bad`, lines that are not are left out and counted. Raises ImportRefused for files that cannot be
    imported, and for a name that another run has.
    """
    config = imported_config(request)
    inputs = inputs_of_import(request, config)
    key = key_of(config, trace_import.EXAMPLES_STAGE, 0, inputs)
    store = open_store(config.store)
    config = config.model_copy(update={"name": config.name or f"import-{key[:8]}"})
    _require_free(store, config.name, key)
    earlier = _finished(store, config.name, key)
    if earlier is not None:
        return _adopted(store, config, earlier)
    found, figures, left_out = _read(request, config)
    config = with_contents(config, found)
    _record(store, config, "started", f"import of {', '.join(str(file) for file in request.files)}")
    computed = _write(Place(store, config.name, config, versions(config)), found, inputs)
    _record(store, config, "finished", json.dumps({"rollouts": figures, "left out": left_out}))
    return Outcome(config.name, config.store, computed, len(found.steps), figures, left_out)


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
            Place(store, same.name, same, {}).adopt(entry, entry.step)
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
    if not episodes:
        raise ImportRefused(f"the files hold no rollouts{_reasons(problems)}. Nothing was written.")
    return place(told_apart(episodes), request.groups_per_step), _figures(episodes), counted(problems)


def _reasons(problems: Sequence[Problem]) -> str:
    return "".join(f"; {number} x {reason}" for reason, number in counted(problems).items())


def _figures(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the number of traces, and how many of them have tokens of which origin, an error, no reward."""
    counts: Counter[str] = Counter()
    for row in (row for episode in episodes for row in episode.traces):
        mark = json.loads(row["record"]).get(MARK, {})
        counts["traces"] += 1
        counts[f"tokens {mark.get('tokens') or ('sampled' if row['policy_key'] else 'rendered')}"] += 1
        counts["errored"] += row["error_class"] is not None
        counts["without a reward"] += row["reward"] is None
        counts["of unknown temperature"] += "temperature" in mark and mark["tokens"] == SAMPLED
    return {name: number for name, number in counts.items() if number}


def _write(place_of_run: Place, found: Imported, inputs: Mapping[str, str]) -> int:
    """Write every step as its stages; return how many pieces of work were computed."""
    bag = {"source": found}
    examples = perform(trace_import.EXAMPLES_STAGE, place_of_run, 0, services=bag, extra_inputs=inputs)
    done = [examples]
    for step in found.steps:
        assigned = perform(trace_import.ASSIGNMENT_STAGE, place_of_run, step, (examples,), services=bag)
        done += [assigned, perform(trace_import.STAGE, place_of_run, step, (assigned, examples), services=bag)]
    return sum(ref.computed for ref in done)


def _record(store: Store, config: RunConfig, event: str, message: str) -> None:
    store.runs.record(
        run=config.name, event=event, kind="train", config=config.model_dump(mode="json"), message=message
    )


def main(request: Request) -> int:
    """Import files as asked and say what came of it; return the exit status."""
    outcome = import_files(request)
    steps = "1 step" if outcome.num_steps == 1 else f"{outcome.num_steps} steps"
    figures = ", ".join(f"{number} {name}" for name, number in outcome.figures.items())
    found = figures if outcome.num_computed else "these files were imported before, nothing was computed"
    print(f"run {outcome.run}: {steps}; {found}")
    for reason, number in outcome.left_out.items():
        print(f"left out: {number} x {reason}")
    text = outcome.figures.keys() & {"tokens rendered", "tokens given"}
    supervised = " advantage.type=supervised" if text else ""
    again = f"stagecoach replay {outcome.run} --from filtering --set model.path=DIR{supervised}"
    print(f"train on it with: {again} --store {outcome.store}")
    return 0

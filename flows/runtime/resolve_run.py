"""Preparation: from files, overrides, a recorded run and policies of the store to one resolved config.

All of it before anything is started.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.checks.run import require_files
from configs.environments import EnvironmentConfig
from configs.errors import ConfigError
from configs.load import load
from configs.replay import needs_weights
from configs.resolve import reopen_versions, require_agreement, resolve, with_versions
from configs.run import RunConfig, content
from configs.training import LoraConfig
from flows.queries.store_reader import flat, recorded_config, recorded_run
from flows.runtime.machine_facts import config_versions
from flows.runtime.preferences import recorded_pairs, require_tokenizer, with_reference
from flows.services.teachers import teacher_facts
from storage.keys import canonical_json
from storage.records import REMOVED
from storage.store import Store, open_store
from tasks.assignment.examples import DEMONSTRATIONS, PREFERENCES, read_rows
from tasks.inference.engine.model_info import directory_digest, file_digest, model_directory
from tasks.runtime.stage import Policy
from tasks.stages import REPLAYABLE

DEFAULT_FILES = {"train": ["demo"], "sft": ["sft_demo"], "dpo": ["dpo_demo"], "evaluate": ["demo"]}


@contextmanager
def nothing_started() -> Iterator[None]:
    """Within the block, errors meant for people say that nothing was started, unless they say so themselves."""
    try:
        yield
    except ValueError as error:
        # A note, not another error: the class tells callers and tests what it was.
        if "nothing was" not in str(error).lower():
            error.add_note("Nothing was started and nothing is lost.")
        raise


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as overrides. Text is quoted: a run may be named 2024, and a store true."""
    return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]


def requested_config(
    kind: str, files: Sequence[str], overrides: Sequence[str], settings: Mapping[str, Any]
) -> RunConfig:
    """Return the checked config of a run that the store does not have yet, not resolved. Raises ConfigError."""
    return load(files or DEFAULT_FILES[kind], _later_layers(kind, overrides, settings))


def _later_layers(kind: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    # An empty setting of a form or a command line means: as the files say.
    given = {name: value for name, value in settings.items() if value not in (None, "")} | {"kind": kind}
    return [*overrides, *assignments(given)]


@nothing_started()
def resolve_run(kind: str, files: Sequence[str], overrides: Sequence[str], **settings: Any) -> RunConfig:
    """Return the resolved config of a new run, or of the run of that name in the store, to go on with it.

    `settings` are name, store, seed and steps where they were given; they come after the overrides. A recorded run is
    resumed with its recorded config: other steps and operational settings are taken over, anything else is refused,
    because the run's rows would be of two kinds. Raises ConfigError, and what says that a model, an environment or a
    file of demonstrations cannot be used.
    """
    later, problem = _later_layers(kind, overrides, settings), None
    try:
        requested = requested_config(kind, files, overrides, settings)
    except ConfigError as error:  # a recorded config may have sections that the default one has not
        if files:
            raise
        problem, names = error, [layer for layer in later if layer.partition("=")[0] in OF_RECORDS]
        requested = load(DEFAULT_FILES[kind], names)
    store = open_store(requested.store)
    if not files and (maker := _maker(store, _policy_of_another(requested))):
        problem = None
        # As the policy was trained: its environments, its renderer, its own held-out examples; of a fork its seed, too.
        others = {**OF_NO_OTHER_RUN, "seed": None if kind == "evaluate" else maker.seed}
        requested = load((), [*assignments(others), *later], base=maker.model_dump(mode="json"))
    recorded = recorded_config(store, requested.name)
    if kind != "replay" and requested.name and store.ledger.entries(run=requested.name, stage="import"):
        raise ConfigError(
            [
                f"run {requested.name!r} was imported and has no rollouts of its own to go on with; nothing changed. "
                f"Train on it with: stagecoach replay {requested.name} --from filtering --set model.path=DIR"
            ]
        )
    # Presets of today may differ from those it began with: without files the record is the base.
    if recorded is not None and not files:
        requested = load((), later, base=recorded.model_dump(mode="json"))
    elif problem:
        raise problem
    requested = with_stored_weights(store, requested)
    require_files(requested)
    requested = with_reference(requested)
    if requested.seed is None and recorded is not None:
        requested = requested.model_copy(update={"seed": recorded.seed})
    config = resolve(requested, config_versions(requested) | teacher_facts(requested))
    if kind == "sft":
        read_rows(Path(config.data.path).expanduser())  # a bad row is worth knowing before anything starts
        # The rows of the file take the place of an environment's examples.
        file = EnvironmentConfig(name=DEMONSTRATIONS, taskset={"id": DEMONSTRATIONS})
        config = config.model_copy(update={"environments": (file,)})
    if kind == "dpo":
        require_tokenizer(store, config)
        pairs = EnvironmentConfig(name=PREFERENCES, taskset={"id": PREFERENCES})
        config = config.model_copy(update={"environments": (pairs,)})
    if recorded is not None:
        # The weights of `config`: the directory that is recorded may be gone.
        model = {"path": config.model.path, "tokenizer": config.model.tokenizer}
        with_weights_here = recorded.model_copy(update={"model": recorded.model.model_copy(update=model)})
        require_agreement(recorded, config_versions(with_weights_here))
        require_same(recorded, config)
        _require_same_sources(store, config)
    return config


OF_RECORDS = ("kind", "store", "name", "fork", "evaluation.policy")
"""Settings that say which recorded config is the base of a run without files."""
OF_NO_OTHER_RUN: Mapping[str, Any] = {"name": "", "replay": {}, "data": {}, "fork": ""}
"""What a run does not take over from the one that made the policy which it evaluates or goes on from."""


def _policy_of_another(config: RunConfig) -> str:
    return config.evaluation.policy if config.kind == "evaluate" else config.fork


def _maker(store: Store, policy: str) -> RunConfig | None:
    """Return the config of the run that made a policy; None where none is named, or it was trained without rollouts.

    Versions are open: what samples and scores now is what is installed now.
    """
    config = recorded_config(store, policy.partition(":")[0]) if policy else None
    if config is None:
        return None
    # Demonstrations are no environment, and evaluations try what a replay does without.
    environments = () if config.from_data else config.environments
    config = config.model_copy(update={"kind": "train", "environments": environments})
    if not config.served_environments:
        return None
    places = ["engine", "training", *config.served_environments]
    return with_versions(reopen_versions(config, REPLAYABLE), {f"{place}.version": "" for place in places})


def with_stored_weights(store: Store, requested: RunConfig) -> RunConfig:
    """Take the weights out of the store: those of the policy to evaluate, or the run's own first ones if need be.

    Those were copied when they were brought in, so that a run can go on when the directory they came from is gone.
    """
    policy = find_policy(store, _policy_of_another(requested))
    if requested.kind == "dpo" and requested.data.runs and not requested.model.path:
        policy = find_policy(store, f"{recorded_run(store, requested.data.runs[0])[0]}:0")
    path = requested.model.path
    if policy is None and path and not Path(path).expanduser().is_dir():
        imported = bool(store.ledger.entries(run=requested.name, stage="policy_import"))
        policy = find_policy(store, f"{requested.name}:0") if imported else None
    if policy is None:
        return requested
    if requested.fork and policy.version >= requested.steps:
        raise ConfigError([f"steps: {requested.steps} end before a fork from {requested.fork} begins; set more steps"])
    if requested.fork and requested.beside_policy and not store.policies.adapter_bases([policy.key]):
        raise ConfigError(
            [
                f"fork: {requested.fork} has whole weights, and seats with a model `base` or `earlier` play beside an "
                "adapter; fork a run with training.lora, or give these seats a path"
            ]
        )
    model = requested.model.model_copy(update={"path": str(whole_weights(store, policy.key))})
    made = store.ledger.find(policy.key) if requested.kind == "evaluate" else None
    # From the ledger row: the run that trained the adapter may be gone, its section is not.
    adapter = made.section.get("training", {}).get("lora") if made else None
    lora = LoraConfig(**adapter) if adapter else requested.training.lora
    return requested.model_copy(
        update={"model": model, "training": requested.training.model_copy(update={"lora": lora})}
    )


def require_same(recorded: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError, with every difference, where a run of this name was begun with another config."""
    old, new = dict(flat(_identity(recorded))), dict(flat(_identity(config)))
    differing = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    if not differing:
        return
    error = ConfigError(
        [
            f"{key}: {canonical_json(old.get(key)):.160} is recorded, {canonical_json(new.get(key)):.160} is asked for"
            for key in differing
        ]
    )
    error.add_note(
        f"Run {recorded.name!r} keeps its config and nothing was changed: give the branch a name of its own (--name); "
        "it shares all work that the change does not reach."
    )
    raise error


def _identity(config: RunConfig) -> dict[str, Any]:
    """Return what a run keeps for life: what is in the keys of its weights, its kind, and how far its rollouts lag.

    A gate changes no weights: another rule, or none, is how a run goes on that a gate has stopped.
    """
    # By content, not field by field: operational settings may change from one call to the next.
    kept = {**content(config, in_place=True), "kind": config.kind, "lag": config.rollout.max_off_policy_steps}
    kept |= {"fork": config.fork, "data.runs": list(config.data.runs)}
    del kept["gate"]
    if config.kind == "evaluate":  # policies of another run would be scored under the config of this one's
        kept["run of evaluation.policy"] = config.evaluation.policy.partition(":")[0]
    return kept | ({"replay": config.replay.model_dump(mode="json")} if config.kind == "replay" else {})


def _require_same_sources(store: Store, config: RunConfig) -> None:
    """Refuse other weights, or another file of demonstrations, than the run began with: paths are not in keys."""
    source = source_of(config)
    digests = {"weights": source.weights_digest, "file": source.data_digest}
    keys = {"weights": "model.path", "file": "data.path"}
    entries = [
        *store.ledger.entries(run=config.name, stage="policy_import"),
        *store.ledger.entries(run=config.name, stage="examples"),
    ]
    begun = {name: digest for entry in entries for name, digest in entry.inputs.items() if name in keys}
    if lines := [
        f"{keys[name]}: run {config.name!r} began with other content; nothing changed. Give that back, or "
        "give a run on this content a name of its own (--name)"
        for name, digest in begun.items()
        if digest != digests[name]
    ]:
        raise ConfigError(lines)


@dataclass(frozen=True)
class Source:
    """What a run starts from, by digest: a directory of weights, and for supervised runs a file; of a fork a policy."""

    weights: str
    weights_digest: str
    data: str = ""
    data_digest: str = ""
    policy: Policy | None = None
    pairs: Sequence[Mapping[str, Any]] = ()
    """Pairs of recorded rollouts; see `tasks.rollout.preference`."""
    pair_inputs: Mapping[str, str] = field(default_factory=dict)
    """Their digest, and the work that made the rollouts."""


def source_of(config: RunConfig) -> Source:
    """Return where a run starts from, with digests."""
    if not config.model.path or (config.kind == "replay" and not needs_weights(config.replay)):
        return Source("", "")
    weights = model_directory(config.model.path)
    data = Path(config.data.path).expanduser() if config.kind == "sft" else None
    policy = find_policy(open_store(config.store), config.fork) if config.fork else None
    pairs = recorded_pairs(open_store(config.store), config) if config.kind == "dpo" else ((), {})
    digest, data_digest = _weights_digest(config, weights), file_digest(data) if data else ""
    return Source(str(weights), digest, str(data or ""), data_digest, policy, *pairs)


def _weights_digest(config: RunConfig, weights: Path) -> str:
    """Return the digest of weights; of the copy that a run imported, that of its original.

    The copy of a quantised checkpoint has other files.
    """
    store, digest = open_store(config.store), directory_digest(weights)
    for entry in store.ledger.entries(run=config.name, stage="policy_import"):
        original = entry.inputs.get("weights", digest)
        if original != digest and store.policies.find(entry.key) and store.policies.directory(entry.key) == weights:
            return original
    return digest


class PolicyUnknown(ValueError):
    """No policy of the store goes by that name."""


def find_policy(store: Store, name: str) -> Policy | None:
    """Return the policy that `name` names: RUN for a run's last one, RUN:VERSION for an earlier one; None for none.

    Raises PolicyUnknown when the run has no such policy.
    """
    if not name:
        return None
    run, _, version = name.partition(":")
    imported = [entry.key for entry in store.ledger.entries(run=run, stage="policy_import")]
    # The last one: the same weights may have been brought in again from another directory.
    keys = dict(enumerate(imported[-1:]))
    keys |= {entry.step + 1: entry.key for entry in store.ledger.entries(run=run, stage="training")}
    number = int(version) if version.isdecimal() else max(keys, default=0)
    if number not in keys or (version and not version.isdecimal()):
        has = f"has the versions {', '.join(map(str, sorted(keys)))}" if keys else "has made no policy"
        raise PolicyUnknown(
            f"there is no policy {name!r}: run {run!r} {has}. Name one as RUN or RUN:VERSION; the last runs in "
            f"{store.root.address} are: {', '.join(store.runs.names()[-5:]) or 'none'}"
        )
    return Policy(keys[number], number)


def whole_weights(store: Store, policy_key: str) -> Path:
    """Return the directory of a policy's weights; of an adapter, those of the policy that it is laid over."""
    return store.policies.directory(next(iter(store.policies.adapter_bases([policy_key])), policy_key))


def continued_run(store: Store, kind: str, name: str, more_steps: int | None, flow_run: str | None) -> tuple[str, int]:
    """Return the name of a recorded run and the steps that it shall have: `more_steps` beyond those planned so far.

    A retry of the flow run that has planned them already gets the same number. Raises ConfigError where the store has
    no such run, `latest` for the newest of the kind, or `more_steps` is not positive.
    """
    runs = store.runs
    of_kind = [run for run in runs.names() if runs.events(run)[-1].kind == kind and runs.last_event(run) != REMOVED]
    run = of_kind[-1] if name == "latest" and of_kind else name
    if run not in of_kind:
        raise ConfigError(f"continue_run: {store.root.address} has no run {name!r} of kind {kind}")
    if not more_steps or more_steps < 1:
        raise ConfigError(f"steps: {more_steps} is requested; with continue_run it is the number of further steps")
    planned = [event.config["steps"] for event in runs.events(run) if flow_run and event.flow_run == flow_run]
    return run, planned[-1] if planned else runs.config(run)["steps"] + more_steps


def newest_policy(store: Store) -> str:
    """Return the newest policy that training has made, as RUN:VERSION; empty where there is none."""
    entries = [entry for run in store.runs.names() for entry in store.ledger.entries(run=run, stage="training")]
    newest = max(entries, key=lambda entry: entry.finished_at, default=None)
    return f"{newest.run}:{newest.step + 1}" if newest else ""

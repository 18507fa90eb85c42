"""Preparation: from files, overrides and a recorded run to one resolved config, before anything is started."""

from collections.abc import Sequence
from typing import Any

from configs.check import require_files
from configs.errors import ConfigError
from configs.load import from_json, load
from configs.resolve import require_agreement, resolve
from configs.run import RunConfig, content
from configs.sections import EnvironmentConfig
from flows.facts import facts
from storage.keys import canonical
from storage.store import Store, open_store
from tasks.examples import DEMONSTRATIONS

DEFAULT_FILES = {"train": ["demo"], "sft": ["sft_demo"], "evaluate": ["demo"]}


def prepare(kind: str, files: Sequence[str], overrides: Sequence[str], policy: str = "", **settings: Any) -> RunConfig:
    """Return the resolved config of a new run, or of the run of that name in the store, to go on with it.

    `settings` are name, store, seed and steps where they were given; they come after the overrides. A recorded run is
    resumed with its recorded config: other steps and operational settings are taken over, anything else is refused,
    because the run's rows would be of two kinds. Raises ConfigError.
    """
    given = {name: value for name, value in settings.items() if value not in (None, "")} | {"kind": kind}
    later = [*overrides, *(f"{name}={value}" for name, value in given.items())]
    requested = load(files or DEFAULT_FILES[kind], later)
    recorded = recorded_config(open_store(requested.store), requested.name)
    if recorded is not None and not files:
        requested = load((), later, base=recorded.model_dump(mode="json"))
    require_files(requested, policy)
    config = resolve(_with_seed(requested, recorded), facts(requested))
    if kind == "sft":
        config = _with_demonstrations(config)
    if recorded is not None:
        _require_same(recorded, config)
        require_agreement(recorded, facts(recorded))
    return config


def recorded_config(store: Store, name: str) -> RunConfig | None:
    """Return the config that the run `name` used last; None where the store has no such run."""
    if not name or name not in store.runs.names():
        return None
    return from_json(canonical(store.runs.config(name)))


def _with_seed(requested: RunConfig, recorded: RunConfig | None) -> RunConfig:
    if requested.seed is None and recorded is not None:
        return requested.model_copy(update={"seed": recorded.seed})
    return requested


def _with_demonstrations(config: RunConfig) -> RunConfig:
    """Let the rows of the demonstrations file take the place of an environment's examples."""
    file = EnvironmentConfig(name=DEMONSTRATIONS, taskset={"id": DEMONSTRATIONS})
    return config.model_copy(update={"environments": (file,)})


def _require_same(recorded: RunConfig, config: RunConfig) -> None:
    old, new = content(recorded), content(config)
    differing = sorted(name for name in old if old[name] != new[name])
    if differing:
        raise ConfigError(
            [
                f"{name}: run {recorded.name!r} has {_brief(old[name])}, asked for is {_brief(new[name])}; "
                f"nothing was changed. Give the branch a name of its own (--name): it shares all equal work"
                for name in differing
            ]
        )


def _brief(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 160 else f"{text[:157]}..."

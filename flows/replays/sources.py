"""Replays whose source was removed: what is said of one that was at work, of one that is to go on, and of a finished
one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.queries.step_history import step_history
from flows.queries.store_reader import recorded_config
from flows.replays.request import ReplayRequest, as_begun
from flows.replays.steps import chosen_steps
from storage.errors import NoSpace, StoreError, WorkRemoved
from storage.read.frames import existing_store
from storage.store import Store


def was_removed(store: Store, run: str) -> bool:
    """Tell whether a run of the store was removed from it."""
    return store.runs.events(run)[-1].event == "removed"


@contextmanager
def going_through_source(store: Store, config: RunConfig) -> Iterator[None]:
    """Within the block, an error of the store that a removal of the replay's source explains says so.

    Running the same again, which otherwise helps, cannot compute what the source had recorded. Raises WorkRemoved.
    """
    try:
        yield
    except StoreError as error:
        if isinstance(error, NoSpace) or not _is_gone(store, config):
            raise
        raise WorkRemoved(
            f"run {config.replay.run!r} was removed from the store while it was gone through again",
            f"replay {config.name!r}",
            f"all that {config.name!r} has finished, with the recorded work that it shares",
            _advice(config),
        ) from error


def _is_gone(store: Store, config: RunConfig) -> bool:
    """Tell whether the source cannot be gone through any more: its rows go before that is written down."""
    if was_removed(store, config.replay.run):
        return True
    try:
        chosen_steps(config.replay, step_history(store, config.replay.run))
    except ConfigError:
        return True
    return False


def refuse_removed(store: Store, source: str, begun: RunConfig | None) -> None:
    """Raise ConfigError where the run to be replayed was removed; `begun` is the replay that was to go on, if any."""
    if was_removed(store, source):
        line = f"run {source!r} was removed from the store (stagecoach gc): its steps are gone"
        raise ConfigError([f"{line}. {_sentence(_advice(begun))}" if begun else line])


def finished_without_source(asked: ReplayRequest) -> RunConfig | None:
    """Return the config of a replay that was asked to go on as it began, is finished, and whose source was removed.

    None of any other: that is looked at as ever.
    """
    store = existing_store(asked.store or RunConfig().store)
    begun = recorded_config(store, asked.name)
    if begun is None or begun.kind != "replay" or asked.overrides or not was_removed(store, begun.replay.run):
        return None
    as_it_began = as_begun(ReplayRequest(run="", name=asked.name, store=asked.store), begun)
    if as_begun(replace(asked, overrides=()), begun) != as_it_began:
        return None
    return begun if store.runs.events(asked.name)[-1].event == "finished" else None


def finished_message(config: RunConfig) -> str:
    """Return what is said where nothing is left to do of a finished replay, though its source is gone."""
    return (
        f"replay {config.name!r} is finished: nothing is left to do, and its rows are safe, though run "
        f"{config.replay.run!r}, which it went through, was removed since (stagecoach gc). Look at it with: "
        f"stagecoach show {config.name} --store {config.store}"
    )


def _advice(config: RunConfig) -> str:
    at = f"{config.name} --store {config.store}"
    return (
        f"this replay cannot go on. Look at what it finished with stagecoach show {at}; its whole steps can be gone "
        f"through in turn: stagecoach replay {at}; for the others record a new run (stagecoach run) and replay that"
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]

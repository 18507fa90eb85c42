"""State of estimators in a replay: one that begins later than the run did goes on from what the run recorded."""

from collections.abc import Iterator

from configs.errors import ConfigError
from configs.replay import redone
from configs.run import RunConfig, content
from flows.recorded import Recorded
from storage.refs import Entry
from storage.store import Store
from tasks.advantage import STAGE


def refuse_lost_state(config: RunConfig, recorded: Recorded) -> None:
    """Raise ConfigError where a replay would go on from state that was not recorded, or that other settings made.

    A cold start, or a baseline that two settings had a hand in, would look healthy and be wrong.
    """
    replay = config.replay
    if not replay.first_step or STAGE.name not in redone(replay):
        return
    entry = recorded.credits_before(replay.first_step)
    if lines := list(_lost(config, entry)):
        raise ConfigError(lines)


def refuse_unfit_state(store: Store, config: RunConfig, recorded: Recorded) -> None:
    """Raise ConfigError where a replay would go on from state that rollouts in quarantine have gone into.

    Leaving them out of the steps that it goes through would not take them out of what these go on from.
    """
    replay = config.replay
    if not (config.stateful and replay.first_step and STAGE.name in redone(replay)):
        return
    unfit = {name for each in store.quarantines.all() for name in each.trace_ids}
    for judged in recorded.judged_before(replay.first_step) if unfit else ():
        verdicts = store.read(judged.slices("verdicts"), ["trace_id", "keep"])
        if found := unfit & {*verdicts.filter(verdicts["keep"])["trace_id"].to_pylist()}:
            raise ConfigError(
                [
                    f"--steps: the state that step {replay.first_step} goes on from holds {len(found)} rollout(s) of "
                    f"step {judged.step} that are in quarantine now, first {min(found)}. Begin at step 0 (without "
                    "--steps), which leaves them out of it, or keep them (--no-quarantine)"
                ]
            )


def _lost(config: RunConfig, entry: Entry | None) -> Iterator[str]:
    first, run = config.replay.first_step, config.replay.run
    for environment in [each.name for each in config.environments] or [""]:
        algorithm = config.algorithm_of(environment)
        if not algorithm.stateful or (entry is not None and _credited_by(entry, environment) == content(algorithm)):
            continue
        yield (
            f"--steps: environment {environment!r} is credited by {algorithm.type}, which goes on from the state after "
            f"step {first - 1}, and run {run!r} recorded none under these settings. Begin at step 0 (without --steps), "
            "or choose the settings of the run or an algorithm without state"
        )


def _credited_by(entry: Entry, environment: str) -> object:
    """Return the section of the algorithm that credited an environment's rollouts in recorded work."""
    return entry.section.get("algorithms", {}).get(environment, entry.section.get("advantage"))

"""State of estimators in a replay: one that begins later than the run did goes on from what the run recorded."""

from collections.abc import Iterator

from configs.errors import ConfigError
from configs.replay import redone
from configs.run import RunConfig, content
from flows.recorded import Recorded
from storage.refs import Entry
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

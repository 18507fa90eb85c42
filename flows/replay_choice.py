"""The recorded steps that a replay goes through."""

from collections.abc import Sequence

from configs.errors import ConfigError
from configs.replay import ORDER, ReplayConfig
from flows.recorded import Recorded, RecordedStep


def chosen(replay: ReplayConfig, recorded: Recorded) -> list[RecordedStep]:
    """Return the recorded steps that a replay goes through.

    Raises ConfigError where a step that was asked for was not recorded as far as the replay needs it.
    """
    last = replay.last_step
    whole = {step: past for step, past in recorded.steps.items() if not _lacking(replay, past, recorded.fills)}
    wanted = [step for step in whole if step >= replay.first_step and (last is None or step < last)]
    absent = sorted(set(range(replay.first_step, last or 0)) - whole.keys())
    if absent or not wanted:
        raise ConfigError(
            [
                f"replay: run {replay.run!r} has not recorded step {', '.join(map(str, absent)) or replay.first_step} "
                f"up to stage {_before(replay, recorded.fills)}; it has the steps {_ranges(list(whole)) or 'none'}. "
                "Nothing was started; choose among these (--steps), or let the run go on first: "
                f"stagecoach resume {replay.run}"
            ]
        )
    return [whole[step] for step in wanted]


def _lacking(replay: ReplayConfig, past: RecordedStep, fills: bool) -> list[str]:
    """Return the stages before the first one to be done again that a step did not record.

    Where groups are replaced, a step that was not packed may still lack rollouts; those recorded would be some of them.
    """
    needed = ["examples", *ORDER[: ORDER.index(replay.from_stage)]]
    if fills and replay.from_stage != "assignment":
        needed.append("packing")
    return [stage for stage in needed if stage not in past.work]


def _before(replay: ReplayConfig, fills: bool) -> str:
    if fills and replay.from_stage not in ("assignment", "training"):
        return "packing, which tells that all its groups were drawn"
    place = ORDER.index(replay.from_stage)
    return ORDER[place - 1] if place else "examples"


def _ranges(steps: Sequence[int]) -> str:
    """Return step numbers as ranges whose ends are not in them, as --steps takes them."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step + 1 for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))

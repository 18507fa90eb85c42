"""The registry of stages: their order, whether their rows can be made again, their colours.

Every list of stages elsewhere is derived from this one, or, where it may not be imported (`configs.replay`), checked
against it by a test. Who does the work of a stage is in `tasks.stage_tasks`: whoever only reads a store needs none of
that, and importing it takes its time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

EVALUATION: Final = "evaluation"
"""What the rollouts that score a policy are called; the ledger has them as work of the stage `rollout`."""
EVALUATION_ASSIGNMENT: Final = "evaluation_assignment"
"""The stage that says which held-out examples are tried: whatever has it for an input scores a policy."""
ROLLOUT: Final = "rollout"
STREAM_ASSIGNMENT, STREAM_POLICY = "stream.assignment.", "stream.policy."
"""Names of inputs of a step that took its rollouts from a stream: the step or the version follows. They are in the
ledger and not in the key, as only time tells which groups are taken."""
OTHER_COLOUR = 7


@dataclass(frozen=True)
class RegisteredStage:
    """What holds for all work of a stage, wherever it is planned, compared or drawn."""

    name: str
    table: str
    """The table that it is there for."""
    scope: Literal["run", "step", "evaluation"] = "step"
    """What its work belongs to: the run as a whole, one step, or the evaluation of a policy."""
    role: str = ""
    """The stage that it stands in for, by whose name replays and comparisons know it; empty: its own name."""
    deterministic: bool = True
    """Whether it gives the same rows whenever it is done on one machine; nothing is sampled, asked or brought in."""
    replayable: bool = False
    """Whether a replay may begin and end with it."""
    colour: int = OTHER_COLOUR
    """The number of its colour wherever stages are drawn."""

    @property
    def known_as(self) -> str:
        """The name under which replays and comparisons know its work."""
        return self.role or self.name


STAGES = (
    RegisteredStage(
        "policy_import",
        "policies",
        "run",
    ),
    RegisteredStage("examples", "examples", "run"),
    RegisteredStage("assignment", "assignments", replayable=True),
    RegisteredStage(
        ROLLOUT,
        "traces",
        deterministic=False,
        replayable=True,
        colour=0,
    ),
    RegisteredStage("demonstration", "traces", role=ROLLOUT, colour=0),
    RegisteredStage("preference", "traces", role=ROLLOUT, colour=0),
    RegisteredStage("import", "traces", role=ROLLOUT, deterministic=False, colour=0),
    RegisteredStage("regrade", "traces", deterministic=False, colour=5),
    RegisteredStage("judging", "traces", deterministic=False, replayable=True, colour=2),
    RegisteredStage("filtering", "verdicts", replayable=True, colour=3),
    RegisteredStage("reference", "references", deterministic=False, colour=6),
    RegisteredStage("advantage", "samples", replayable=True, colour=4),
    RegisteredStage("packing", "batches", replayable=True, colour=5),
    RegisteredStage("gate", "decisions", deterministic=False, colour=6),
    # Training gives the same weights on one machine; where it does not, the store refuses the other weights.
    RegisteredStage("training", "updates", replayable=True, colour=1),
    RegisteredStage("metrics", "metrics"),
    RegisteredStage(EVALUATION_ASSIGNMENT, "assignments", EVALUATION),
    RegisteredStage(EVALUATION, "traces", EVALUATION, deterministic=False, colour=2),
)
"""All stages in the order in which a step, and with it a run, goes through them."""

BY_NAME: Mapping[str, RegisteredStage] = {each.name: each for each in STAGES}


def names(chosen: Callable[[RegisteredStage], bool] = lambda stage: True) -> tuple[str, ...]:
    """Return the names of the stages that are chosen, in order."""
    return tuple(each.name for each in STAGES if chosen(each))


def _roles(stages: Iterable[RegisteredStage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.known_as for each in stages))


STEP_STAGES = names(lambda stage: stage.scope == "step")
"""The stages whose work belongs to a step."""
SAMPLING = names(lambda stage: stage.scope == "step" and stage.known_as == ROLLOUT)
"""The stages that a step's rollouts may come from; scored again, they are of `regrade`, then `judging`."""
REPLAYABLE = names(lambda stage: stage.replayable)
"""The stages that a replay may begin and end with."""
REPEATABLE = names(lambda stage: stage.deterministic)
"""The stages that give the same rows whenever they are done."""
# Left out of a batch's lineage: its rows would be the same without them.
ABOUT_A_STEP = ("gate", "metrics")
"""Stages that say something about a batch and make nothing of it: a decision, numbers."""
LINEAGE = _roles(each for each in STAGES if each.name in ("examples", *STEP_STAGES) and each.name not in ABOUT_A_STEP)
"""The stages that a batch goes through, by role."""
COMPARED = _roles(each for each in STAGES if each.name not in (EVALUATION_ASSIGNMENT, "metrics"))
"""The stages whose work is compared between two runs, by role."""


def role_of(stage: str) -> str:
    """Return the name by which replays and comparisons know the work of a stage."""
    return BY_NAME[stage].known_as if stage in BY_NAME else stage


def makers(table: str) -> tuple[str, ...]:
    """Return the roles of a step that make a table, the last one of a step first: its rows are those that count."""
    # Reversed: where rollouts were scored again, the later scores count.
    return _roles(each for each in reversed(STAGES) if each.scope == "step" and each.table == table)


def scores_policy(inputs: Mapping[str, str]) -> bool:
    """Tell by its inputs whether work belongs to the evaluation of a policy."""
    return EVALUATION_ASSIGNMENT in inputs


def shown_stage(stage: str, inputs: Mapping[str, str]) -> str:
    """Return the name that work is shown under: that of its stage, rollouts that score a policy apart."""
    return EVALUATION if stage == ROLLOUT and scores_policy(inputs) else stage

"""A store with every outcome of a rollout: runs that share work and part ways, each kind in a run of its own.

`base` trains two steps and scores its policies; `branch` shares its first rollouts and gives other advantages; `gated`
is refused at its first step; `regraded` scores the first rollouts again and leaves one out that is in quarantine;
`begun` has the first rollouts and nothing after them; `hurried` begins four groups for three, and stops all but one
rollout of the last. Ids of rollouts are the same in all of them.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.run import View
from flows.orchestration.states import GateRefused
from flows.runtime import loop, pipeline
from flows.runtime.executor import RolloutSource
from flows.runtime.loop import evaluation_contexts
from flows.runtime.session import Session, record_run
from tasks.assignment import examples as listing
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.inference.sampling.limits import straggler_failure
from tasks.inference.trace_rows.failures import STALE, Failure
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Ref, Stage, Tables
from tasks.training import policy as policy_import
from tasks.training import stage as training
from tests.fixtures import fixed
from tests.fixtures.builders import example, exchange, failed, message, stage_of, stand_in, table
from tests.fixtures.packed import batches_from_table
from tests.fixtures.rehearsal import SOURCE, Played, Rehearsal, session_for, trained

RUNS = ("base", "branch", "gated", "regraded", "begun", "hurried")
UNFIT = "trace-0-0-0"
"""The rollout that is in quarantine."""
REASON = "the verifier took an empty answer"
NUM_TRAIN = 8
HELD_OUT = range(NUM_TRAIN, 12)
SETTINGS: dict[str, Any] = {
    "assignment": {"groups_per_step": 3, "group_size": 6},
    "evaluation": {"num_examples": 2, "attempts": 4, "every": 0},
    "filtering": {"filters": [{"type": "truncated", "enforce": True}, {"type": "zero_advantage"}]},
    "packing": {"tokens_per_row": 64, "updates_per_step": 2},
}


def listed(tables: Tables, config: View) -> Tables:
    """Stand in for what an environment has to offer."""
    splits = ["eval" if number in HELD_OUT else "train" for number in range(NUM_TRAIN + len(HELD_OUT))]
    rows = [example(f"example-{number}", fixed.ENVIRONMENT, split) for number, split in enumerate(splits)]
    return {"examples": table("examples", rows)}


def sampled(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
    """Stand in for sampling: in every group one is cut short, one branches and one fails; in one of them all earn 1.

    The first of the third group is not scored. A fourth group was begun beyond what was needed, and was stopped, its
    last member as one that was stale.
    """
    traces, messages = [], []
    for number, members in enumerate(fixed.groups(tables["assignments"]).values()):
        made = fixed.group(members, policy, step)
        for member, row in enumerate(made["traces"].to_pylist()):
            reward = None if (number, member) == (2, 0) else 1.0 if number == 1 else row["reward"]
            changes: dict[str, Any] = {"reward": reward, "is_truncated": member == 1}
            changes |= {"num_branches": 2 if member == 2 else 1}
            if member == 3:
                broken = failed(row["trace_id"])
                changes = {name: broken[name] for name in ("reward", "error_class", "error_type", "error_message")}
            if number == 3 and member:
                stopped = straggler_failure(row["environment"], 1.5)
                if member == 3:
                    stopped = Failure(STALE, "Stale", "stopped after 1.5 s: too old for any step")
                changes = {"reward": None, "error_type": stopped.type, "error_message": stopped.message}
                changes |= {"error_class": stopped.kind, "num_input_tokens": 0, "num_output_tokens": 0}
                traces.append(row | changes)
                continue
            traces.append(row | changes)
            messages += exchange(row["trace_id"], completion=range(20, 24 + number))
            if member == 2:
                messages.append(message(row["trace_id"], 2, parent=0, tokens=(7, 8), sampled=True))
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


def learnt(tables: Any, config: View, *, step: int, key: str, policy: Policy, directory: Path) -> Tables:
    """Stand in for training: an update for each that the batches hold, and a policy with weights of its own."""
    (row,) = trained(tables, config, step=step, key=key, policy=policy)["updates"].to_pylist()
    batches = tables["batches"].table()
    numbers = sorted({update for update in batches["update"].to_pylist()})
    assert batches_from_table(batches), "the learner's own reader takes the rows apart"
    updates = table("updates", [row | {"update": number} for number in numbers])
    return {"updates": updates, **policy_of(key, directory, step + 1, policy.key)}


def imported(tables: Tables, config: View, *, key: str, source: str, directory: Path) -> Tables:
    """Stand in for weights that are brought in."""
    return policy_of(key, directory, 0, None)


def policy_of(key: str, directory: Path, version: int, parent: str | None) -> Tables:
    """Write weights of a policy, and return its row."""
    (directory / "model.safetensors").write_bytes(key.encode())
    row = {"policy_key": key, "version": version, "parent_key": parent, "weights_sha256": "0" * 64}
    row |= {"has_optimizer": False, "probe_token_ids": [1, 2], "probe_logprobs": [0.0, -1.0]}
    return {"policies": table("policies", [row])}


def scored_again(tables: Tables, config: View) -> Tables:
    """Stand in for reward functions of today: every reward that there is grows by a half."""
    rows = tables["traces"].to_pylist()
    now = [row | {"reward": None if row["reward"] is None else row["reward"] + 0.5} for row in rows]
    regrades = [
        {
            **{name: row[name] for name in ("trace_id", "environment", "example_id", "reward", "rewards")},
            **{"reward_before": old["reward"], "rewards_before": old["rewards"], "changed": row["reward"] is not None},
            **{"error_type": None, "error_message": None, "seconds": 0.0},
        }
        for row, old in zip(now, rows, strict=True)
    ]
    return {"traces": table("traces", now), "regrades": table("regrades", regrades)}


STAND_INS: dict[str, Stage] = {
    "policy_import": stand_in(policy_import.STAGE, imported, writes=("policies",)),
    "examples": stand_in(listing.task.stage, listed),
    "rollout": stand_in(rollout.task.stage, sampled),
    "training": stand_in(training.STAGE, learnt, writes=("updates", "policies")),
}
REGRADE = StageTask(stage_of("regrade", scored_again, ("traces", "regrades"), ("traces",)))


class PlayedStages(Rehearsal):
    """Does stages as in a run; what would need an engine or a learner is played, policies and failures included."""

    def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Ref:
        return super(Rehearsal, self).__call__(Played(STAND_INS.get(task.stage.name, task.stage)), *arguments, **named)


def everything(root: Path) -> None:
    """Make the store."""
    run(root, "base", evaluation=SETTINGS["evaluation"] | {"every": 1})
    run(root, "branch", algorithm={"type": "rloo"})
    with suppress(GateRefused):
        run(root, "gated", gate={"type": "rule", "rule": "reward_mean < 0"})
    regrade(root)
    begin(root)
    run(root, "hurried", assignment=SETTINGS["assignment"] | {"oversampling": 1.2})


def run(root: Path, name: str, **changes: Any) -> Session:
    """Walk a run, score its policies where it is to, and return its session."""
    session = session_for(root, name, **SETTINGS | changes)
    every = session.config.evaluation.every
    do, score = PlayedStages(session), PlayedStages(session, evaluation_contexts(session.context)[""])
    with record_run(session):
        for finished in loop.train_steps(do, SOURCE):
            if every:
                pipeline.evaluate(score, finished.policy)
    return session


def regrade(root: Path) -> None:
    """Score the first rollouts of `base` again, without the one in quarantine, and train on them."""
    session = session_for(root, "regraded", **SETTINGS)
    do = PlayedStages(session)
    with record_run(session):
        found, policy = pipeline.import_sources(do, SOURCE)
        drawn = pipeline.build_batch(RolloutSource(do, found), 0, policy)
        again = do(REGRADE, 0, drawn.traces)
        traces = (again, *drawn.traces)
        verdicts = do(filtering.task, 0, traces, parameters={UNFIT: REASON})
        credits = pipeline.credit(do, 0, traces, verdicts, None)
        batches = do(packing.task, 0, (credits, *traces))
        pipeline.train(do, 0, replace(drawn, traces=traces, packing=batches), policy)


def begin(root: Path) -> None:
    """Take over the first rollouts of `base` and stop."""
    session = session_for(root, "begun", **SETTINGS)
    do = PlayedStages(session)
    with record_run(session):
        found, policy = pipeline.import_sources(do, SOURCE)
        assigned = do(assignment.task, 0, (found,))
        do(rollout.task, 0, (assigned, found), policy)

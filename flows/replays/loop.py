"""Runs an open session of a replay to its end, or plans it, and says what it came to beside what was recorded."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from configs.errors import ConfigError
from configs.replay import replayed_stages
from configs.run import RunConfig
from configs.store import default_store
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.queries.compare import compare
from flows.queries.compare_summary import sheets, summary_lines
from flows.queries.step_history import step_history
from flows.queries.store_reader import StoreReader
from flows.replays.request import removal_advice, was_removed
from flows.replays.steps import Replayed, chosen_steps, quarantined_in, replay_steps
from flows.reporting.artifacts import artifact_key, escape
from flows.reporting.formats import markdown_table, visible
from flows.runtime.executor import Executor
from flows.runtime.plan import plan_work, unique_results
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session
from flows.runtime.step_report import Outcome, describe, notify_step
from storage.errors import NoSpace, StoreError, WorkRemoved
from storage.store import Store
from tasks.runtime.run_context import LEDGER_SECONDS, RunContext
from tasks.runtime.stage import Policy, Ref

_log = logging.getLogger("stagecoach")
QUICK_SECONDS = 5.0
"""How long quick stages of a replay wait for others that share their commit, which takes longer than they do."""
OUTSIDE = 0.1
"""Share of a step's tokens outside the trust region above which it is said that the replay has left it."""
SAME_WEIGHTS = "weights are the recorded ones at every step"
MEASURES = ("loss", "grad_norm", "mismatch_kl", "mismatch_kl_max", "masked_fraction", "weights_sha256")


def loop_replay(session: Session) -> dict[str, Any]:
    """Go through recorded steps again; return the result, beside what was recorded, as plain values."""
    config, store = session.config, session.context.store
    outcome, apart = Outcome(session.context.run, config.steps), PolicyDistance(store)
    recorded, quarantined = step_history(store, config.replay.run), quarantined_in(store, config.replay)
    steps = replay_steps(Executor(session), session.source, config, recorded, quarantined)
    # Whoever removes the source meanwhile is not held up: what is missing then is explained.
    with going_through_source(store, config), session.context.queue_commits(QUICK_SECONDS):
        for done in steps:
            outcome.steps.append(finish_replayed(session, done, apart))
            outcome.policy = done.policy or outcome.policy
    return outcome.as_values(session)


def plan_run(context: RunContext, source: Source, policy: Policy | None = None) -> list[Ref]:
    """Return every result that the run of `context` consists of, a replay or not, found or still to be computed."""
    return plan_replay(context, source) if context.config.kind == "replay" else plan_work(context, source, policy)


def plan_replay(context: RunContext, source: Source, executor: Callable[..., Executor] = Executor) -> list[Ref]:
    """Return every result that the replay of `context` consists of, once.

    Of one that a rule refused, those are the results up to there. `executor` makes the dry run of a context.
    """
    config, execute = context.config, executor(context=context)
    recorded, quarantined = step_history(context.store, config.replay.run), quarantined_in(context.store, config.replay)
    with suppress(EmptyBatch, GateRefused):
        deque(replay_steps(execute, source, config, recorded, quarantined), maxlen=0)  # for what `execute` notes alone
    return unique_results(execute)


class PolicyDistance:
    """Says how far the policies of a replay are from those that sampled the rollouts, and what was reported once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.warned = False
        self.empty_noted = False

    def updates(self, policy: str | None, sampled_by: str | None) -> int | None:
        """Return how many updates made `policy` since it and the one that sampled were one, by key.

        None where they never were: rollouts of others, or weights from elsewhere.
        """
        if policy is None or sampled_by is None:
            return None
        theirs = set(self._line(sampled_by))
        return next((count for count, key in enumerate(self._line(policy)) if key in theirs), None)

    def _line(self, policy: str) -> Iterator[str]:
        """Yield the keys of a policy and those it was trained from, newest first."""
        key: str | None = policy
        while key is not None:
            yield key
            entry = self._store.ledger.find(key, staleness=LEDGER_SECONDS)
            key = entry.inputs.get("policy") if entry else None


def finish_replayed(session: Session, done: Replayed, apart: PolicyDistance) -> dict[str, Any]:
    """Describe a replayed step with what was recorded and tell the watchers, with a warning where it is called for."""
    again = replayed_stages(session.config.replay)
    training = done.past.work.get("training") if "training" in again else None
    recorded = None
    if training is not None:
        updates = session.context.store.read(training.slices_of("updates"), list(MEASURES))
        recorded = {"key": training.key, **updates.to_pylist()[-1]}
    described = describe(session.context, done.step, tuple(done.work.values()))
    # What was shared took its time when it was recorded, not now.
    described["seconds"] = {name: value for name, value in described["seconds"].items() if name in (*again, "metrics")}
    described["recorded"] = recorded
    described["updates_apart"] = apart.updates(done.policy_in.key if done.policy_in else None, done.sampled_by)
    update = described["update"]
    same = None if update is None or recorded is None else update["weights_sha256"] == recorded["weights_sha256"]
    described["same_weights"] = same
    notify_step(session, described, tuple(done.work.values()))
    for text in _notes(done, described, apart):
        session.notify("note", text=text)
    return described


def _notes(done: Replayed, described: dict[str, Any], apart: PolicyDistance) -> list[str]:
    if done.batch is not None and not done.batch.packing.num_rows("batches"):
        line = f"step {done.step}: the batch is empty under these settings; the policy stays as it is"
        noted, apart.empty_noted = apart.empty_noted, True
        return [] if noted else [line]  # the summary counts the others
    masked = (described["update"] or {}).get("masked_fraction")
    if masked is None or masked <= OUTSIDE or apart.warned:
        return []
    apart.warned = True  # once is enough: a policy that has left seldom comes back
    before, count = (described["recorded"] or {}).get("masked_fraction"), described["updates_apart"]
    share = "-" if before is None else f"{before:.0%}"
    updates = "no number of updates" if count is None else f"{count} update{'' if count == 1 else 's'}"
    return [
        f"step {done.step}: {masked:.0%} of the tokens are outside the trust region (recorded: {share}); the policy is "
        f"{updates} away from the one that sampled. What it learns from these rollouts is less and less its own; to "
        "sample again: stagecoach replay --from rollout"
    ]


def trains_again(config: RunConfig) -> bool:
    """Tell whether a run is a replay that trains."""
    return config.kind == "replay" and "training" in replayed_stages(config.replay)


def summary(outcome: dict[str, Any], config: RunConfig) -> list[str]:
    """Return the lines that end a replay: what was done, whether the weights are the recorded ones, what to look at."""
    replay, trained = config.replay, [step for step in outcome["steps"] if step["update"] is not None]
    lines = [
        f"replay {config.name} of {replay.run} from {replay.from_stage}: {outcome['num_computed']} pieces of work "
        f"computed, {outcome['num_found']} cached"
    ]
    if trains_again(config) and (num_empty := len(outcome["steps"]) - len(trained)):
        lines.append(f"{num_empty} of {len(outcome['steps'])} steps had an empty batch and trained nothing")
    compared = [step for step in trained if step["same_weights"] is not None]
    if compared:
        parted = next((f"step {step['step']}" for step in compared if not step["same_weights"]), "")
        lines.append(f"weights part from the recorded ones at {parted}" if parted else SAME_WEIGHTS)
    masked = [step["update"]["masked_fraction"] for step in trained if step["update"]["masked_fraction"] is not None]
    if masked:
        worst = max(step["update"]["mismatch_kl"] or 0.0 for step in trained)
        outside = f"at most {max(masked):.1%} of tokens outside the trust region"
        lines.append(f"importance ratio: {outside}, KL up to {worst:.2g}")
    store = "" if config.store == default_store() else f" --store {config.store}"
    return [*lines, f"compare: stagecoach diff {replay.run} {config.name}{store}"]


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
            f"run {config.replay.run!r} was removed from the store while it was replayed",
            f"replay {config.name!r}",
            f"all that {config.name!r} has finished, with the recorded work that it shares",
            removal_advice(config),
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


def publish_diff(store: Store, a: str, b: str) -> dict[str, Any]:
    """Compare two runs and show it in Prefect, in the flow run around; return the differences.

    A Prefect API that does not answer is only logged: the differences do not depend on it.
    """
    import httpx
    from prefect.artifacts import create_markdown_artifact, create_table_artifact

    found = dict(compare(StoreReader(store), a, b))
    names = f"{a}-{b}"
    about = f"Run {escape(b)} against {escape(a)}"
    try:
        create_markdown_artifact(diff_markdown(found), key=artifact_key("diff", names), description=about)
        create_table_artifact(diff_rows(found), key=artifact_key("diff-steps", names), description=f"{about}, by step")
    except httpx.HTTPError as problem:
        _log.warning("the differences are not shown in Prefect: %s", problem)
    return found


def diff_markdown(found: Mapping[str, Any]) -> str:
    """Return the differences as a page of markdown."""
    a, b = (each["run"] for each in found["runs"])
    lines = [f"# {escape(a)} and {escape(b)}"]
    for line in summary_lines(found):
        lines += ["", escape(line)]
    for sheet in sheets(found):
        cells = [map(escape, row) for row in sheet.rows]
        table = markdown_table(map(escape, sheet.headings), cells, numbers=False)
        lines += ["", f"## {escape(sheet.title)}", "", *table]
    return "\n".join(lines)


def diff_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the differences by step as rows of a table artifact."""
    (by_step,) = (sheet for sheet in sheets(found) if sheet.name == "steps")
    return [dict(zip(by_step.headings, map(visible, row), strict=True)) for row in by_step.rows]

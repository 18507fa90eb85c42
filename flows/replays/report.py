"""What a replayed step came to, beside what was recorded: how far its policy is from the one that sampled."""

from collections.abc import Iterator
from typing import Any

from configs.replay import replayed_stages
from configs.run import RunConfig
from flows.replays.steps import Replayed
from flows.runtime.session import Session
from flows.runtime.step_report import describe
from storage.read.lineage import Work
from storage.store import Store
from tasks.runtime.run_context import LEDGER_SECONDS

OUTSIDE = 0.1
"""Share of a step's tokens outside the trust region above which it is said that the replay has left it."""
MEASURES = ("loss", "grad_norm", "mismatch_kl", "mismatch_kl_max", "masked_fraction", "weights_sha256")


class PolicyDistance:
    """Says how far the policies of a replay are from those that sampled the rollouts, and whether that was told."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.warned = False

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
    recorded = _measured(session.context.store, training)
    described = describe(session.context, done.step, tuple(done.work.values()))
    described["seconds"] = {
        stage: value for stage, value in described["seconds"].items() if stage in (*again, "metrics")
    }
    described["recorded"] = recorded
    described["updates_apart"] = apart.updates(done.policy_in.key if done.policy_in else None, done.sampled_by)
    update = described["update"]
    same = None if update is None or recorded is None else update["weights_sha256"] == recorded["weights_sha256"]
    described["same_weights"] = same
    session.notify("step", **described)
    for text in _notes(done, described, apart):
        session.notify("note", text=text)
    return described


def _measured(store: Store, training: Work | None) -> dict[str, Any] | None:
    """Return what the recorded training of a step measured last; None where there is none to compare with."""
    if training is None:
        return None
    row = store.read(training.slices_of("updates"), list(MEASURES)).to_pylist()[-1]
    return {"key": training.key, **row}


def _notes(done: Replayed, described: dict[str, Any], apart: PolicyDistance) -> list[str]:
    if done.batch is not None and not done.batch.packing.num_rows("batches"):
        return [f"step {done.step}: the batch is empty under these settings; the policy stays as it is"]
    masked = (described["update"] or {}).get("masked_fraction")
    if masked is None or masked <= OUTSIDE or apart.warned:
        return []
    apart.warned = True
    return [
        f"step {done.step}: {masked:.0%} of the tokens are outside the trust region (recorded: "
        f"{_share(described['recorded'])}); the policy is {_updates(described)} away from the one that sampled. "
        f"What it learns from these rollouts is less and less its own; to sample anew: stagecoach replay --from rollout"
    ]


def _updates(described: dict[str, Any]) -> str:
    count = described["updates_apart"]
    return "no number of updates" if count is None else f"{count} update{'' if count == 1 else 's'}"


def _share(recorded: dict[str, Any] | None) -> str:
    value = (recorded or {}).get("masked_fraction")
    return "-" if value is None else f"{value:.0%}"


def trains_again(config: RunConfig) -> bool:
    """Tell whether a run is a replay that trains."""
    return config.kind == "replay" and "training" in replayed_stages(config.replay)


def summary(outcome: dict[str, Any], config: RunConfig) -> list[str]:
    """Return the lines that end a replay: what was done, whether the weights are the recorded ones, what to look at."""
    replay, trained = config.replay, [step for step in outcome["steps"] if step["update"] is not None]
    lines = [
        f"replay {config.name} of {replay.run} from {replay.from_stage}: {outcome['num_computed']} pieces of work were "
        f"computed, {outcome['num_found']} were in the ledger"
    ]
    compared = [step for step in trained if step["same_weights"] is not None]
    if compared:
        parted = next((step["step"] for step in compared if not step["same_weights"]), None)
        what = (
            "are the recorded ones at every step" if parted is None else f"part from the recorded ones at step {parted}"
        )
        lines.append(f"weights {what}")
    masked = [step["update"]["masked_fraction"] for step in trained if step["update"]["masked_fraction"] is not None]
    if masked:
        worst = max(step["update"]["mismatch_kl"] or 0.0 for step in trained)
        lines.append(
            f"importance ratio: at most {max(masked):.1%} of tokens outside the trust region, KL up to {worst:.2g}"
        )
    store = "" if config.store == RunConfig().store else f" --store {config.store}"
    return [*lines, f"compare: stagecoach diff {replay.run} {config.name}{store}"]

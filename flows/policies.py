"""Policies by name: RUN for a run's last one, RUN:VERSION for an earlier one."""

from storage.store import Store
from tasks.stage import Policy


class PolicyUnknown(ValueError):
    """No policy of the store goes by that name."""


def find_policy(store: Store, name: str) -> Policy | None:
    """Return the policy that `name` names: RUN for a run's last one, RUN:VERSION for an earlier one; None for none.

    Raises PolicyUnknown when the run has no such policy.
    """
    if not name:
        return None
    run, _, wanted = name.partition(":")
    imported = [entry.key for entry in store.ledger.entries(run=run, stage="policy_import")]
    made = dict(enumerate(imported[-1:]))
    made |= {entry.step + 1: entry.key for entry in store.ledger.entries(run=run, stage="training")}
    number = int(wanted) if wanted.isdecimal() else max(made, default=0)
    if number not in made or (wanted and not wanted.isdecimal()):
        has = f"has the versions {', '.join(map(str, sorted(made)))}" if made else "has made no policy"
        runs = f"; the last runs in {store.root.address} are: {', '.join(store.runs.names()[-5:]) or 'none'}"
        raise PolicyUnknown(
            f"there is no policy {name!r}: run {run!r} {has}{'' if made else runs}. Name one as RUN or RUN:VERSION"
        )
    return Policy(made[number], number)

"""Suspects: which rollouts were under way whenever an environment server died."""

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tasks.columns import texts
from tasks.inference.failures import Failure
from tasks.inference.liveness import UnderWay

SUSPECT_AFTER = 2
"""Losses of its server during which a group was under way, from which on it is suspected."""
TRIED_MEMBERS = 2
"""Members of a group that may take the server down, each alone; what is left of the group is not tried."""


class Suspects:
    """Finds the rollouts that take their environment server down, so that they cost the others nothing.

    Groups that were under way at two losses of their server are sampled after all others, and of those one rollout at
    a time. One that is then alone when the server dies again is condemned: a row with an error, not tried again.
    """

    def __init__(self) -> None:
        self._losses = Counter[str]()
        self._alone = Counter[str]()
        self.condemned: dict[str, Failure] = {}
        """Why an assignment is not tried again, by its id."""

    def lost(self, service: str, under_way: Sequence[UnderWay], alone: bool = True) -> bool:
        """Count a loss of a server; `under_way` are the rollouts that it had. Tell whether one is condemned for it.

        `alone` says that nobody else sampled there: another step or an evaluation may have had rollouts under way too.
        """
        groups = {each.group_id for each in under_way}
        self._losses.update(groups)
        if not alone or len(under_way) != 1 or self._losses[under_way[0].group_id] < SUSPECT_AFTER:
            return False
        (only,) = under_way
        self._alone[only.group_id] += 1
        text = f"{service} died while this rollout alone was under way there; it is not tried again"
        self.condemned[only.assignment_id] = Failure("infrastructure", "ServerLost", text)
        return True

    def next(self, missing: pa.Table) -> tuple[pa.Table, bool]:
        """Return which of the missing assignments to sample next, and whether one at a time."""
        groups = list(dict.fromkeys(texts(missing["group_id"])))
        others = [group for group in groups if self._losses[group] < SUSPECT_AFTER]
        chosen = _of_groups(missing, others or groups[:1])
        return chosen, not others

    def untried(self, assignments: pa.Table) -> dict[str, Failure]:
        """Return why assignments are not tried: the condemned ones, and all of a group that has had its tries."""
        found = dict(self.condemned)
        for assignment, group in zip(texts(assignments["assignment_id"]), texts(assignments["group_id"]), strict=True):
            if self._alone[group] >= TRIED_MEMBERS and assignment not in found:
                text = (
                    f"{self._alone[group]} other rollouts of its group took their environment server down, each alone"
                )
                found[assignment] = Failure("infrastructure", "ServerLost", f"not tried: {text}")
        return found


def _of_groups(assignments: pa.Table, groups: Sequence[str]) -> pa.Table:
    return assignments.filter(pc.is_in(assignments["group_id"], value_set=pa.array(groups, pa.string())))

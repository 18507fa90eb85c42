"""A fixed rollout table: rows made from assignments alone, so that any two runs sample the same, in whatever order."""

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from storage.schemas.stage_tables import EXAMPLES
from tests.builders import example, exchange, table, trace

ENVIRONMENT = "reverse_text"
NUM_EXAMPLES = 12
TOKENS = range(10, 250)
UNIFORM = -math.log(512)  # about what a model that has learnt nothing gives each token of its vocabulary
Group = dict[str, pa.Table]


def examples() -> pa.Table:
    """Return the examples of an environment that nobody starts."""
    rows = [example(f"example-{number}", ENVIRONMENT) for number in range(NUM_EXAMPLES)]
    return pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)


def group(assignments: list[dict[str, Any]], policy: dict[str, Any], step: int) -> Group:
    """Return the finished rollouts of one group; rewards differ within it, log-probs are those of no training."""
    traces, messages = [], []
    for assignment in assignments:
        chance = random.Random(hashlib.sha256(assignment["assignment_id"].encode()).digest())
        name = f"trace-{assignment['assignment_id'].replace('/', '-')}"
        prompt = chance.choices(TOKENS, k=chance.randint(4, 9))
        completion = chance.choices(TOKENS, k=chance.randint(3, 8))
        logprobs = [UNIFORM + chance.uniform(-0.1, 0.1) for _ in completion]
        messages += exchange(name, prompt, completion, logprobs=logprobs)
        traces.append(
            trace(
                name,
                group_id=assignment["group_id"],
                reward=chance.random(),
                assignment_id=assignment["assignment_id"],
                environment=assignment["environment"],
                example_id=assignment["example_id"],
                policy_key=policy["key"],
                policy_version=policy["version"],
                staleness=step - policy["version"],
                num_input_tokens=len(prompt),
                num_output_tokens=len(completion),
            )
        )
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


def groups(assignments: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Return the assignments by group, in table order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in assignments.to_pylist():
        found.setdefault(row["group_id"], []).append(row)
    return found


def sampler(backwards: bool, begun: Callable[[str], None], handed_over: Callable[[str], None]) -> Callable[..., None]:
    """Return what stands in for sampling: it hands over group by group and says so before and after each."""

    def sample(
        assignments: pa.Table,
        examples: pa.Table,
        *,
        policy: dict[str, Any],
        step: int,
        on_group: Callable[[str, Group], None],
        **_: Any,
    ) -> None:
        known = set(examples["example_id"].to_pylist())
        members = groups(assignments)
        for group_id in sorted(members, reverse=backwards):
            assert {row["example_id"] for row in members[group_id]} <= known
            begun(group_id)
            on_group(group_id, group(members[group_id], policy, step))
            handed_over(group_id)

    return sample

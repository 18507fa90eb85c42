"""Fan-out: one episode is many rollouts, and each of them is judged once, credited once and packed once."""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.metrics.accounting import account
from tasks.packing.stage import STAGE as PACKING
from tests.fixtures.builders import assignment, environments, exchange, failed, table, trace, view
from tests.fixtures.stages import packing, tables_of, through_advantage, written

SEATS = ("for", "against", "judge", "user")
RULES = st.fixed_dictionaries({"drop_judge": st.booleans(), "learner_seat": st.booleans()})


@st.composite
def episodes(draw):
    """Traces of one step: groups of episodes, each with some runs of some seats, of which any may have failed."""
    rows = []
    for group in range(draw(st.integers(1, 3))):
        for member in range(draw(st.integers(1, 3))):
            name = f"{group}-{member}"
            common = {
                "group_id": f"g{group}",
                "episode_id": f"episode-{name}",
                "assignment_id": f"g{group}/{member}",
                "example_id": f"e{group}",
                "info": json.dumps({"learner_seat": draw(st.sampled_from(SEATS[:2]))}),
            }
            for run, seat in enumerate(draw(st.lists(st.sampled_from(SEATS), min_size=1, max_size=6))):
                own = common | {"agent": seat, "trainable": seat != "user"}
                if draw(st.integers(0, 4)) == 0:
                    early = {"info": "{}"} if draw(st.booleans()) else {}
                    rows.append(failed(f"{name}-{run}", **(own | early)))
                else:
                    reward = draw(st.sampled_from([0.0, 1.0, -1.0, None])) if seat != "judge" else 0.0
                    rows.append(trace(f"{name}-{run}", reward=reward, **own))
    return rows


def is_trained(row, rules):
    """Whether a trace's seat is trained, said the slow way."""
    if not row["trainable"] or (rules["drop_judge"] and row["agent"] == "judge"):
        return False
    return not rules["learner_seat"] or json.loads(row["info"])["learner_seat"] == row["agent"]


@settings(deadline=None, max_examples=12)
@given(rows=episodes(), rules=RULES)
def test_every_trace_has_one_verdict_and_every_kept_one_is_in_one_row_of_the_batch(rows, rules):
    section = {"environments": environments(reverse=rules), "algorithm": {"type": "rae"}}
    number = {row["trace_id"]: place for place, row in enumerate(rows)}
    messages = [
        each
        for row in rows
        for each in exchange(row["trace_id"], prompt=[500], completion=[number[row["trace_id"]]] * 2)
    ]
    tables = tables_of(rows, messages) | {"estimator_states": table("estimator_states", [])}
    tables = through_advantage(tables, step=1, filtering={"filters": [{"type": "errored"}]}, **section)
    verdicts = tables["verdicts"].to_pylist()
    assert [row["trace_id"] for row in verdicts] == [row["trace_id"] for row in rows]
    kept = {row["trace_id"] for row in verdicts if row["keep"]}
    assert kept == {row["trace_id"] for row in rows if row["error_class"] is None and is_trained(row, rules)}

    assert Counter(row["trace_id"] for row in tables["samples"].to_pylist()) == Counter(kept)
    batches = written(packing(tables, view(PACKING, packing={"tokens_per_row": 64, "zero_advantages": True})))[
        "batches"
    ].to_pylist()
    weighted = {row["trace_id"] for row in tables["samples"].to_pylist() if row["reward"] is not None}
    packed = Counter(sample.rpartition("/")[0] for row in batches for sample in row["sample_ids"] if sample)
    assert packed == Counter(weighted)
    for row in batches:
        trained_tokens = {token for token, weight in zip(row["token_ids"], row["rl_weights"], strict=True) if weight}
        assert trained_tokens == {number[sample.rpartition("/")[0]] for sample in row["sample_ids"] if sample}

    assigned = table("assignments", [assignment(each) for each in {row["assignment_id"]: row for row in rows}.values()])
    shares = account(assigned, tables["traces"], tables["verdicts"], tables["samples"], table("batches", batches))
    assert shares.total() == len(rows)
    assert shares["trained", ""] == len(weighted)

"""Lineage of rows against joins written out by hand: every ancestor of a batch row, every descendant of a rollout."""

import json
import random

import pytest

from flows import cli
from flows.cli.lineage_tree import as_values, trace_lineage
from flows.queries.row_lineage import UnknownId, identify
from storage.read.frames import Frames
from tests.flows.queries.conftest import Row, Rows
from tests.flows.queries.every_outcome import RUNS, UNFIT

Names = set[tuple[str, str, str]]


def source_of(row: Row) -> str:
    """The key of the traces that a work took: those scored again where there are any."""
    return str(row["inputs"].get("regrade") or row["inputs"]["rollout"])


def found(frames: Frames, text: str, direction: str, kind: str = "") -> Names:
    """Kind, id and key of every row but the verdicts."""
    tree = trace_lineage(frames, text, [direction], kind).trees[direction]
    return {(node.kind, node.id, node.key) for node in tree.facts if node.kind != "verdict"}


def expected_up(rows: Rows, run: str, row: Row) -> Names:
    """Everything that a batch row came from, by the columns that name it."""
    credits = [each for each in rows(run, "samples") if each["key"] == row["inputs"]["advantage"]]
    samples = [each for each in credits if each["sample_id"] in row["sample_ids"]]
    names: Names = {("row", str(row["row"]), row["key"])}
    names |= {("sample", each["sample_id"], each["key"]) for each in samples}
    wanted = {(each["trace_id"], source_of(each)) for each in samples}
    traces = [each for each in rows(run, "traces") if (each["trace_id"], each["key"]) in wanted]
    if "regrade" in row["inputs"]:
        wanted |= {(each["trace_id"], row["inputs"]["rollout"]) for each in traces}
        traces = [each for each in rows(run, "traces") if (each["trace_id"], each["key"]) in wanted]
    names |= {("trace", each["trace_id"], each["key"]) for each in traces}
    names |= {("policy", each["policy_key"], each["policy_key"]) for each in traces}
    assigned = {(each["assignment_id"], each["inputs"].get("assignment")) for each in traces}
    assignments = [each for each in rows(run, "assignments") if (each["assignment_id"], each["key"]) in assigned]
    names |= {("assignment", each["assignment_id"], each["key"]) for each in assignments}
    return names | {
        ("example", f"{each['environment']}/{each['example_id']}", each["inputs"]["examples"]) for each in assignments
    }


def expected_down(rows: Rows, trace: Row) -> Names:
    """Everything that came of a rollout in any run, by the columns that name it."""
    names: Names = {("trace", trace["trace_id"], trace["key"])}
    sources = {trace["key"]}
    for run in RUNS:
        again = [each for each in rows(run, "traces") if each["inputs"].get("rollout") == trace["key"]]
        sources |= {each["key"] for each in again}
        names |= {("trace", each["trace_id"], each["key"]) for each in again if each["trace_id"] == trace["trace_id"]}
    for run in RUNS:
        credits = [each for each in rows(run, "samples") if each["trace_id"] == trace["trace_id"]]
        samples = {(each["sample_id"], each["key"]) for each in credits if source_of(each) in sources}
        packed = [
            each
            for each in rows(run, "batches")
            if any((sample, each["inputs"]["advantage"]) in samples for sample in each["sample_ids"])
        ]
        numbers = {(each["key"], each["update"]) for each in packed}
        updates = [each for each in rows(run, "updates") if (each["inputs"]["packing"], each["update"]) in numbers]
        names |= {("sample", *sample) for sample in samples}
        names |= {("row", str(each["row"]), each["key"]) for each in packed}
        names |= {("update", str(each["update"]), each["key"]) for each in updates}
        names |= {("policy", each["key"], each["key"]) for each in updates}
    return names


def test_every_ancestor_of_random_batch_rows(frames, rows):
    every = [(run, row) for run in RUNS for row in rows(run, "batches") if row["sample_ids"]]
    for run, row in random.Random(4).sample(every, 6):
        names = expected_up(rows, run, row)
        assert {kind for kind, *_ in names} == {"row", "sample", "trace", "policy", "assignment", "example"}
        assert found(frames, f"{row['key']}/{row['row']}", "up") == names
    assert {run for run, _ in random.Random(4).sample(every, 6)} > {"base"}


def test_every_descendant_of_random_rollouts_in_all_runs(frames, rows):
    every = {(row["trace_id"], row["key"]): row for run in RUNS for row in rows(run, "traces")}
    for row in random.Random(5).sample(list(every.values()), 8):
        start = {name for name in found(frames, row["trace_id"], "down") if name[0] == "trace"}
        names = set().union(*(expected_down(rows, every[trace, key]) for _, trace, key in start))
        assert found(frames, row["trace_id"], "down") == names


def test_a_rollout_that_was_scored_again_came_from_the_one_that_was_sampled(frames):
    edges = [
        (near, far)
        for near, reached in trace_lineage(frames.run("regraded"), "trace-0-0-2", ["up"]).trees["up"].next.items()
        for far in reached
        if near.kind == far.kind == "trace"
    ]
    assert [(frames.graph.works[a.key].stage, frames.graph.works[b.key].stage) for a, b in edges] == [
        ("regrade", "rollout")
    ]


def test_all_ways_to_name_a_row_name_the_same(frames, rows):
    row = next(row for row in rows("base", "batches") if row["step"] == 1)
    policy = next(row for row in rows("base", "policies") if row["version"] == 2)
    number = row["row"]
    assert identify(frames, f"base:1:{number}").roots == identify(frames, f"{row['key'][:8]}/{number}").roots
    assert identify(frames, "base:2").roots == identify(frames, "base").roots
    assert [root.key for root in identify(frames, policy["key"][:8]).roots] == [policy["key"]]
    assert {root.kind for root in identify(frames, "reverse_text/example-3").roots} == {"example"}
    assert {root.kind for root in identify(frames, "0-0/2").roots} == {"assignment"}
    assert {root.kind for root in identify(frames, "trace-0-0-2/1").roots} == {"sample"}


def test_ids_that_name_nothing_or_too_much_are_errors(frames, rows):
    with pytest.raises(UnknownId, match="'trace-0-0-9' names nothing"):
        identify(frames, "trace-0-0-9")
    with pytest.raises(UnknownId, match="is the beginning of several ids, trace-0-0-0, trace-0-0-1"):
        identify(frames, "trace-0-0")
    with pytest.raises(UnknownId, match="run 'begun' of store"):
        identify(frames.run("begun"), "branch:1")
    with pytest.raises(UnknownId, match="'rollout' is no kind of thing that an id can name; there are example, "):
        identify(frames, "trace-0-0-0", "rollout")
    sampling = rows("base", "traces")[0]["key"]
    with pytest.raises(UnknownId, match=f"'{sampling}' names nothing"):
        identify(frames, sampling)  # the key of other work than a policy is no id


def test_programs_get_sections_versions_and_edges(root, frames, capsys):
    assert cli.main(["lineage", "base:2", "--up", "--json", "--store", str(root)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads(json.dumps(as_values(trace_lineage(frames, "base:2", ["up"]))))
    sections = {work["stage"]: work["section"] for work in values["works"]}
    assert sections["advantage"]["algorithm"]["type"] == "grpo"
    assert {"assignment", "rollout", "filtering", "advantage", "packing", "training", "examples"} <= set(sections)
    assert [policy["version"] for policy in values["up"]["policies"]] == [0, 1]
    names = {row["name"] for row in values["up"]["rows"]}
    assert all(near in names and far in names for near, far in values["up"]["edges"])
    assert "down" not in values


def test_people_get_a_tree(root, capsys):
    assert cli.main(["lineage", UNFIT, "--store", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "─ assignment 0-0/0: group_id 0-0" in printed and "keep False, reason quarantined" in printed
    assert "Policies that go back to it, of base: 1 to 2 (2)" in printed
    assert "Policies before it, of base: 0\n" in printed

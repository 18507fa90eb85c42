"""The numbers of a run by step: the same as a run reports of each step, read once, and as far as a step has come."""

import json
import math
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from configs.filters import filter_name
from flows.metrics import step_metrics
from flows.viewer.data.run_steps import steps_of
from flows.viewer.data.series import numbers, series, steps
from flows.viewer.data.series_rollouts import COLUMNS, OF_VERDICTS, metric, rollout_numbers
from flows.viewer.data.series_updates import update_numbers
from flows.viewer.library import Library
from flows.views import show
from storage.read.frames import Frames
from storage.refs import Entry
from storage.schemas.stage_tables import TRACES
from tasks.inference.sampling.failures import STRAGGLER
from tests.builders import table, trace, verdict
from tests.flows.rehearsal import rehearse
from tests.flows.test_refills import EQUAL, REFILL, play
from tests.flows.viewer.hand_made import NOW, RUN, HandMade, update
from tests.flows.viewer.stepped import begun

OWN = ("longest_output",)
"""What only the viewer tells of rollouts."""
MORE = (*OWN, "updates", "timing", "tokens", "tokens_per_second", "accounting")
"""What it tells beside the numbers of rollouts and updates."""
ONE_LOOK = [(name, 1) for name in ("batches", "credits", "traces", "updates", "verdicts")]
"""Tables that are read, and at how many pieces of work, where there is one new step."""
OURS = {"run", "step", "finished", "kept"}


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Library:
    root = tmp_path_factory.mktemp("series") / "store"
    rehearse(root, "a", steps=2)
    return Library.at(root)


def reported(library: Library, run: str) -> Iterator[dict[str, float]]:
    """What `flows.metrics` says of each step, from rows that are read with their digests checked."""
    filters = [filter_name(each) for each in library.config(run).filtering.filters]
    for each in steps_of(library, run):
        read = library.store.read
        traces = read([piece for work in each.traces for piece in work.slices_of("traces")])
        assert each.verdicts is not None and each.updates is not None
        (last,) = read(each.updates.slices_of("updates")).to_pylist()[-1:]
        yield step_metrics(traces, read(each.verdicts.slices_of("verdicts")), last, {}, {}, filters)


def test_the_numbers_are_those_that_a_run_reports(walked: Library) -> None:
    rows = steps(walked, "a").to_dicts()
    expected = list(reported(walked, "a"))
    assert len(rows) == len(expected) == 2
    for row, known in zip(rows, expected, strict=True):
        assert {name: row[name] for name in known} == known
        more = {name for name in row if name not in known} - OURS
        assert all(
            name.split("/")[0] in (*OWN, "updates", "timing", "tokens", "tokens_per_second", "accounting")
            for name in more
        )
    assert len({row["reward/all/mean"] for row in rows}) == 2, "every step has rewards of its own"


def test_the_numbers_are_those_that_show_prints(walked: Library) -> None:
    told = show.describe(walked.store, "a", walked.config("a"))["steps"]
    for each, shown in zip(numbers(walked, "a"), told, strict=True):
        assert each.value("reward/mean", "all") == pytest.approx(shown["reward"], rel=1e-12)
        assert each.value("kept") == shown["kept"]
        for name in ("loss", "grad_norm", "mismatch_kl"):
            assert each.value(f"updates/{name}/mean") == pytest.approx(shown[name], rel=1e-12)
        assert {stage: each.value(f"timing/stage/{stage}") for stage in shown["seconds"]} == shown["seconds"]
        assert {stage: each.value(f"tokens/stage/{stage}") for stage in shown["tokens"]} == shown["tokens"]


def invented(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a step in which everything that can be missing is: scores, verdicts, a whole environment's rewards."""
    chance = random.Random(seed)
    traces, verdicts = [], []
    for number in range(chance.randint(1, 40)):
        error = chance.choice([None, None, None, "timeout", "model", STRAGGLER])
        reward = None if error or chance.random() < 0.2 else chance.choice([0.1, 0.2, 1.0, chance.random()])
        measured = {name: chance.random() for name in ("exact", "format") if chance.random() < 0.5}
        made: dict[str, Any] = {
            "environment": chance.choice(["debate", "sums"]),
            "agent": chance.choice(["first", "second"]),
            "trainable": chance.random() < 0.7,
            "staleness": chance.randint(0, 2),
            "is_truncated": chance.random() < 0.3,
            "num_turns": chance.randint(0, 4),
            "num_branches": chance.randint(0, 3),
            "num_output_tokens": chance.randint(0, 99),
            "error_class": error,
            "metrics": json.dumps(measured | {"note": "text", "flag": True}),
            "setup_seconds": chance.random(),
            "generation_seconds": chance.random() * 1e6,
        }
        traces.append(trace(f"t{number}", reward=reward, **made))
        if chance.random() < 0.8:
            found = chance.sample(["truncated", "gibberish", "mine"], k=chance.randint(0, 3))
            verdicts.append(verdict(f"t{number}", reason=found[0] if found else None) | {"detected": found})
    return traces, verdicts


@pytest.mark.parametrize("seed", range(25))
def test_grouped_by_columns_or_gone_through_row_by_row_it_is_the_same(seed: int) -> None:
    steps = {"0": invented(seed), "1": invented(seed + 1000)}
    filters = ("errored", "gibberish")

    def rows(table_name: str, which: int, columns: tuple[str, ...]) -> pl.DataFrame:
        frames = []
        for step, own in steps.items():
            made = pl.from_arrow(table(table_name, own[which]))
            assert isinstance(made, pl.DataFrame)
            frames.append(made.select(each for each in columns if each != "key").with_columns(step=pl.lit(step)))
        return pl.concat(frames)

    found = rollout_numbers(rows("traces", 0, COLUMNS), rows("verdicts", 1, OF_VERDICTS), dict.fromkeys(steps, filters))
    for step, (traces, verdicts) in steps.items():
        expected = step_metrics(table("traces", traces), table("verdicts", verdicts), None, {}, {}, filters)
        named = {metric(*name): value for name, value in found[step].items() if name[1] not in OWN}
        assert named == expected


def test_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    broken = update(update=1, loss=math.nan, grad_norm=math.inf, metrics='{"not_finite": ["worst"], "clipped": true}')
    rows = [trace("t0", reward=math.inf), trace("t1", reward=None), trace("t2", reward=None)]
    made.step(rows, [], updates=[update(loss=0.5, grad_norm=2.0), broken], credits=[], batches=[])
    (each,) = numbers(Library.at(tmp_path), RUN)
    assert each.value("reward/mean", "all") == math.inf and math.isnan(each.values["all", "reward/std"])
    assert each.value("rollouts", "all") == 3


def test_several_updates_on_a_batch_have_a_mean_and_ends(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    rows = [
        update(update=n, loss=loss, entropy=None, rl_tokens=2, ref_kl_tokens=1) for n, loss in enumerate((1.0, 4.0))
    ]
    key = made.work("training", {"updates": rows})
    broken = made.work("training", {"updates": [update(loss=math.nan), update(update=1, loss=1.0)]}, step=1)
    library = Library.at(tmp_path)
    found = update_numbers(library, [library.graph.works[each] for each in (key, broken)])
    told = found[key]
    assert (told["update/loss"], told["updates"]) == (4.0, 2.0), "the last one, as a run reports it"
    assert [told[f"updates/loss/{end}"] for end in ("mean", "min", "max")] == [2.5, 1.0, 4.0]
    assert "updates/entropy/mean" not in told, "not measured is not zero"
    assert told["updates/weighted_tokens"] == 4.0, "reference KL is of tokens that the rl component has"
    assert all(math.isnan(found[broken][f"updates/loss/{end}"]) for end in ("mean", "min", "max"))
    assert found[broken]["update/loss"] == 1.0


def test_an_unfinished_step_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    library = begun(tmp_path, 2)
    (each,) = numbers(library, RUN)
    assert (each.work.finished, each.value("rollouts", "all")) == (False, 4.0)
    begun(tmp_path, 3)
    (later,) = numbers(library, RUN)
    assert later.value("rollouts", "all") == 6.0, "what was kept of two parts is not taken for three"
    assert later.value("reward/mean", "all") is None, "nothing was scored, which is no reward of zero"


def test_of_a_step_that_was_drawn_again_the_last_batch_counts(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    for number, reward in enumerate((0.0, 1.0)):
        rollouts, verdicts = (f"{name}{number}".encode().hex().ljust(32, "0") for name in ("rollout", "filtering"))
        for key, stage, rows, inputs in (
            (rollouts, "rollout", table("traces", [trace(f"t{number}", reward=reward)]), {}),
            (verdicts, "filtering", table("verdicts", [verdict(f"t{number}")]), {"rollout": rollouts}),
        ):
            name = "traces" if stage == "rollout" else "verdicts"
            piece = made.store.append(name, rows, run=RUN, step=0, key=key, attempt=key)
            at = NOW + timedelta(minutes=number)
            made.store.ledger.commit(Entry(RUN, 0, stage, 1, key, "", key, {}, inputs, (piece,), at, at))
    (each,) = numbers(Library.at(tmp_path), RUN)
    assert (each.value("rollouts", "all"), each.value("reward/mean", "all")) == (1.0, 1.0)


def test_the_frames_say_the_same_wide_and_long(walked: Library) -> None:
    wide, long = steps(walked, "a"), series(walked, "a")
    assert long.columns == ["run", "step", "finished", "scope", "name", "value"]
    for row in long.iter_rows(named=True):
        value = wide.filter(pl.col("step") == row["step"])[metric(row["scope"], row["name"])].item()
        assert value == row["value"]
    assert long.height == sum(len(each.values) for each in numbers(walked, "a")) > 100


class Counted:
    """Counts which work is read of which table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[str, int]] = []
        read = Frames.of

        def of(frames: Frames, works: Any, name: str) -> pl.LazyFrame:
            asked = list(works)
            self.reads += [(name, len(asked))] if asked else []
            return read(frames, asked, name)

        monkeypatch.setattr(Frames, "of", of)


@pytest.mark.engine  # a whole run of its own
def test_a_refresh_reads_only_the_new_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    rehearse(root, "a", steps=1)
    library, counted = Library.at(root), Counted(monkeypatch)
    first = numbers(library, "a")
    assert sorted(counted.reads) == ONE_LOOK, "one look at each table"
    counted.reads.clear()
    rehearse(root, "a", steps=2)
    later = numbers(library, "a")
    assert sorted(counted.reads) == ONE_LOOK
    assert [each.values for each in later[:1]] == [each.values for each in first] and len(later) == 2
    counted.reads.clear()
    numbers(library, "a")
    assert counted.reads == []


def test_reading_takes_no_more_than_names_and_numbers() -> None:
    heavy = {"record", "info", "error_message", "error_traceback"}
    kinds = {field.name: field.type for field in TRACES.arrow}
    assert not heavy & set(COLUMNS) and not any(pa.types.is_list(kinds[name]) for name in COLUMNS if name != "key")


@pytest.mark.engine  # a whole run of its own
def test_groups_that_were_replaced_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    play(monkeypatch, EQUAL)
    rehearse(root, "a", **REFILL)
    library = Library.at(root)
    told = show.describe(library.store, "a", library.config("a"))["steps"]
    found = numbers(library, "a")
    assert [len(each.work.traces) for each in found] == [3, 2], "groups were replaced in both steps"
    for each, shown in zip(found, told, strict=True):
        assert each.value("reward/mean", "all") == pytest.approx(shown["reward"], rel=1e-12)
        assert {stage: each.value(f"timing/stage/{stage}") for stage in shown["seconds"]} == shown["seconds"]
        assert each.value("rollouts", "all") == shown["rows"]["rollout"]["traces"]


def test_nothing_is_written(walked: Library) -> None:
    root = Path(walked.store.root.address)
    before = sorted((path, os.stat(path).st_mtime_ns) for path in root.rglob("*"))
    numbers(walked, "a")
    steps(walked, "a")
    assert sorted((path, os.stat(path).st_mtime_ns) for path in root.rglob("*")) == before

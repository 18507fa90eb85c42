"""What engines counted beside the rollouts of a step: handed over with them, kept across attempts, of no group."""

from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import pyarrow as pa
import pytest

from configs.run import RunConfig, View
from storage.refs import Entry
from storage.schemas.stage_tables import ENGINE_METRICS
from storage.store import open_store
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.rollout import stage as rollout
from tasks.runtime.parts import Parts
from tasks.runtime.stage import Policy
from tests.fixtures.builders import table, trace
from tests.fixtures.fixed import Services
from tests.fixtures.hosts import assigned


class Counted:
    """Stands in for what reads the pages of engines: each time there is one row."""

    load = None

    def __init__(self, models):
        assert [each.url for each in models] == ["http://127.0.0.1:9"]

    @contextmanager
    def measure(self):
        yield

    def take(self):
        row = {"interval": uuid4().hex, "engine": 0, "name": "requests", "value": 2.0}
        return pa.Table.from_pylist([row], schema=ENGINE_METRICS.arrow)


def parts_of(store):
    def entry(part, outputs, tokens):
        now = datetime.now(UTC)
        return Entry("r", 0, "rollout", 1, "k", part, "a", {}, {}, tuple(outputs), now, now, tokens)

    return Parts(store, entry, ("traces", "group_id"), lambda: None, lambda *_: None)


@pytest.mark.parametrize("wanted", [True, False])
def test_each_time_of_sampling_is_counted_also_one_that_lost_its_engine(wanted, tmp_path, monkeypatch):
    lost = iter([True, False])

    class Sampler:
        def __init__(self, *, on_group, **_):
            self.on_group = on_group

        def sample(self, assignments, examples):
            name = assignments["group_id"][0].as_py()
            self.on_group(name, {"traces": table("traces", [trace(f"t{name}", group_id=name)])})
            if next(lost):
                raise ServiceLost("here", "it died")

    monkeypatch.setattr(rollout, "BatchSampler", Sampler)
    monkeypatch.setattr(rollout, "EngineMetrics", Counted)
    config = RunConfig.model_validate({"engine": {"metrics": wanted}, "rollout": {}, "model": {}})
    tables = (assigned("any", ["a", "b"], 1), SimpleNamespace())
    store = open_store(tmp_path)
    services = (Services(), Services(), SimpleNamespace(serve=None), None)
    parts = parts_of(store)
    inputs = rollout.RolloutInputs(*tables, 0, Policy("p", 0), parts, *services)
    rollout.rollout(inputs, View(config, rollout.STAGE.sections, "rollout"))
    pieces = parts.close()
    rows = [piece for piece in pieces if piece.table == "engine_metrics"]
    assert sum(store.read([piece]).num_rows for piece in rows) == (2 if wanted else 0)
    again = parts_of(store)
    assert again.finished_units() == {"a", "b"}, "what engines counted is of no group, and no group is sampled again"
    assert sorted(piece.digest for piece in again.close()) == sorted(piece.digest for piece in pieces)

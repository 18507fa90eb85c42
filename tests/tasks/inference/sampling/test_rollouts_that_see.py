"""Rollouts of a model that sees, from a real environment and engine to the learner's log-probs of the packed rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from configs.sections import ModelConfig, RolloutConfig
from storage.schemas.stage_tables import IMAGE_TENSORS, IMAGES
from tasks.arrays.images import attach_images, digests_of
from tasks.inference.engine.checks import check_weights
from tasks.inference.engine.client import Engine
from tasks.inference.environments import servers as environments
from tasks.packing.stage import STAGE as PACKING
from tasks.packing.stage import packing
from tasks.runtime.stage import Policy
from tests.fixtures.builders import view
from tests.fixtures.hosts import ENGINE, SECTIONS, assigned, engine_of, served
from tests.fixtures.learner_steps import new_trainer
from tests.fixtures.sampled import sample
from tests.fixtures.stages import ADVANTAGE, advantage, tables_of

pytestmark = [pytest.mark.engine, pytest.mark.essential]

LOOKING = EnvironmentConfig(name="looking", taskset={"id": "sample_looking", "num_examples": 8})
STRANGE = EnvironmentConfig(name="strange", taskset={"id": "strange_pictures"})


@dataclass
class Seeing:
    """An engine that serves a model that sees, and its directory."""

    engine: Engine
    directory: Path
    place: Path

    def sample(
        self, environment: EnvironmentConfig, policy: str, num_groups: int, size: int = 2
    ) -> dict[str, pa.Table]:
        """The tables of groups of an environment's first examples."""
        model = ModelConfig(path=str(self.directory), renderer="qwen3-vl")
        sampling = RolloutConfig(max_tokens=6)
        config = RunConfig(model=model, environments=(environment,), rollout=sampling, engine=ENGINE)
        examples = environments.examples(environment)
        place = self.place / f"{environment.name}-{policy}"  # a server's report is its own
        place.mkdir()
        with served(environment, place) as told:
            rows = assigned(environment.name, examples["example_id"].to_pylist()[:num_groups], size)
            sections = View(config, SECTIONS, "rollout")
            groups = sample(self.engine.url, told["address"], sections, rows, examples, policy=Policy(policy, 0))
        names = {name for tables in groups.values() for name in tables}
        return {name: pa.concat_tables([each[name] for each in groups.values() if name in each]) for name in names}


@pytest.fixture(scope="module")
def seeing(seeing_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    place = tmp_path_factory.mktemp("seeing")
    with engine_of(seeing_model, place / "engine.json") as engine:
        yield Seeing(engine, seeing_model, place)


def largest_difference(tables: dict[str, pa.Table], directory: Path) -> float:
    """How far the learner's log-probs of the packed samples are from the engine's."""
    credits = advantage(tables_of(tables["traces"].to_pylist(), tables["messages"].to_pylist()), SUPERVISED)
    made = packing(tables | credits, view(PACKING, packing={"tokens_per_row": 512}))
    assert made["batch_images"].num_rows == made["batches"]["sample_ids"].combine_chunks().values.__len__()
    trainer = new_trainer(start(), device="cpu", learning_rate=1e-9)
    trainer.load("p0", str(directory), fresh_optimizer=True)
    rows = attach_images(made["batches"], made["batch_images"])
    out = directory.parent / f"trained-{directory.name}"
    _, statistics = trainer.train(
        rows, step=0, policy_key_in="p0", policy_key_out="p1", directory_out=str(out), save_optimizer=False
    )
    theirs = {name: values for row in made["batches"].to_pylist() for name, values in segments(row)}
    found = zip(statistics["sample_id"].to_pylist(), statistics["logprobs"].to_pylist(), strict=True)
    return max(abs(a - b) for name, own in found for a, b in zip(own, theirs[name], strict=True) if a)


SUPERVISED = view(ADVANTAGE, algorithm={"type": "supervised"})


def segments(row):
    """The engine's log-probs of each sample of a packed row."""
    borders = row["cu_seqlens"]
    for name, begin, end in zip(row["sample_ids"], borders, borders[1:], strict=False):
        yield name, row["logprobs"][begin:end]


def start():
    from torch import distributed

    from tasks.learner.distributed import World, start_world

    return World(0, 1, 0) if distributed.is_initialized() else start_world()


def test_from_the_environment_to_the_learner(seeing: Seeing) -> None:
    """Before and after a reload of all weights, the vision tower's among them."""
    from tasks.learner.tiny_vision import tiny_qwen3_vl

    seeing.engine.serve("first", seeing.directory)
    tables = seeing.sample(LOOKING, "first", 3)
    traces, messages = tables["traces"].to_pylist(), tables["messages"].to_pylist()
    assert [row["error_message"] for row in traces] == [None] * 6
    assert tables["images"].schema.equals(IMAGES.arrow) and tables["image_tensors"].schema.equals(IMAGE_TENSORS.arrow)
    assert tables["images"].num_rows == 3, "once for a group, whatever number of rollouts it has"
    assert tables["image_tensors"].num_rows == 6
    digests = {digest for row in messages if not row["sampled"] for digest in digests_of(row["body"])}
    assert digests == {*tables["images"]["digest"].to_pylist()}
    assert largest_difference(tables, seeing.directory) < 1e-4

    other = tiny_qwen3_vl(seeing.place / "other", seed=9)
    seeing.engine.serve("second", other)
    assert check_weights(seeing.engine, {"policy_key": "second", "version": 1}, other), "the tower's are compared too"
    again = seeing.sample(LOOKING, "second", 3)
    assert largest_difference(again, other) < 1e-4
    assert again["messages"]["logprobs"].to_pylist() != tables["messages"]["logprobs"].to_pylist()


@pytest.mark.usefixtures("plugins")
def test_what_cannot_be_shown_is_a_row_with_its_reason(seeing: Seeing) -> None:
    """A picture elsewhere, a broken one and one of 20 megapixels; the engine lives on."""
    tables = seeing.sample(STRANGE, "first", 3, 1)
    said = "\n".join(sorted(row["error_message"] for row in tables["traces"].to_pylist()))
    assert "5000 x 4000 pixels, and 16,000,000 are allowed" in said
    assert "cannot be opened" in said and "Nothing is loaded from elsewhere" in said
    assert {*tables["traces"]["error_class"].to_pylist()} <= {"environment", "model"}
    assert "image_tensors" not in tables and seeing.engine.healthy()

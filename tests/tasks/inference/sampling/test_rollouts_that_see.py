"""Rollouts of a model that sees, from a real environment and engine to the learner's log-probs of the packed rows."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from sample_looking.demonstrations import tool_demonstrations
from sample_looking.pictures import picture_names, request_by_name
from sample_looking.words import SCHEMA, words

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from configs.sections import ModelConfig, RolloutConfig
from storage.schemas.stage_tables import IMAGE_TENSORS, IMAGES
from tasks.arrays.images import Tensor, digests_of, token_types
from tasks.inference.engine.checks import check_weights
from tasks.inference.engine.client import Engine
from tasks.inference.sampling.limits import SamplingPlan
from tasks.inference.trace_rows.image_tensors import open_picture
from tasks.packing.stage import STAGE as PACKING
from tasks.runtime.stage import Policy
from tests.fixtures.builders import view
from tests.fixtures.hosts import ENGINE, SECTIONS, assigned, engine_of, examples_of, served
from tests.fixtures.learner_steps import new_trainer, train_step
from tests.fixtures.sampled import sample
from tests.fixtures.stages import ADVANTAGE, advantage, packing, tables_of, written
from tests.fixtures.warming import taught

pytestmark = pytest.mark.engine

TOOL = EnvironmentConfig(name="tool", taskset={"id": "sample_looking", "num_examples": 2, "tool": True}, max_turns=2)
TURNS = EnvironmentConfig(name="turns", taskset={"id": "sample_looking", "num_examples": 2, "num_pictures": 2})
STRANGE = EnvironmentConfig(name="strange", taskset={"id": "strange_pictures"})


UPDATES = 30
"""Steps of 16 conversations in which the model learns two calls by heart."""


@dataclass
class Seeing:
    """An engine that serves a model that sees, and its directory."""

    engine: Engine
    directory: Path
    place: Path

    def sample(self, environment, policy, num_groups, size=2, plan=None):
        """The tables of groups of an environment's first examples."""
        model = ModelConfig(path=str(self.directory), renderer="qwen3-vl")
        sampling = RolloutConfig(max_tokens=12)
        config = RunConfig(model=model, environments=(environment,), rollout=sampling, engine=ENGINE)
        examples = examples_of(environment)
        place = self.place / f"{environment.name}-{policy}"  # a server's report is its own
        place.mkdir()
        with served(environment, place) as told:
            rows = assigned(environment.name, examples["example_id"].to_pylist()[:num_groups], size)
            sections = View(config, SECTIONS, "rollout")
            asked = {"policy": Policy(policy, 0), "plan": plan}
            groups = sample(self.engine.url, told["address"], sections, rows, examples, **asked)
        return merged(*groups.values())


class Exchanging(SamplingPlan):
    """Weights may be exchanged meanwhile."""

    weight_update = "keep"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """An engine with a model that has learnt to call the tool, and nothing of what it then sees."""
    from torch import distributed

    from tasks.learner.tiny_vision import tiny_qwen3_vl

    in_world = distributed.is_initialized()  # other tests of this process may have begun one, or may want to
    place = tmp_path_factory.mktemp("seeing")
    directory = tiny_qwen3_vl(place / "model", words=words(), seed=1)
    names = picture_names(2, 0)
    talks = [row["messages"][:2] for row in tool_demonstrations(2, seed=0)]
    for name, (asked, call) in zip(names, talks, strict=True):
        asked["content"] = request_by_name(name)
        call["tool_calls"][0]["function"]["arguments"] = json.dumps({"name": name})
    taught(directory, {}, [(talk, [SCHEMA]) for talk in talks] * 8 * UPDATES)
    with engine_of(directory, place / "engine.json") as engine:
        yield Seeing(engine, directory, place)
    if distributed.is_initialized() and not in_world:
        distributed.destroy_process_group()


def trained(tables, directory):
    """Train two steps; return how far log-probs of the packed samples are from the engine's, and the losses."""
    credits = advantage(tables_of(tables["traces"].to_pylist(), tables["messages"].to_pylist()), SUPERVISED)
    made = written(packing(tables | credits, view(PACKING, packing={"tokens_per_row": 1024})))
    trainer = new_trainer(start(), device="cpu", learning_rate=1e-4, vision="trained")
    trainer.load("p0", str(directory), fresh_optimizer=True)
    rows, out = made["batches"], directory.parent / f"trained-{directory.name}"
    (before,), statistics = train_step(trainer, 0, out, rows, images=made["batch_images"])
    (after,), _ = train_step(trainer, 1, out, rows, images=made["batch_images"])
    assert after["weights_sha256_in"] == before["weights_sha256"] != before["weights_sha256_in"]
    theirs = {name: values for row in made["batches"].to_pylist() for name, values in segments(row)}
    found = zip(statistics["sample_id"].to_pylist(), statistics["logprobs"].to_pylist(), strict=True)
    difference = max(abs(a - b) for name, own in found for a, b in zip(own, theirs[name], strict=True) if a)
    return difference, [before["loss"], after["loss"]]


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


def check_processor(tables, directory):
    """Compare tokens, types and pixels of each message with images with the processor's; return how many there are."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    types = next(filter(None, map(token_types, tables["traces"]["record"].to_pylist())))
    stored = {(row["digest"], row["name"]): row for row in tables["image_tensors"].to_pylist()}
    files = {row["digest"]: row["data"] for row in tables["images"].to_pylist()}
    shown = [row for row in tables["messages"].to_pylist() if digests_of(row["body"])]
    for row in shown:
        digests, tokens = digests_of(row["body"]), row["token_ids"]
        kinds = [types.get(token, 0) for token in tokens]
        # One token for an image, as a template has it; between two images there are others.
        kept = [token for token, kind, last in zip(tokens, kinds, [0, *kinds], strict=False) if not (kind and last)]
        text = processor.tokenizer.decode(kept)
        made = processor(text=[text], images=[open_picture(files[each]) for each in digests])
        assert made["input_ids"][0] == tokens and made["mm_token_type_ids"][0] == kinds
        for name in ("pixel_values", "image_grid_thw"):
            parts = [stored[each, name] for each in digests]
            own = [Tensor(name, part["dtype"], tuple(part["shape"]), part["data"]).array() for part in parts]
            assert np.array_equal(np.concatenate(own), np.asarray(made[name]))
    return len(shown)


def merged(*several):
    """The tables of several samplings as one."""
    names = {name for tables in several for name in tables}
    return {name: pa.concat_tables([each[name] for each in several if name in each]) for name in names}


@pytest.fixture(scope="module")
def first(seeing, plugins_of_module):
    """What was sampled of each environment under the first policy."""
    seeing.engine.serve("first", seeing.directory)
    return {each.name: seeing.sample(each, "first", number) for each, number in ((TOOL, 2), (TURNS, 2), (STRANGE, 4))}


def test_each_turn_has_the_processors_tokens_and_pixels(seeing, first):
    """Pictures of a tool, of a later turn of the user, and two in one message."""
    for name, roles, num_traces in (("tool", ["tool"], 4), ("turns", ["user", "user"], 4), ("strange", ["user"], 2)):
        tables = first[name]
        whole = [row for row in tables["traces"].to_pylist() if row["error_message"] is None]
        assert len(whole) == num_traces
        messages = tables["messages"].filter(pc.is_in(tables["messages"]["trace_id"], pa.array(ids(whole))))
        assert check_processor(tables | {"messages": messages}, seeing.directory) == num_traces * len(roles)
        shown = [row["role"] for row in messages.to_pylist() if digests_of(row["body"])]
        assert shown == num_traces * roles
    tables = first["turns"]
    assert tables["images"].schema.equals(IMAGES.arrow) and tables["image_tensors"].schema.equals(IMAGE_TENSORS.arrow)
    assert tables["images"].num_rows == 4, "once for a group, whatever number of rollouts it has"
    assert tables["image_tensors"].num_rows == 8


def ids(rows):
    return [row["trace_id"] for row in rows]


def test_engine_and_learner_agree_and_the_tower_is_handed_over(seeing, first):
    """Before and after a reload of all weights, the vision tower's among them, with calls and turns in packed rows."""
    from tasks.learner.tiny_vision import tiny_qwen3_vl

    difference, losses = trained(merged(first["tool"], first["turns"]), seeing.directory)
    assert difference < 1e-4 and losses[1] < losses[0], "it learns what it did"
    other = tiny_qwen3_vl(seeing.place / "other", words=words(), seed=9)
    seeing.engine.serve("second", other)
    assert check_weights(seeing.engine, {"policy_key": "second", "version": 1}, other), "the tower's are compared too"
    # Where weights may be exchanged meanwhile, the engine says of each answer which policy sampled it.
    again = seeing.sample(TURNS, "second", 2, plan=Exchanging())
    assert trained(again, other)[0] < 1e-4
    assert again["messages"]["logprobs"].to_pylist() != first["turns"]["messages"]["logprobs"].to_pylist()


def test_what_cannot_be_shown_is_a_row_with_its_reason(seeing, first):
    """A picture elsewhere, a broken one and one of 20 megapixels; the engine lives on, and so does the other task."""
    traces = first["strange"]["traces"].to_pylist()
    said = "\n".join(sorted(row["error_message"] or "" for row in traces))
    assert "5000 x 4000 pixels, and 16,000,000 are allowed" in said
    assert "cannot be opened" in said and "Nothing is loaded from elsewhere" in said
    assert {row["error_class"] for row in traces} <= {None, "environment", "model"}
    kept = {row["group_id"] for row in traces if row["error_class"] is None}
    assert {*first["strange"]["image_tensors"]["group_id"].to_pylist()} == kept and seeing.engine.healthy()

"""What others make of our files: verifiers loads the traces, transformers the weights; images are the lines' own."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.exchange.export import RolloutChoice, copy_weights, export
from flows.exchange.imports import ImportRequest, import_files
from flows.queries.step_history import step_history
from storage.store import open_store
from tasks.exchange.verifiers_lines import line_of
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.builders import example, exchange, failed, trace
from tests.flows.exchange.files import TOKENS, lines, write_lines

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]
OF_THE_ASSIGNMENT = ("episode_id", "assignment_id", "group_id", "environment", "example_id", "staleness")
OF_THE_POLICY = ("policy_key", "policy_version", "temperature", "record")


def answer(*argv):
    """Run a program and return the lines that it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_verifiers(directory):
    """Return what verifiers reads from a directory's `traces.jsonl`."""
    return answer(str(ROOT / "tests/fixtures/programs/reads_verifiers.py"), str(directory))


def test_verifiers_reads_an_export_as_the_rows_that_it_was_made_of(tmp_path):
    root = str(tmp_path / "store")
    import_files(ImportRequest([TOKENS], name="theirs", store=root))
    export("verifiers", tmp_path / "traces.jsonl", RolloutChoice("theirs"), store=root)
    store = open_store(root)
    entry = step_history(store, "theirs").steps[0].work["rollout"]
    found = by_verifiers(tmp_path)
    ours = {row["trace_id"]: row for row in store.read(entry.slices_of("traces")).to_pylist()}
    assert len(found) == len(ours) == 10
    for one in found:
        own = {name: str(value) for name, value in ours[one["row"]["trace_id"]].items()}
        theirs = {name: str(value) for name, value in one["row"].items()}
        for name in (*OF_THE_ASSIGNMENT, *OF_THE_POLICY, "rewards", "metrics", "info"):
            own.pop(name, None), theirs.pop(name, None)
        assert own == theirs
    messages = store.read(entry.slices_of("messages")).to_pylist()
    tokens = {(row["trace_id"], row["message"]): row["token_ids"] for row in messages}
    assert tokens == {(m["trace_id"], m["message"]): m["token_ids"] for one in found for m in one["messages"]}


def test_verifiers_reads_what_our_own_runs_sampled(tmp_path):
    assignment = {"assignment_id": "0-0/0", "group_id": "0-0", "member": 0, "seed": 1}
    assignment |= {"environment": "reverse", "example_id": "e0"}
    episodes = [
        line_of("run", 0, [trace("t0")], {"t0": exchange("t0")}, assignment, example()),
        line_of("run", 0, [failed("t1")], {}, assignment, example()),
    ]
    write_lines(tmp_path / "traces.jsonl", episodes)
    (only,) = by_verifiers(tmp_path)
    assert only["row"]["trace_id"] == "t0" and only["row"]["error_class"] is None
    assert [message["token_ids"] for message in only["messages"]] == [[1, 2, 3], [4, 5]]


LOADING = """
import json, sys
from tasks.runtime.torchvision_operators import declare_torchvision_operators
declare_torchvision_operators()
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
told = {"missing": len(info["missing_keys"]), "parameters": model.num_parameters()}
print(json.dumps({**told, "ids": tokenizer("ab").input_ids}))
"""


@pytest.mark.nightly
def test_transformers_loads_exported_weights(tmp_path):
    store, key = open_store(tmp_path / "store"), "k" * 32
    made = store.policies.scratch(key)
    tiny_qwen3(made, hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16)
    (made / "optimizer.safetensors").write_bytes(b"not a tensor")
    store.policies.publish(made, key)
    copy_weights(store, key, tmp_path / "weights", force=False)
    (told,) = answer("-c", LOADING, str(tmp_path / "weights"))
    assert told["missing"] == 0 and told["parameters"] > 1000 and len(told["ids"]) == 2


DATA = bytes(range(256)) * 64
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"


def pictured(line):
    """The line with a picture in every message that asks something, beside its text."""
    for one in line.get("traces", [line]):
        for node in one["nodes"]:
            if node["message"]["role"] == "user":
                text = {"type": "text", "text": node["message"]["content"]}
                node["message"]["content"] = [text, {"type": "image_url", "image_url": {"url": URL}}]
    return line


def exported(root, run, form, target):
    """Export a run; return the lines."""
    export(form, target, RolloutChoice(run), store=root, force=False)
    return lines(target)


def test_what_has_images_is_exported_as_it_was_read_and_kept_small(tmp_path):
    source, root = tmp_path / "source.jsonl", str(tmp_path / "store")
    write_lines(source, [pictured(line) for line in lines(TOKENS)])
    import_files(ImportRequest([source], name="theirs", store=root))
    store = open_store(root)
    work = step_history(store, "theirs").steps[0].work["rollout"]
    images, messages = store.read(work.slices_of("images")), store.read(work.slices_of("messages"))
    groups = set(store.read(work.slices_of("traces"))["group_id"].to_pylist())
    assert [row["data"] for row in images.to_pylist()] == [DATA] * len(groups)
    assert sum("stagecoach-image:" in text for text in messages["body"].to_pylist()) > len(groups)
    assert not any(URL in text for text in messages["body"].to_pylist()) and messages.nbytes < len(URL)
    assert exported(root, "theirs", "verifiers", tmp_path / "again.jsonl") == lines(source)

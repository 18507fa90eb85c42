"""`stagecoach eval` of a model that sees, on held-out pictures: what it knows of them, and a control.

The model learns 24 pictures by heart in seconds. With the numbers of other pictures it is as often right as these
happen to agree: the text is the same for all, so each answer comes from the picture.
"""

import base64

import pytest
from sample_looking.pictures import REQUEST, data_url, pictures, shuffled

from storage.store import open_store
from tasks.arrays.images import digests_of
from tests.acceptance.lives import stagecoach

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

NUMBER, TRIED = 24, 16
ENVIRONMENT = """
[[environments]]
name = "{name}"
taskset = {{ id = "sample_looking", num_examples = {number}, shuffled = {shuffled} }}
harness = {{ id = "chat_loop" }}
max_turns = 1
holdout_fraction = 0.9
"""
SMALL = [f"evaluation.num_examples={TRIED}", "evaluation.temperature=0"]
SMALL += [f"{name}.startup_seconds=600" for name in ("engine", "prefect")] + ["engine.memory_gib=0.25"]


def model_that_knows(directory, shown, updates=120):
    """Write a small model that knows the numbers of some pictures by heart."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tasks.inference.trace_rows.demonstrations import demonstration_renderer
    from tasks.inference.trace_rows.image_tensors import open_picture
    from tasks.learner.tiny_vision import tiny_qwen3_vl

    tiny_qwen3_vl(directory, words=["user\n", "assistant\n", REQUEST], seed=1)
    render = demonstration_renderer(directory, "qwen3-vl")
    talks = []
    for url, count in shown:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": REQUEST}]
        talks.append(render([{"role": "user", "content": parts}, {"role": "assistant", "content": str(count)}]))
    # Pictures of one size and numbers of one digit: all conversations are of one length.
    tokens, learns = (
        torch.tensor([[each for row in rows for each in row[name]] for rows in talks]) for name in ("token_ids", "mask")
    )
    files = [open_picture(base64.b64decode(url.partition(",")[2])) for url, _ in shown]
    seen = AutoProcessor.from_pretrained(directory).image_processor(images=files, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    types = (tokens == model.config.image_token_id).int()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(updates):
        labels = tokens.masked_fill(~learns, -100)
        loss = model(input_ids=tokens, labels=labels, mm_token_type_ids=types, **seen).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    assert loss < 0.01, "it does not know them"
    model.save_pretrained(directory)
    return directory


def test_held_out_pictures_are_scored_by_what_is_on_them(tmp_path):
    shown = list(pictures(NUMBER, 0))
    model = model_that_knows(tmp_path / "model", shown)
    tried = tmp_path / "tried.toml"
    settings = {"look": "false", "control": "true"}
    tried.write_text(
        "".join(ENVIRONMENT.format(name=each, number=NUMBER, shuffled=settings[each]) for each in settings)
    )
    place = ["--store", str(tmp_path / "store"), "--name", "seen", "--plain"]
    stagecoach("eval", "looking", str(tried), f"model.path={model}", *SMALL, *place)
    store = open_store(tmp_path / "store")
    entries = [each for each in store.ledger.entries(run="seen", stage="rollout") if not each.part]
    rows = {
        name: [row for each in entries for row in store.read(each.slices(name)).to_pylist()]
        for name in ("traces", "messages", "images")
    }
    urls = {row["digest"]: data_url(row["data"]) for row in rows["images"]}
    agree = {one.url: one.count == other.count for one, other in zip(shown, shuffled(shown, 0), strict=True)}
    of = {row["trace_id"]: urls[digests_of(row["body"])[0]] for row in rows["messages"] if row["role"] == "user"}
    scores = {name: {} for name in settings}
    for row in rows["traces"]:
        scores[row["environment"]][of[row["trace_id"]]] = row["reward"]
    assert scores["look"] == dict.fromkeys(scores["look"], 1.0) and len(scores["look"]) == TRIED
    assert scores["control"] == {url: float(agree[url]) for url in scores["control"]}
    assert 0 < sum(scores["control"].values()) < TRIED, "some numbers agree by chance"

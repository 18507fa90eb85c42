"""Images go through import and export: their bytes once in the store, the very lines in files."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from flows.exchange.export_rows import Choice
from flows.exchange.exporting import Request, export
from flows.exchange.import_config import Request as ImportRequest
from flows.exchange.importing import import_files
from flows.recorded import Recorded
from storage.store import open_store

pytestmark = pytest.mark.engine

TOKENS = Path(__file__).parents[1] / "tasks/exchange/files/tokens.jsonl"
DATA = bytes(range(256)) * 64
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"


def pictured(line: dict[str, Any]) -> dict[str, Any]:
    """The line with a picture in every message that asks something, beside its text."""
    for trace in line.get("traces", [line]):
        for node in trace["nodes"]:
            if node["message"]["role"] == "user":
                text = {"type": "text", "text": node["message"]["content"]}
                node["message"]["content"] = [text, {"type": "image_url", "image_url": {"url": URL}}]
    return line


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exported(root: str, run: str, form: Any, target: Path) -> list[dict[str, Any]]:
    """Export a run; return the lines."""
    export(Request(form, target, Choice(run), store=root, force=False))
    return lines(target)


def test_what_has_images_is_exported_as_it_was_read_and_kept_small(tmp_path: Path) -> None:
    source, root = tmp_path / "source.jsonl", str(tmp_path / "store")
    source.write_text("".join(json.dumps(pictured(line)) + "\n" for line in lines(TOKENS)), encoding="utf-8")
    import_files(ImportRequest([source], name="theirs", store=root))
    store = open_store(root)
    work = Recorded(store, "theirs").steps[0].work["rollout"]
    images, messages = store.read(work.slices("images")), store.read(work.slices("messages"))
    groups = set(store.read(work.slices("traces"))["group_id"].to_pylist())
    assert [row["data"] for row in images.to_pylist()] == [DATA] * len(groups)
    assert sum("stagecoach-image:" in text for text in messages["body"].to_pylist()) > len(groups)
    assert not any(URL in text for text in messages["body"].to_pylist()) and messages.nbytes < len(URL)
    assert exported(root, "theirs", "verifiers", tmp_path / "again.jsonl") == lines(source)

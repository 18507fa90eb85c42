"""Learns color_codeword: `python -m benchmarks.public.color_codeword DIRECTORY`; see docs/vision.md.

Wants the package `color_codeword` of the verifiers repository, unchanged. A small model that sees is warmed up with
demonstrations whose letters are often wrong, and trained on rewards. DIRECTORY gets model, demonstrations and store.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from color_codeword import taskset as package
from verifiers.v1.utils.image import image_data_url

from benchmarks.fixtures.warming import SEED
from flows.cli.run import run_config
from flows.runtime.demo_sources import demo_recipe
from flows.runtime.resolve_run import resolve_run
from storage.store import open_store
from tasks.learner.tiny_vision import tiny_qwen3_vl

SIDE = 32
"""The processor scales pictures to so many pixels a side: four tokens for a square of one colour."""
DEMONSTRATIONS = 6000
RIGHT = 0.5
"""Share of letters that are right because of the picture; the others are any of the nine."""
COLOURS = list(package.COLOR_MAP)
TURNS = [package.turn_text(turn, 1, package.MAX_TURNS, turn + 1) for turn in range(package.MAX_TURNS)]


def main() -> None:
    """Make the model, warm it up and train it; `stagecoach show` and `view` have the curve."""
    store, model, data = (f"{sys.argv[1]}/{name}" for name in ("store", "model", "demonstrations.jsonl"))
    _make_model(Path(model))
    Path(data).write_text("\n".join(_demonstrations()))
    sources = (f"model.path={model}", f"data.path={data}", f"assignment.groups_per_step={DEMONSTRATIONS}")
    warm_up = [*demo_recipe("looking").warm_up, *sources]
    warm = run_config(resolve_run("sft", ["sft_demo"], warm_up, name="warm-up", store=store, seed=SEED))
    weights = open_store(store).policies.directory(warm["policy"]["key"])
    files, settings = ["looking", str(Path(__file__).with_suffix(".toml"))], [f"model.path={weights}"]
    run_config(resolve_run("train", files, settings, name="color-codeword", store=store, seed=SEED))


def _make_model(directory: Path) -> None:
    tiny_qwen3_vl(directory, words=["system\n", "user\n", "assistant\n", package.SYSTEM_PROMPT, *TURNS])
    path = directory / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["size"]["longest_edge"] = SIDE**2
    path.write_text(json.dumps(config))


def _demonstrations() -> Iterator[str]:
    """Yield conversations; each turn repeats what was said before and adds a letter."""
    draw = random.Random(1)
    for _ in range(DEMONSTRATIONS):
        messages: list[Any] = [{"role": "system", "content": package.SYSTEM_PROMPT}]
        said = ""
        for text in TURNS:
            colour = draw.choice(COLOURS)
            said += package.COLOR_MAP[colour if draw.random() < RIGHT else draw.choice(COLOURS)]
            picture = image_data_url(package.Image.new("RGB", (100, 100), package.COLOR_RGB[colour]))
            shown = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
            messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
        yield json.dumps({"messages": messages})


if __name__ == "__main__":
    main()

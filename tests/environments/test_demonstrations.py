"""The demonstrations of all environments: the same for a seed, and written as asked by their commands."""

import json
from importlib import import_module

import pytest
from sample_wikispeedia.graph import graph

pytestmark = pytest.mark.engine

COMMANDS = {
    "sample_alphabet_sort": (["--num-names", "26", "--max-words", "2"], (), {"num_names": 26, "max_words": 2}, (26,)),
    "sample_calc_tools": (["--num-calls", "3"], (), {"num_calls": 3}, ()),
    "sample_kuhn_poker": ([], (), {}, ()),
    "sample_looking": (["--right", "0.4"], (), {"right": 0.4}, None),
    "sample_lookup": ([], (), {}, ()),
    "sample_proposer_solver": ([], (), {"largest": 9}, (9,)),
    "sample_reverse_text": (["--seed", "7"], (), {"seed": 7}, None),
    "sample_wikispeedia": (
        ["--num-topics", "12", "--max-moves", "3"],
        (graph(12),),
        {"max_moves": 3},
        (graph(12),),
    ),
}
"""By environment: options of its command, arguments and settings of its demonstrations, and arguments of its words."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_rows_and_words(name, tmp_path, monkeypatch):
    options, arguments, settings, of_words = COMMANDS[name]
    module = import_module(f"{name}.demonstrations")
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "words.json"
    asked = [] if of_words is None else ["--words", str(texts)]
    monkeypatch.setattr("sys.argv", ["it", str(rows), "--count", "9", *asked, *options])
    module.main()
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert written == list(module.demonstrations(9, *arguments, **{"seed": 1} | settings))
    assert written != list(module.demonstrations(9, *arguments, **settings | {"seed": 8}))
    if of_words is not None:
        assert json.loads(texts.read_text()) == module.words(*of_words)

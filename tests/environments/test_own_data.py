"""Data of your own: files of each kind, what is refused and in which words, the scores, and whole rollouts."""

import gzip
import hashlib
import json
from decimal import Decimal
from itertools import islice
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from own_data.errors import DataUnusable
from own_data.scoring import contains, exact, last_number, number, scoring
from own_data.taskset import OwnDataConfig, OwnDataTaskset

from configs.environments import EnvironmentConfig
from tasks.inference.environments import servers as environments
from tasks.inference.environments.packages import SHOWN, module_digest, package_version
from tests.environments.scripted import played
from tests.fixtures.commands import cases
from tests.fixtures.hosts import examples_of

pytestmark = [pytest.mark.engine, pytest.mark.essential]

ROWS = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]
CODE = ("own-data", "chat-loop")


SEPARATORS = {"semicolons.csv": ";", "rows.csv": ",", "rows.tsv": "\t"}


def written(path, rows):
    """A file of those rows, of the kind that its name says."""
    name = path.name.lower().removesuffix(".gz")
    if path.suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
        return str(path)
    text = "".join(json.dumps(row) + "\n" for row in rows) if name != "list.json" else json.dumps(rows, indent=2)
    text = pl.DataFrame(rows).write_csv(separator=SEPARATORS[name]) if name in SEPARATORS else text
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def tasks(**settings):
    """The tasks of a taskset with those settings."""
    return list(OwnDataTaskset(OwnDataConfig(id="own_data", **settings)))


def refuses(told, **settings):
    with pytest.raises(DataUnusable, match=told):
        tasks(**settings)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_of_a_file_become_tasks(tmp_path, name):
    rows = [{"q": "2+2?", "a": 4, "n": "x"}, {"q": "3+3?", "a": 6, "n": "y"}]
    settings = {"path": written(tmp_path / name, rows), "prompt_column": "q", "answer_column": "a"}
    first, second = tasks(**settings, id_column="n", system="Be short.")
    assert (first.data.prompt, first.data.answer, first.data.system_prompt) == ("2+2?", "4", "Be short.")
    assert (second.data.idx, second.data.row) == (1, rows[1])
    assert first.key.startswith("x-") and second.key.startswith("y-")
    assert first.data.system_prompt and tasks(**settings)[0].data.system_prompt is None


TEXTS = [{"prompt": f'{number},\n"{number}"; é?', "answer": f"00{number}"} for number in range(5)]
KINDS = [
    "list.json",
    "lines.json",
    "rows.jsonl.gz",
    "rows.csv",
    "semicolons.csv",
    "rows.tsv",
    "rows.CSV.gz",
    "a.parquet",
]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_examples_under_the_same_keys(tmp_path, name):
    plain = tasks(path=written(tmp_path / "rows.jsonl", TEXTS))
    kind = tasks(path=written(tmp_path / name, TEXTS))
    assert [task.data for task in kind] == [task.data for task in plain] and len(kind) == 5
    assert [task.key for task in kind] == [task.key for task in plain]


def test_a_pattern_names_files_that_are_read_in_order_of_name(tmp_path):
    (tmp_path / "in").mkdir()
    written(tmp_path / "in/rows.csv", TEXTS[2:])
    written(tmp_path / "a.jsonl", TEXTS[:2])
    (tmp_path / "in/s.csv").write_text("prompt,answer\n")  # a part without rows
    assert [task.data.answer for task in tasks(path=str(tmp_path / "**"))] == [row["answer"] for row in TEXTS]


def test_of_a_large_file_only_what_is_asked_for_is_in_memory(tmp_path):
    path = tmp_path / "rows.parquet"
    numbers = pl.int_range(1_000_000, eager=True).cast(pl.String)
    pl.DataFrame({"prompt": "what is the next number after " + numbers, "answer": numbers}).write_parquet(path)
    before = pa.total_allocated_bytes()
    found = islice(OwnDataTaskset(OwnDataConfig(id="own_data", path=str(path))).load(), 100_000)
    peak = max(pa.total_allocated_bytes() for _ in found)
    assert peak - before < 15e6, "all of it are more than 45 MB"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_prompt_may_be_messages(tmp_path, name):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    (task,) = tasks(path=written(tmp_path / name, [{"prompt": messages, "answer": "4"}]))
    assert [(message.role, message.content) for message in task.data.prompt or []] == [
        ("system", "Be short."),
        ("user", "2+2?"),
    ]


def test_another_answer_is_another_example(tmp_path):
    keys = []
    for answer in ("4", "5"):
        path = written(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "answer": answer, "id": "one"}])
        keys += [task.key for task in tasks(path=path, id_column="id")]
    assert len(set(keys)) == 2 and all(key.startswith("one-") for key in keys)


def test_files_of_other_editors_are_read_like_any(tmp_path):
    text = "".join(json.dumps({**row, "more": {"of": [1, None, "\U0001f600"]}}) + "\r\n\r\n" for row in ROWS)
    (tmp_path / "theirs.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "ours.jsonl").write_text(text.replace("\r\n\r\n", "\n"), newline="")
    theirs, ours = ([task.data for task in tasks(path=str(tmp_path / name))] for name in ("theirs.jsonl", "ours.jsonl"))
    assert theirs == ours and ours[1].row["more"] == {"of": [1, None, "\U0001f600"]}


def test_columns_of_parquet_that_json_does_not_have(tmp_path):
    row = {"prompt": "a", "answer": Decimal("1.50"), "raw": b"\xff", "n": {"b": None}, "number": None}
    pl.DataFrame([row, {**row, "answer": Decimal("2.00"), "number": 2**60}]).write_parquet(tmp_path / "rows.parquet")
    first, second = tasks(path=str(tmp_path / "rows.parquet"), task={"scoring": "number"})
    assert (first.data.answer, second.data.answer) == ("1.50", "2.00")
    assert first.data.row == {"prompt": "a", "answer": "1.50", "raw": "b'\\xff'", "n": {"b": None}, "number": None}
    assert second.data.row["number"] == 2**60


GOOD = '{"prompt": "2+2?", "answer": "4"}\n'


@cases(__file__, "bad_rows")
def test_bad_rows_are_named_by_file_line_and_column(tmp_path, text, told):
    file = tmp_path / "rows.jsonl"
    file.write_text(text and text.replace("GOOD", GOOD) + "\n")
    with pytest.raises(DataUnusable) as caught:
        tasks(path=str(file))
    assert told in str(caught.value)
    assert not text or str(file) in str(caught.value)


def test_a_row_that_is_nested_too_deep_is_named_by_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{GOOD}{{"prompt": "2", "answer": "4", "x": {"[" * 300 + "]" * 300}}}\n')
    refuses(r"rows\.jsonl, line 2: lists and objects are nested more than 200 deep", path=str(file))


def test_an_id_that_comes_twice_is_named_with_both_places(tmp_path):
    path = written(tmp_path / "rows.jsonl", [{**row, "id": 7} for row in ROWS])
    refuses(r"line 2, column 'id': id '7' was in .*line 1 already", path=path, id_column="id")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("no parquet")
    (tmp_path / "rows.xlsx").write_text("no table")
    for name, told in (("rows.xlsx", "ends in"), ("rows.jsonl", "no such file"), ("rows.parquet", "as Parquet")):
        refuses(told, path=str(tmp_path / name))
    (tmp_path / "latin.jsonl").write_bytes(GOOD.encode() + '{"prompt": "é"}'.encode("latin-1"))
    refuses(r"latin\.jsonl, line 2: cannot be read as text in UTF-8: .* byte 0xe9", path=str(tmp_path / "latin.jsonl"))
    cut = Path(written(tmp_path / "rows.csv.gz", TEXTS))
    cut.write_bytes(cut.read_bytes()[:-9])
    refuses(r"rows\.csv\.gz, line \d+: cannot be read as text in UTF-8: Compressed file ended", path=str(cut))


@cases(__file__, "bad_tables")
def test_tables_that_cannot_be_read_are_named_by_line(tmp_path, text, told):
    (tmp_path / "rows.csv").write_text(text)
    refuses(told, path=str(tmp_path / "rows.csv"))


@cases(__file__, "data_settings")
def test_settings_that_cannot_work_are_refused(settings, told):
    refuses(told, **settings)


def test_rows_that_do_not_fit_the_settings_are_refused(tmp_path):
    path = written(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "?", "answer": "many"}])
    assert len(tasks(path=path)) == 3
    refuses(
        "line 3, column 'answer': scoring is `number`, and 'many' holds none", path=path, task={"scoring": "number"}
    )
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = written(tmp_path / "own.jsonl", [{"prompt": own, "answer": "4"}])
    refuses("line 1, column 'prompt': the messages begin with a system message", path=path, system="Be short.")


@cases(__file__, "scores")
def test_the_scores_by_hand(reply, answer, same, within, same_number):
    assert (exact(reply, answer), contains(reply, answer), number(reply, answer)) == (same, within, same_number)


def test_numbers_in_texts():
    assert [last_number(text) for text in ("a 1 b 2.5", "1,234,567.8", "no", "5-3", "-7")] == [
        Decimal("2.5"),
        Decimal("1234567.8"),
        None,
        3,
        -7,
    ]
    found = [last_number(text) for text in ("1e-07", "1e+22", "\u22125", "COVID-19", "x=-5", "a -2", "3em", "2e5")]
    assert found == [Decimal("1e-7"), Decimal("1e22"), -5, 19, -5, -2, 3, 200_000]
    assert scoring("math:isclose")(1.0, 1.0) is True


def test_a_directory_is_read_as_a_hub_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    written(data / "train.jsonl", ROWS)
    written(data / "test.jsonl", ROWS[:1])
    assert [task.data.answer for task in tasks(hub=str(data))] == ["4", "6"]
    assert [task.data.answer for task in tasks(hub=str(data), split="test")] == ["4"]
    refuses("split nowhere", hub=str(data), split="nowhere")


def answers(row_scoring, path, reply):
    """The rewards of a reply to every row of a file; None for a rollout that failed."""
    settings = {"id": "own_data", "path": path, "task": {"scoring": row_scoring}}
    episodes, _ = played(settings, ["agent"], lambda body: reply)
    return [None if trace.errors else trace.reward for (trace,) in (each.traces for each in episodes)]


def test_replies_are_scored_as_asked(tmp_path, monkeypatch):
    path = written(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "my_scores.py").write_text(
        "def half(reply, answer, row):\n"
        "    return 0.5 * (reply == answer) + 0.25 * (row['prompt'] == '3+3?')\n"
        "def counted(reply, answer, row):\n"
        "    import numpy\n"
        "    return numpy.int64(reply == answer)\n"
        "async def broken(reply, answer, row):\n"
        "    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert answers("exact", path, "6") == [0.0, 1.0]
    assert answers("my_scores:half", path, "6") == [0.0, 0.75]
    assert answers("my_scores:counted", path, "6") == [0.0, 1.0]
    assert answers("my_scores:broken", path, "6") == [None, None]
    several = {"answer": {"function": "exact"}, "short": {"function": "my_scores:half", "weight": 0.5}}
    assert answers(several, path, "6") == [0.0, 1.375]
    assert answers({"bad": {"function": "my_scores:broken"}, **several}, path, "6") == [None, None]


def test_another_file_or_another_function_is_another_version(tmp_path, monkeypatch):
    def version(scoring, path):
        taskset = {"id": "own_data", "path": path, "task": {"scoring": scoring}}
        return package_version(EnvironmentConfig(name="mine", taskset=taskset))

    path = written(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "own_scores.py").write_text("def half(reply, answer, row):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:SHOWN]
    plain, own = version("exact", path), version("own_scores:half", path)
    packages = [f"{name} 0.1.0 sha256:{module_digest(name.replace('-', '_'))[:SHOWN]}" for name in CODE]
    assert plain == ", ".join([*packages, f"rows.jsonl sha256:{digest}", "verifiers 0.4.0"])
    assert f"own_scores (not a package) sha256:{module_digest('own_scores')[:SHOWN]}" in own and digest in own
    (tmp_path / "own_scores.py").write_text("def half(reply, answer, row):\n    return 0.25\n")
    assert version("own_scores:half", path) != own
    written(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "?", "answer": "!"}])
    assert version("exact", path) != plain
    pattern, place = str(tmp_path / "**"), tmp_path / "in"
    one = version("exact", pattern)
    place.mkdir()
    assert version("exact", pattern) == one
    written(place / "more.jsonl", ROWS)
    assert one != version("exact", pattern) != version({"a": {"function": "own_scores:half"}}, pattern)
    assert version("exact", "/no/such.jsonl") == version("no_such:f", "") == ", ".join([*packages, "verifiers 0.4.0"])


def test_a_run_says_what_is_wrong_before_it_starts(tmp_path):
    path = written(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "2"}])
    environment = EnvironmentConfig(name="mine", taskset={"id": "own_data", "path": path})
    with pytest.raises(environments.EnvironmentUnavailable, match="line 3: there is no column 'answer'"):
        examples_of(environment)

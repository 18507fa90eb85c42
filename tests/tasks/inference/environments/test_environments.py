"""Examples and packages of environments, and what is told when they are not there."""

import json
import tempfile

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.environments import EnvironmentConfig
from flows.services.ownership import start_time
from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.environments import servers as environments
from tasks.inference.environments.examples import example_id, example_rows, split_of
from tasks.inference.environments.packages import EnvironmentUnavailable, package_version
from tests.fixtures.hosts import examples_of
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 300, "seed": 5})


@pytest.mark.essential
def test_examples_have_the_schema_and_a_holdout():
    table = examples_of(REVERSE)
    assert table.schema.equals(EXAMPLES.arrow)
    assert table.num_rows == len(set(table["example_id"].to_pylist())) == 300
    held = table["split"].to_pylist().count("eval")
    assert 15 <= held <= 45  # one in ten, by hash
    fewer = examples_of(REVERSE.model_copy(update={"max_examples": 7}))
    assert fewer.equals(table.slice(0, 7))


@pytest.mark.usefixtures("plugins")
def test_a_taskset_that_lets_a_child_go_holds_nothing_up_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(environments, "EXAMPLES_SECONDS", PATIENCE)
    taskset = {"id": "misbehaving_taskset", "faults": ["lingers"], "task": {"directory": str(tmp_path)}}
    assert examples_of(EnvironmentConfig(name="bad", taskset=taskset)).num_rows == 1
    child = int((tmp_path / "lingers").read_text())
    until(lambda: start_time(child) is None, lambda: "the child lives on")
    assert [list(each.iterdir()) for each in (tmp_path / "temporary").iterdir()] == [[]]


@pytest.mark.usefixtures("plugins")
def test_a_process_that_dies_after_its_report_has_listed_and_one_that_ends_without_has_not():
    late, early = (
        EnvironmentConfig(name="bad", taskset={"id": "misbehaving_taskset", "faults": [fault]})
        for fault in ("aborts", "quits")
    )
    assert examples_of(late).num_rows == 1
    with pytest.raises(EnvironmentUnavailable, match=r"'bad'.*ended without a word"):
        examples_of(early)


@pytest.mark.usefixtures("plugins")
def test_environments_are_read_side_by_side_and_stand_in_their_order(tmp_path):
    names = ["first", "second"]
    settings = {"id": "meeting", "directory": str(tmp_path), "names": names, "seconds": PATIENCE}
    both = [EnvironmentConfig(name=name, taskset=settings | {"own": name}) for name in names]
    table = pa.concat_tables([each.examples for each in environments.load_all(both)])
    assert table.schema.equals(EXAMPLES.arrow) and table["environment"].to_pylist() == ["first"] * 3 + ["second"] * 3
    assert [json.loads(task)["prompt"] for task in table["task"].to_pylist()] == [
        f"{name} {number}" for name in names for number in range(3)
    ]


def test_as_many_environments_are_loaded_at_a_time_as_there_are_cores(monkeypatch):
    done = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(environments, "_start", lambda *_: done.append("start"))
    monkeypatch.setattr(environments, "_read_examples", lambda *_: done.append("read"))
    monkeypatch.setattr(environments, "_kill_session", id)
    environments.load_all("abc")
    assert done == ["start", "start", "read", "start", "read", "read"]


@pytest.mark.usefixtures("plugins")
def test_what_is_wrong_with_each_environment_is_said_at_once():
    absent = EnvironmentConfig(name="absent", taskset={"id": "no-such-environment"})
    hub = EnvironmentConfig(name="hub", taskset={"id": "needs_hub"})
    with pytest.raises(EnvironmentUnavailable, match=r"'absent'.*not installed[^\0]*\n.*'hub'.*HF_HUB_OFFLINE"):
        environments.load_all([absent, hub])


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4)), st.integers(0, 5))
def test_the_split_is_a_threshold_on_one_hash(content, seed):
    assert split_of(content, 0.0, seed) == "train"
    sides = [split_of(content, fraction / 20, seed) for fraction in range(20)]
    assert sides == sorted(sides, key="train eval".index)  # once held out, held out for every larger share


def test_ids_come_from_the_source_then_the_key_then_the_content():
    import verifiers.v1 as vf

    class Keyed(vf.Task[vf.TaskData]):
        @property
        def key(self):
            return "by key"

    plain = vf.Task(vf.TaskData(idx=3, prompt="a"))
    moved = vf.Task(vf.TaskData(idx=4, prompt="a"))
    assert example_id(vf.Task(vf.TaskData(id="by id")), {}) == "by id"
    assert example_id(Keyed(vf.TaskData(prompt="a")), {}) == "by key"
    (first,), (second,) = (list(example_rows(SETTINGS, iter([task]))) for task in (plain, moved))
    assert first["example_id"] == second["example_id"] and first["task"] != second["task"]


SETTINGS = {"name": "e", "max_examples": 10, "holdout_fraction": 0.0, "holdout_seed": 0}


def test_a_repeated_example_is_left_out_and_a_clash_is_an_error():
    import verifiers.v1 as vf

    tasks = [vf.Task(vf.TaskData(idx=number, id=name, prompt=name)) for number, name in enumerate("aba")]
    assert [row["example_id"] for row in example_rows(SETTINGS, iter(tasks))] == ["a", "b"]
    tasks.append(vf.Task(vf.TaskData(idx=3, id="a", prompt="other")))
    with pytest.raises(ValueError, match="two different examples have the id 'a'"):
        list(example_rows(SETTINGS, iter(tasks)))


def test_messages_in_a_task_keep_their_roles():
    import verifiers.v1 as vf

    data = vf.TaskData(idx=0, prompt=[vf.SystemMessage(content="s"), vf.UserMessage(content="u")])
    (row,) = example_rows(SETTINGS, iter([vf.Task(data)]))
    assert vf.TaskData.model_validate_json(row["task"]) == data


@pytest.mark.parametrize("ask", [package_version, examples_of, lambda one: environments.command(one, "report.json")])
def test_an_environment_that_is_not_installed(ask):
    absent = EnvironmentConfig(name="mine", taskset={"id": "no-such-environment"})
    with pytest.raises(EnvironmentUnavailable, match=r"'no-such-environment' is not installed.*no_such_env") as refused:
        ask(absent)
    # A stranger may have the name on a registry: no command holds a name that was not looked up.
    assert "pip install" not in str(refused.value) and "no-such-environment`" not in str(refused.value)
    assert "`prime env install OWNER/NAME`" in str(refused.value) and " environments/ of verifiers'" in str(
        refused.value
    )
    with pytest.raises(EnvironmentUnavailable, match=r"'mine': taskset\.id is missing"):
        ask(absent.model_copy(update={"taskset": {}}))


def test_a_package_whose_modules_have_other_names_is_told_so():
    with pytest.raises(EnvironmentUnavailable, match=r"'pyyaml' is installed; its modules are _yaml, yaml"):
        package_version(EnvironmentConfig(name="mine", taskset={"id": "pyyaml"}))


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    "package",
    [
        *("older", "older_import", "older_export"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("older_at_import", "older_module")),
    ],
)
def test_a_package_of_the_older_interface_is_refused_with_what_to_do(package):
    with pytest.raises(environments.EnvironmentUnavailable, match=r"load_environment.*exports a Taskset"):
        examples_of(EnvironmentConfig(name="old", taskset={"id": package}))

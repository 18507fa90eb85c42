"""What other trainers were given as settings: published files, scripts, single keys, and every key listed."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import known_keys, load
from configs.run import RunConfig
from flows.exchange.trainers import MAX_CHARS, TABLES, config_of, translate

HERE = Path(__file__).parent / "trainers"
ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "tests/fixtures/published"
CASES = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))
tables = pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])


def translated(tmp_path, text, name="a.toml"):
    (tmp_path / name).write_text(text)
    return translate([str(tmp_path / name)])


def value_at(config, key):
    node = config
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def check(translation, case):
    config = load(base=config_of(translation.settings)).model_dump(mode="json")
    assert {key: value_at(config, key) for key in case["settings"]} == case["settings"]
    report = translation.report()
    for part in ("carried", "changed", "lost"):
        lines = report[part]
        assert all(any(text in line for line in lines) for text in case.get(part, [])), lines
        assert len(lines) == case.get(f"num_{part}", len(lines)), lines
    assert not any("recorded config" in line for line in report["lost"])
    assert not any(setting.startswith(case.get("unset", "none")) for setting in translation.settings)


@pytest.mark.parametrize("case", CASES["published"], ids=lambda case: case["files"][0])
def test_published_configs(case):
    check(translate([str(PUBLISHED / name) for name in case["files"]]), case)


@pytest.mark.parametrize("case", CASES["keys"], ids=lambda case: case["file"].strip().splitlines()[0][:60])
def test_what_keys_become(tmp_path, case):
    check(translated(tmp_path, case["file"]), case)


@pytest.mark.parametrize("case", CASES["scripts"], ids=lambda case: f"{case['name']} {len(case['text'])}")
def test_scripts_notebooks_pages_and_launch_lines(tmp_path, case):
    check(translated(tmp_path, case["text"], case["name"]), case)


@tables
def test_settings_of_a_table_are_those_of_a_config_and_its_keys_are_on_its_page(table):
    page = (ROOT / f"docs/coming-from-{table['name'].lower()}.md").read_text(encoding="utf-8")
    known = {*known_keys(RunConfig)}
    # Keys without a section of known keys are values or mappings of any keys, such as the settings of a taskset.
    mappings = tuple(f"{key}." for key in known if not any(other.startswith(f"{key}.") for other in known))
    for key, targets in table["keys"].items():
        assert f"`{key}`" in page
        for target in targets.split(", "):
            setting = re.split(" = | if ", target)[0].replace("environments.0", "environments.*")
            section = re.sub(r"(\.\*+)+$", "", setting)
            assert section in known or section.startswith(mappings), setting


def test_keys_come_in_one_order(tmp_path):
    """First those of the config, as in its table."""
    calls = "load_dataset('a/b')\nLoraConfig(r=4)\nGRPOTrainer(model='c/d')\nGRPOConfig(seed=1)"
    keys = [*translated(tmp_path, calls, "a.py").keys]
    assert keys == ["seed", "model_name_or_path", "lora_r", "dataset_name"]


VALUES = st.sampled_from(["3", "true", "-2", "0.5", '"linear"', '"dapo"', '"x y"', '""', "[]", "{ a = 1 }", "['b']"])


@tables
@settings(max_examples=30)
@given(data=st.data())
def test_a_key_is_taken_over_or_listed_and_what_comes_out_loads(tmp_path_factory, table, data):
    other = next(key for key in table["keys"] if key.endswith("seed"))  # by which the file is known for what it is
    key = data.draw(st.sampled_from([name for name in table["keys"] if "*" not in name and name != other]))
    text = f"{key} = {data.draw(VALUES)}\n{other} = 1"
    translation = translated(tmp_path_factory.mktemp("configs"), text)
    load(base=config_of(translation.settings))
    listed = [line for lines in translation.report().values() for line in lines]
    assert any(key in line for line in listed) and any(other in line for line in listed)


@pytest.mark.parametrize("case", CASES["unreadable"], ids=lambda case: case["words"])
def test_what_cannot_be_read_is_refused(tmp_path, case):
    text = case["text"] if "text" in case else (PUBLISHED / case["published"]).read_text()
    with pytest.raises(ConfigError, match=case["words"]) as caught:
        translated(tmp_path, text, case["name"])
    assert case["name"] in str(caught.value)


def test_files_that_are_no_configs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"not read|no config"):
        translate(["/dev/zero"])
    (tmp_path / "long.yaml").write_text(f"seed: 1\n# {'x' * MAX_CHARS}")
    with pytest.raises(ConfigError, match="longer than 10000000 characters"):
        translate([str(tmp_path / "long.yaml")])
    (tmp_path / "a.toml").write_text("[trainer]\n[orchestrator]\nbatch_size = 8")
    (tmp_path / "b.yaml").write_text("learning_rate: 1")
    with pytest.raises(ConfigError, match="different trainers"):
        translate([str(tmp_path / "a.toml"), str(tmp_path / "b.yaml")])


@pytest.mark.parametrize("case", CASES["files"], ids=lambda case: case["text"][:40])
def test_whose_a_file_is_and_what_its_values_are(tmp_path, case):
    assert translated(tmp_path, case["text"], case["name"]).keys == case["keys"]

"""Secrets in a config: refused, or warned of where nobody can know, with the way by an environment variable."""

import tomllib
import warnings
from pathlib import Path

import pytest

from configs.environments import SeatConfig
from configs.errors import ConfigError
from configs.fields import section_types
from configs.load import known_keys, load
from configs.run import RunConfig
from configs.secrets import FREE, REFERENCE, is_secret_name
from flows import cli

TASKSET = "environments.0.taskset."
CASES = tomllib.loads((Path(__file__).parent / "secrets.toml").read_text(encoding="utf-8"))
REFUSED = [(case["with"], case["says"]) for case in CASES["refused"]]


@pytest.mark.parametrize(("override", "words"), REFUSED, ids=lambda each: each)
def test_a_secret_is_refused_with_the_way_by_a_variable(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(("demo",), [override])
    (line,) = caught.value.problems
    assert "variable" in line and "sk-123" not in line and "word@" not in line, "the secret itself is not told"


@pytest.mark.parametrize("override", CASES["fine"])
def test_what_is_none_is_let_through_without_a_word(override):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(("demo",), [override])


def test_what_may_be_one_is_warned_of():
    with pytest.warns(UserWarning, match=r"judge_key: if this is a secret: .* environments\.0\.variables"):
        config = load(("demo",), [f"{TASKSET}judge_key=sesame"])
    assert config.environments[0].taskset["judge_key"] == "sesame"


def test_the_config_of_a_run_that_is_there_can_be_loaded_again():
    """It is in the store already; what is new in it is looked at."""
    recorded = load(("demo",)).model_dump(mode="json")
    recorded["environments"][0]["taskset"]["judge_key"] = "sk-123abc"
    assert load(base=recorded).environments[0].taskset["judge_key"] == "sk-123abc"
    with pytest.raises(ConfigError, match="judge_key"):
        load(overrides=[f"{TASKSET}judge_key=sk-456def"], base=recorded)


def test_check_refuses_both_and_repeats_neither(capsys):
    argv = ["check", "demo", f"{TASKSET}judge_key=s3cret-of-mine", "engine.url=http://user:pass-of-mine@host"]
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert "2 problems" in said and "judge_key" in said and "engine.url" in said and "of-mine" not in said


def test_no_setting_of_ours_holds_a_secret():
    """Those whose names look so are the names of variables, and what an algorithm tells apart by."""
    names = [key.rpartition(".")[2] for key in known_keys(RunConfig)]
    suspects = {name for name in names if is_secret_name(name)} - {"key", "token_id_threshold"}
    assert suspects == {"api_key_variable"} and all(REFERENCE.search(name.upper()) for name in suspects)


def test_every_section_whose_names_are_not_ours_is_looked_through():
    fields = [field for model in sections(RunConfig) for field in model.model_fields.items()]
    free = {name for name, field in fields if str(field.annotation).startswith("dict[str, typing.Any]")}
    assert free and free <= FREE


def sections(model):
    """Return a section and all that it may hold, seats included."""
    found = {model, SeatConfig}
    for field in model.model_fields.values():
        for inside in section_types(field.annotation):
            found |= sections(inside)
    return found


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MYAPIKEY"])
def test_names_of_secrets(name):
    assert is_secret_name(name) and is_secret_name(name.lower())


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "PATH", "VLLM_MAX_TOKENS_PER_EXPERT", "KEYBOARD", "CUDA_HOME", "XAUTHORITY"]
)
def test_names_of_others(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize("argument", ["--trust-remote-code", "--trust_remote_code=true"])
def test_an_engine_trusts_no_code_beside_weights(argument):
    with pytest.raises(ConfigError, match=r"engine\.extra_arguments\.1: .* runs code that lies beside"):
        load(("demo",), [f"engine.extra_arguments=['--max-num-seqs=4', '{argument}']"])

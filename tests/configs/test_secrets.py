"""Secrets in a config: refused, or warned of where nobody can know, with the way by an environment variable."""

import warnings

import pytest
from pydantic import BaseModel

from configs.environments import SeatConfig
from configs.errors import ConfigError
from configs.fields import section_types
from configs.load import known_keys, load
from configs.run import RunConfig
from configs.secrets import FREE, REFERENCE, is_secret_name
from flows import cli

TASKSET = "environments.0.taskset."
REFUSED = [
    (f"{TASKSET}judge_key=sk-123abc", f"{TASKSET}judge_key: by its name this is a secret"),
    (f"{TASKSET}judge_key=abcdefghijklmnopqrst", f"{TASKSET}judge_key: by its name this is a secret"),
    (f"{TASKSET}judge={{api_key='x'}}", f"{TASKSET}judge.api_key: by its name"),
    (f"{TASKSET}password=word", f"{TASKSET}password: by its name"),
    (f"{TASKSET}headers={{Authorization='Bearer x'}}", f"{TASKSET}headers.Authorization: by its name"),
    (f"{TASKSET}headers={{X-Api-Key='x'}}", f"{TASKSET}headers.X-Api-Key: by its name"),
    (f"{TASKSET}judges=[{{token='abc123def'}}]", f"{TASKSET}judges.0.token: by its name"),
    (f"{TASKSET}note='hf_abcdefghijklmnopqrstuvwxyz'", f"{TASKSET}note: this is a key of a service"),
    (f"{TASKSET}judge={{api_key_var='sk-123'}}", f"{TASKSET}judge.api_key_var: name an environment variable"),
    ("environments.0.harness={id='chat_loop', token='abc123def'}", "environments.0.harness.token: by its name"),
    ("environments.0.seats={a={harness={id='x', secret='x'}}}", "environments.0.seats.a.harness.secret: by its name"),
    ("environments.0.address='tcp://user:word@host:1'", "environments.0.address: the address holds a user name"),
    ("engine.url=http://user:key@host", r"engine\.url: the address .* name that in engine\.api_key_variable"),
    ("engine.url=http://key@host/v1", "engine.url: the address holds a user name or a password"),
    ("engine.api_key_variable=sk-1234", "engine.api_key_variable: name an environment variable"),
    ("engine.extra_arguments=['--api-key', 'x']", "engine.extra_arguments.0: --api-key: everybody"),
    ("engine.extra_arguments=['--hf-token=x']", "engine.extra_arguments.0: --hf-token: everybody"),
    ("model.path='https://user:word@host/model'", "model.path: the address holds"),
]
FINE = [
    f"{TASKSET}answer_key=answer12345678901234",
    f"{TASKSET}eos_token='<|im_end_of_all_text|>'",
    f"{TASKSET}judge={{api_key_var='OPENAI_API_KEY'}}",
    f"{TASKSET}max_tokens=12",
    f"{TASKSET}tokenizer='owner/name-of-1234567890'",
    f"{TASKSET}keyword='abcdefghijklmnop1234'",
    f"{TASKSET}judge_key=''",
    f"{TASKSET}repository='ssh://git@host/name'",
    f"{TASKSET}source='sk-learn-for-beginners'",
    f"{TASKSET}image='data:image/png;base64,{'A' * 200}'",
    "engine.extra_arguments=['--max-num-batched-tokens', '2048', '--tokenizer-mode', 'auto']",
    "engine.url=http://host:8000/v1",
    "environments.0.variables=['JUDGE_KEY']",
]


@pytest.mark.parametrize(("override", "words"), REFUSED, ids=lambda each: each)
def test_a_secret_is_refused_with_the_way_by_a_variable(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(("demo",), [override])
    (line,) = caught.value.problems
    assert "variable" in line and "sk-123" not in line and "word@" not in line, "the secret itself is not told"


@pytest.mark.parametrize("override", FINE)
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


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
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

"""Which of this process's environment variables the processes of a run are handed: no secret that they do not need."""

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.environments import EnvironmentConfig
from configs.load import load
from flows.orchestration import server as prefect_server
from flows.services import process
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers, GraderProcesses
from flows.services.learner import LearnerProcess
from flows.services.process import ServiceSpec
from tasks.inference.environments import servers
from tasks.runtime.process_variables import inherited_variables, needed_by, withheld
from tests.fixtures.hosts import examples_of
from tests.fixtures.waiting import PATIENCE

SECRETS = {
    "WANDB_API_KEY": "wandb",
    "HF_TOKEN": "hub",
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "AWS_SESSION_TOKEN": "session",
    "OPENAI_API_KEY": "openai",
    "JUDGE_KEY": "judge",
    "PRIME_API_KEY": "prime",
    "PREFECT_API_KEY": "prefect",
    "GITHUB_TOKEN": "github",
    "DATABASE_URL": "postgres://user:word@host/db",
}
AWS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
PLAIN = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HOME": "/hub",
    "HTTPS_PROXY": "http://user:word@proxy",
    "AWS_REGION": "eu",
    "LD_LIBRARY_PATH": "/lib",
}
ENVIRONMENT = {"name": "a", "taskset": {"id": "sample_reverse_text"}}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in (SECRETS | PLAIN).items():
        monkeypatch.setenv(name, value)


def given(needed):
    """The names of the secrets above that a process gets; all others it gets in any case."""
    found = inherited_variables(needed)
    assert found.items() >= PLAIN.items()
    assert {*found} | {*withheld(needed)} == {*os.environ, "CUDA_DEVICE_ORDER"}
    return found.keys() & SECRETS.keys()


def environment_spec(supervisor, config):
    return EnvironmentServers(supervisor, config, "own")._spec(config.environments[0])


SERVICES = {
    "learner": (
        lambda supervisor, config: LearnerProcess(supervisor, SimpleNamespace(config=config, store=None))._spec(),
        AWS,
    ),
    "environment": (environment_spec, {"HF_TOKEN"}),
    "grader": (
        lambda supervisor, config: GraderProcesses(supervisor, config)._spec(config.environments[0]),
        {"HF_TOKEN"},
    ),
    "prefect": (lambda supervisor, _: prefect_server._server(supervisor.directory, 1.0), {"PREFECT_API_KEY"}),
}


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_gets_what_it_needs(tmp_path, service):
    describe, expected = SERVICES[service]
    config = load(("demo",))
    spec = describe(Supervisor("run", tmp_path), config)
    assert given(tuple(spec.needs)) == expected
    assert not spec.env.keys() & SECRETS.keys()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, set()),
        ({"variables": ["JUDGE_KEY", "NOT_SET"]}, {"JUDGE_KEY"}),
        ({"taskset": {"id": "x", "judge": {"client": {"api_key_var": "OPENAI_API_KEY"}}}}, {"OPENAI_API_KEY"}),
        ({"harness": {"id": "x", "forward_env": ["GITHUB_TOKEN"]}}, {"GITHUB_TOKEN"}),
        ({"runtime": {"type": "prime"}}, {"PRIME_API_KEY"}),
        ({"seats": {"b": {"runtime": {"type": "prime"}}}}, {"PRIME_API_KEY"}),
        ({"seats": {"b": {"model": {"url": "http://b/v1", "api_key_variable": "OPENAI_API_KEY"}}}}, set()),
    ],
)
def test_an_environment_gets_what_its_section_names(settings, expected):
    environment = EnvironmentConfig.model_validate(ENVIRONMENT | settings)
    assert given(needed_by(environment)) == expected | {"HF_TOKEN"}


def test_gpus_have_the_numbers_of_nvidia_smi_if_nothing_else_is_set(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert inherited_variables()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert inherited_variables()["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_model_of_others_is_asked_with_its_key(tmp_path):
    external = "evaluation.external={url='https://host/v1', model='m', api_key_variable='JUDGE_KEY'}"
    config = load(("demo",), ["kind=evaluate", external])
    spec = environment_spec(Supervisor("run", tmp_path), config)
    assert given(tuple(spec.needs)) == {"HF_TOKEN", "JUDGE_KEY"}


@pytest.mark.engine
@pytest.mark.essential
def test_a_process_that_is_started_has_no_others(tmp_path):
    """As the system tells, of the guardian and of the service behind it."""
    report = tmp_path / "report.json"
    program = f"import json, os; open({str(report)!r} + '.tmp', 'w').write(json.dumps(dict(os.environ)))"
    program += f"; os.rename({str(report)!r} + '.tmp', {str(report)!r}); import time; time.sleep(600)"
    spec = ServiceSpec(
        name="shows",
        argv=[sys.executable, "-c", program],
        env={"OWN_KEY": "own"},
        report=report,
        log=tmp_path / "log",
        ready=lambda _: True,
        startup_seconds=PATIENCE,
        needs=("JUDGE_KEY", "AWS_*"),
    )
    with Supervisor("run", tmp_path / "services") as supervisor:
        handle = supervisor.start(spec)
        shown = handle.wait()
        guardian = Path(f"/proc/{handle._process.pid}/environ").read_bytes()
    expected = {"JUDGE_KEY", *AWS}
    assert shown.keys() & SECRETS.keys() == expected and shown["OWN_KEY"] == "own"
    assert {each.split(b"=")[0].decode() for each in guardian.split(b"\0")} & SECRETS.keys() == expected
    heading = spec.log.read_text().splitlines()[0]
    assert "without DATABASE_URL, GITHUB_TOKEN, HF_TOKEN" in heading and "word" not in heading


def test_a_section_reaches_its_process_by_a_file_for_one_pair_of_eyes(tmp_path):
    environment = EnvironmentConfig.model_validate(
        ENVIRONMENT | {"taskset": {"id": "sample_reverse_text", "judge_key": "s"}}
    )
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "environment-a.config.json").symlink_to(precious)
    for _ in range(2):  # a service is described again after a restart of the flow
        argv, _ = servers.command(environment, tmp_path / "environment-a.json")
        file = Path(argv[argv.index("--config") + 1])
        assert "judge_key" not in " ".join(argv) and json.loads(file.read_text())["taskset"]["judge_key"] == "s"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and not file.is_symlink()
    assert precious.read_text() == "precious"


def test_examples_are_read_without_secrets(monkeypatch):
    """The process that reads them runs the taskset's code as well."""
    seen = []

    def start(argv, *, env, **_):
        seen.append(env)
        raise KeyboardInterrupt

    monkeypatch.setattr(servers.subprocess, "Popen", start)
    environment = EnvironmentConfig.model_validate(ENVIRONMENT | {"variables": ["JUDGE_KEY"]})
    with pytest.raises(KeyboardInterrupt):
        examples_of(environment)
    assert seen[0].keys() & SECRETS.keys() == {"HF_TOKEN", "JUDGE_KEY"} and seen[0]["OMP_NUM_THREADS"] == "1"
    assert process.inherited_variables is inherited_variables

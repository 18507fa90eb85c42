"""The files for Prefect, Docker, Kubernetes and SLURM: whole, and naming only what there is."""

import inspect
import json
import os
import re
import subprocess
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from configs.errors import ConfigError
from flows.orchestration.deployments import FILE, read
from flows.orchestration.settings import DeployRefused
from flows.runtime.entry import FileParameters
from flows.runtime.resolve_run import DEFAULT_FILES
from flows.serve import serve
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers
from flows.services.learner import LearnerProcess

EVERY = yaml.safe_load(FILE.read_text())["deployments"]
SERVICES = [each for each in EVERY if each["entrypoint"] == "flows.serve:serve"]
DEPLOYMENTS = [each for each in EVERY if each not in SERVICES]


def test_every_flow_has_a_deployment():
    names = ["demo", "train", "continue", "sft", "dpo", "evaluate", "replay", "maintain"]
    assert [each["name"] for each in DEPLOYMENTS] == names


def test_services_have_a_pool_for_each_kind_and_are_those_that_runs_ask_for():
    """`--pool` names the pool of runs alone; a limit on runs must not hold for the services that they wait for."""
    pools = {f"{entry.tags[1]}/{entry.name}": entry.pool("mine") for entry in read(FILE) if "serve" in entry.tags}
    assert pools == {"serve/engine": "engines", "serve/environment": "environments", "serve/learner": "train"}
    assert pools.keys() == {InferenceService.deployment, EnvironmentServers.deployment, LearnerProcess.deployment}
    assert [each["parameters"]["service"] for each in SERVICES] == [each["name"] for each in SERVICES]
    assert read(FILE)[0].pool("mine") == "mine"
    assert undescribed(serve.parameters.properties) == []


@pytest.fixture(params=DEPLOYMENTS, ids=lambda each: each["name"])
def deployment(request):
    return request.param


@pytest.fixture
def flow(deployment):
    module, _, name = deployment["entrypoint"].partition(":")
    return getattr(import_module(module), name)


def test_entry_point_and_parameters(deployment, flow):
    name = deployment["entrypoint"].partition(":")[2]
    assert flow.name == name
    assert deployment["name"] in (name, "demo", "continue")
    taken = inspect.signature(flow.fn).parameters
    assert deployment["parameters"].keys() <= taken.keys()
    assert "advanced" in taken
    # An evaluation has the config of the run that made its policy, a continued run its own.
    presets = [] if name == "evaluate" or "continue_run" in deployment["parameters"] else DEFAULT_FILES.get(name, [])
    assert deployment["parameters"].get("presets", []) == presets
    assert deployment["work_pool"]["name"] == "stagecoach"
    assert {"stagecoach", name} <= set(deployment["tags"])


def undescribed(properties):
    return [name for name, described in properties.items() if not described.get("description")]


def test_every_parameter_says_in_the_form_what_it_is(flow):
    schema = flow.parameters
    properties = schema.properties
    assert undescribed(properties) == []
    assert {described["position"] for described in properties.values()} == set(range(len(properties)))
    # None is chosen at first, so that the rare fields are shown to nobody who does not ask for them.
    rare, nothing = properties["advanced"]["anyOf"]
    (behind,) = (each for each in schema.definitions.values() if each["title"] == "Advanced")
    assert rare["$ref"].startswith("#/definitions/") and nothing == {"type": "null"}
    assert properties["advanced"]["default"] is None and behind["additionalProperties"] is False
    assert "store" in behind["properties"] and undescribed(behind["properties"]) == []


ENTRY = {"name": "mine", "entrypoint": "flows.train:train"}


def read_entries(place, entries, **others):
    """Read a file of these deployments."""
    file = place / "mine.yaml"
    file.write_text(yaml.safe_dump({"deployments": entries} | others))
    return read(file)


def test_a_file_has_every_kind_of_schedule(tmp_path):
    schedules = [
        {"cron": "0 1 * * *", "timezone": "Europe/London", "slug": "night", "active": False, "day_or": False},
        {"interval": 60, "anchor_date": "2026-11-29T00:00:00+00:00", "parameters": {"steps": 1}},
        {"rrule": "RRULE:FREQ=DAILY;INTERVAL=1"},
    ]
    entry = {**ENTRY, "schedules": schedules, "concurrency_limit": 1, "work_pool": {"work_queue_name": "low"}}
    (read_one,) = read_entries(tmp_path, [entry], pull=[])
    clocks = [(each.cron, each.interval, each.rrule) for each in read_one.schedules]
    minute, daily = timedelta(seconds=60), schedules[2]["rrule"]
    assert clocks == [("0 1 * * *", None, None), (None, minute, None), (None, None, daily)]
    assert (read_one.schedules[0].active, read_one.schedules[1].parameters) == (False, {"steps": 1})
    assert read_one.concurrency_limit == 1 and read_one.description is None and read_one.pool("mine") == "mine"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"schedules": [{"slug": "never"}]}, "exactly one of cron, interval and rrule"),
        ({"schedules": [{"cron": "0 1 * * *", "replaces": "old"}]}, "deployments.0.schedules.0.replaces"),
        ({"pull": []}, "deployments.0.pull"),
        ({"entrypoint": "flows/train.py:train"}, "deployments.0.entrypoint"),
    ],
)
def test_what_a_file_of_deployments_may_not_have_is_named(tmp_path, wrong, problem):
    with pytest.raises(DeployRefused, match=re.escape(problem)) as refused:
        read_entries(tmp_path, [{**ENTRY, **wrong}])
    assert "Nothing was deployed" in str(refused.value)


def test_rare_parameters_are_taken_as_such_or_as_json_and_checked():
    given = FileParameters.of({"store": "/data", "files": ["a.toml"]})
    assert (given.store, given.files) == ("/data", ["a.toml"]) and FileParameters.of(given) is given
    assert FileParameters.of(None).store == ""
    with pytest.raises(ConfigError, match=r"advanced\.stroe"):
        FileParameters.of({"stroe": "/data"})


def test_nights_are_for_evaluation_and_maintenance_and_training_is_ready():
    schedules = [(each["name"], schedule) for each in DEPLOYMENTS for schedule in each.get("schedules", [])]
    active = [(name, schedule["active"]) for name, schedule in schedules]
    assert active == [("train", False), ("evaluate", True), ("maintain", True)]
    assert {schedule["slug"] for _, schedule in schedules} == {"nightly"}


def test_the_form_fills_in_no_seed_so_that_each_submit_computes():
    assert [each["name"] for each in DEPLOYMENTS if "seed" in each["parameters"]] == []
    (evaluate,) = (each for each in DEPLOYMENTS if each["name"] == "evaluate")
    seeds = [schedule["parameters"]["seed"] for schedule in evaluate["schedules"]]
    assert seeds == [17], "each night tries the same examples, and a policy that was scored is found"


DEPLOY = Path(__file__).parents[2] / "deploy"
TEMPLATE = json.loads((DEPLOY / "kubernetes" / "base-job-template.json").read_text())


def test_every_placeholder_of_the_job_is_a_variable_of_the_pool():
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(TEMPLATE["job_configuration"])))
    assert used <= TEMPLATE["variables"]["properties"].keys()
    assert {"gpus", "runs_claim", "image"} <= used


def test_the_manifests_refer_to_each_other():
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "stagecoach.yaml").read_text()))
    names = {(each["kind"], each["metadata"]["name"]) for each in found}
    assert ("PersistentVolumeClaim", TEMPLATE["variables"]["properties"]["runs_claim"]["default"]) in names
    for each in found:
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for volume in pod.get("volumes", []):
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in names


@pytest.mark.parametrize("job", ["worker", "nodes"])
def test_jobs_of_slurm_take_models_from_the_cache_that_the_nodes_share(job):
    assert 'export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"' in (DEPLOY / "slurm" / f"{job}.sbatch").read_text()


SRUN = """#!/bin/bash
# Starts a command as often as it is told to, each with its number, as srun does.
tasks=1
while [[ "$1" == -* ]]; do
    [[ "$1" != --ntasks=* ]] || tasks="${1#--ntasks=}"
    shift
done
for ((number = 0; number < tasks; number++)); do SLURM_PROCID=$number "$@" & done
wait
"""


STAGECOACH = """#!/bin/bash
# A run that ends when the others are there, which end with it.
called="$STAGECOACH_CHECKOUT/called"
printf '%s\\n' "$*" >> "$called"
while [[ "$1" == run && "$(wc -l < "$called")" -lt 3 ]]; do sleep 0.05; done
"""


def test_a_slurm_job_starts_the_run_on_its_first_node_and_joins_it_on_the_others(tmp_path):
    """With srun and the command in place of which stand-ins say what they were given."""
    programs = {"bin/srun": SRUN, "bin/scontrol": "#!/bin/bash\nprintf 'alpha\\nbeta\\ngamma\\n'\n"}
    programs[".venv/bin/stagecoach"] = STAGECOACH
    programs["deploy/slurm/clean_node.sh"] = "exit 0\n"
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"STAGECOACH_CHECKOUT": str(tmp_path), "SLURM_SUBMIT_DIR": "", "SLURM_JOB_NODELIST": "alpha,beta,gamma"}
    environment = {**os.environ, **job, "SLURM_JOB_NUM_NODES": "3", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    script = DEPLOY / "slurm" / "nodes.sbatch"
    subprocess.run(
        ["bash", script, "mine.toml", "learner.processes=8", "--name", "big"], env=environment, check=True, timeout=60
    )
    config = "mine.toml learner.processes=8 learner.nodes=3 learner.rendezvous=alpha:29500"
    expected = [f"run {config} --name big", *(f"join {config} --node {number}" for number in (1, 2))]
    assert sorted((tmp_path / "called").read_text().splitlines()) == sorted(expected)


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_scripts_are_valid(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0

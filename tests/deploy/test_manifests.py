"""The files for Docker, Kubernetes and SLURM: whole, and naming only what there is."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
TEMPLATE: dict[str, Any] = json.loads((DEPLOY / "kubernetes" / "base-job-template.json").read_text())


def test_every_placeholder_of_the_job_is_a_variable_of_the_pool() -> None:
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(TEMPLATE["job_configuration"])))
    assert used <= TEMPLATE["variables"]["properties"].keys()
    assert {"gpus", "runs_claim", "image"} <= used


def test_a_job_has_a_gpu_shared_memory_and_the_volume_of_runs() -> None:
    pod = TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"runs": "/runs", "shared-memory": "/dev/shm"}
    assert {each["name"] for each in pod["volumes"]} == mounts.keys()


def test_the_manifests_refer_to_each_other() -> None:
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "stagecoach.yaml").read_text()))
    names = {(each["kind"], each["metadata"]["name"]) for each in found}
    assert ("PersistentVolumeClaim", TEMPLATE["variables"]["properties"]["runs_claim"]["default"]) in names
    for each in found:
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for volume in pod.get("volumes", []):
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        if "serviceAccountName" in pod:
            assert ("ServiceAccount", pod["serviceAccountName"]) in names


def test_compose_services_depend_on_services_and_mount_volumes_that_there_are() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        assert service.get("depends_on", {}).keys() <= compose["services"].keys()
        assert {mount.split(":")[0] for mount in service.get("volumes", [])} <= compose["volumes"].keys()


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_scripts_are_valid(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0

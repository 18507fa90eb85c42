"""The manifests, and the job that Prefect makes of the pool's template, against the schema of Kubernetes' API."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.utilities.templating import apply_values

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
MANIFESTS = list(yaml.safe_load_all((FOLDER / "stagecoach.yaml").read_text()))
PROGRAM = """
import json, sys
import kubernetes_validate
try:
    kubernetes_validate.validate(json.load(sys.stdin), "1.37", strict=True)
except kubernetes_validate.ValidationError as wrong:
    sys.exit(f"{wrong.path}: {wrong.message}")
"""


@pytest.fixture(scope="module")
def wrong_in(tmp_path_factory):
    """Return what says what is wrong in a manifest, unknown fields too; it says nothing of one that the API takes."""
    # 70 MB of schemas, for which no user has a use: not in the lock.
    place = tmp_path_factory.mktemp("schemas")
    install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
    packages = ["kubernetes-validate==1.37.0", "importlib-resources"]
    subprocess.run([*install, "--target", str(place), *packages], check=True, timeout=500)
    command = [sys.executable, "-c", PROGRAM]

    def check(manifest):
        asked = json.dumps(manifest)
        done = subprocess.run(command, cwd=place, input=asked, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or "Traceback" not in done.stderr, done.stderr
        return done.stderr

    return check


def the_job():
    """Return the job that Prefect's worker makes of the template, for a run of a pool that nobody has changed."""
    template = json.loads((FOLDER / "base-job-template.json").read_text())
    properties = template["variables"]["properties"]
    # The API takes null for a field that is not there, for which its schema has no word.
    values = {name: default for name, each in properties.items() if (default := each.get("default")) is not None}
    values |= {"name": "run", "command": ["prefect", "flow-run", "execute"], "image": "stagecoach", "labels": {}}
    return apply_values(template["job_configuration"], values)["job_manifest"]


@pytest.mark.parametrize("manifest", [*MANIFESTS, the_job()], ids=lambda each: each["kind"])
def test_the_api_takes_the_manifest(manifest, wrong_in):
    assert wrong_in(manifest) == ""


def test_a_misspelt_field_is_found(wrong_in):
    (deployment,) = (
        each for each in MANIFESTS if each["kind"] == "Deployment" and "worker" in each["metadata"]["name"]
    )
    wrong = json.loads(json.dumps(deployment))
    wrong["spec"]["template"]["spec"]["serviceAcountName"] = "stagecoach-worker"
    assert "serviceAcountName" in wrong_in(wrong)

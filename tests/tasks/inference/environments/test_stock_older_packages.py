"""Packages of the interface that verifiers had before tasksets are refused, with what to do."""

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments import servers as environments

pytestmark = pytest.mark.engine


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("package", ["older", "older_at_import"])
def test_a_package_of_the_older_interface_is_refused_with_what_to_do(package: str) -> None:
    with pytest.raises(environments.EnvironmentUnavailable, match=r"load_environment.*exports a Taskset"):
        environments.examples(EnvironmentConfig(name="old", taskset={"id": package}))

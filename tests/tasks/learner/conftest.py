"""A small model on disk, a world of one rank, and the model in float64 where exactness is the question."""

import pytest

from tasks.learner.tiny import tiny_qwen3


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A two-layer Qwen3 with weights large enough that attention matters."""
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "policy", hidden=32, layers=2, intermediate=64, seed=3)


@pytest.fixture(scope="module")
def world():
    """The process group that sharding needs, in this process; other files make groups of their own kinds."""
    import torch
    import torch.distributed as dist

    from tasks.learner.distributed import start_world

    torch.set_num_threads(1)
    yield start_world()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def learners(tmp_path_factory):
    """The addresses of a learner of one rank and of one of two, by how many; for tests that leave them at work."""
    from tests.tasks.learner.processes import process

    place = tmp_path_factory.mktemp("learners")
    with process(place / "1", 1) as (_, one), process(place / "2", 2) as (_, two):
        yield {1: one["address"], 2: two["address"]}


@pytest.fixture(scope="session")
def exact_policy(model_directory):
    """The same model in float64 and not sharded; who needs its gradients drops those that are there first."""
    import torch

    from tests.tasks.learner.ranks import plain_policy

    return plain_policy(model_directory, torch.float64)


@pytest.fixture(params=[False, True], ids=["segments", "kernel"])
def kernel(request):
    """The longest segment of each call of torch's variable-length operation, with kernels for the CPU.

    None where it attends by products segment by segment.
    """
    if not request.param:
        yield None
        return
    from tests.fixtures.varlen import varlen_on_cpu

    with varlen_on_cpu() as calls:
        yield calls
        assert calls

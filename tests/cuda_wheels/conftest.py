"""The packages of the GPU lock on a machine without a GPU: an empty libcuda.so.1, and vLLM's platform of an H200."""

import ctypes
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def cuda_build(tmp_path_factory):
    """Load a library without symbols as the driver's, so that what links to it imports; return its directory.

    Fails for another build.
    """
    import torch

    assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build: run make test-cuda-wheels"
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)  # functions of the driver are looked for when they are called
    return library.parent


@pytest.fixture(scope="session")
def h200(cuda_build):
    """Have vLLM plan for an H200; return its platform."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then takes Triton without a driver that answers
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H200(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda _, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda _, device_id=0: 143_771 << 20)
        num_compute_units = classmethod(lambda _, device_id=0: 132)

    platforms._current_platform = H200()
    return platforms._current_platform

"""declare_torchvision_operators: lets transformers and vLLM import torchvision beside a CPU build of torch.

PyPI's wheels of torchvision are built for CUDA. With a CPU build of torch their compiled operators do not load, and
`import torchvision` fails where it describes two of them: "operator torchvision::nms does not exist". Declarations
without an implementation are enough: image processors resize and convert in Python.

Callers: the engine, the learner, environment servers, the makers of small models and what reads images in the process
of a run, each before it imports the modules of transformers or vLLM that import torchvision.
"""

from functools import cache
from threading import Lock
from typing import Any

_LOCK = Lock()
OPERATORS = ("nms", "qnms")


def declare_torchvision_operators() -> None:
    """Declare `OPERATORS` if torchvision does not import without them; imports torch and torchvision.

    Does nothing with a CUDA build of torch, without torchvision, or in a second call.
    """
    with _LOCK:
        _declare()


@cache
def _declare() -> Any:
    """The library is returned to be cached: its declarations end with it."""
    import torch

    if torch.version.cuda is not None:
        return None
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return None
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library

"""Lets torchvision be imported beside a CPU build of torch. `install.py` copies it to where each Python loads it.

The wheels of torchvision on the package index are built for CUDA. What they compute in C++ is missing on a CPU, and the
import fails at two operators that it wants to describe: "operator torchvision::nms does not exist". Declaring them is
enough; models that see use resizing and conversion alone, which are Python.
"""

import sys
from typing import Any


class _DeclareOperators:
    """Declares the operators just before torchvision's own code runs, so that no other start of Python loads torch.

    Not when it is looked for: transformers only asks whether it is there, and Python asks finders with its lock on all
    imports held. Torch loaded there would wait for ever for a thread that is loading torch.

    A finder of modules without the base class of those: the import of that takes every start of Python 9 ms.
    """

    library: Any = None  # kept: with the object the declaration goes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torchvision as the other finders do."""
        if name != "torchvision":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def declare_and_execute(module: Any) -> None:
                self._declare()
                execute(module)

            spec.loader.exec_module = declare_and_execute
        return spec

    def _declare(self) -> None:
        import torch

        if torch.version.cuda is None and self.library is None:
            _DeclareOperators.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _DeclareOperators.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _DeclareOperators())

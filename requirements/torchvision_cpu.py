"""Lets torchvision be imported beside a CPU build of torch. `install.py` copies it to where each Python loads it.

The wheels of torchvision on the package index are built for CUDA. What they compute in C++ is missing on a CPU, and the
import fails at two operators that it wants to describe: "operator torchvision::nms does not exist". Declaring them is
enough; models that see use resizing and conversion alone, which are Python.
"""

import sys
from typing import Any


class _DeclareOperators:
    """Declares the operators when torchvision is first imported, so that no other start of Python loads torch.

    A finder of modules without the base class of those: the import of that takes every start of Python 9 ms.
    """

    library: Any = None  # kept: with the object the declaration goes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing, and be asked once."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            _DeclareOperators.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _DeclareOperators.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _DeclareOperators())

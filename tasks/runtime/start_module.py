"""Runs a module of this installation as a program: `python -P start_module.py MODULE [ARGUMENT ...]`.

`python -m` looks in the current directory first: a person's own `tasks.py` or `storage.py` there would stand in for
ours. Here our packages come from where this file lies, and the current directory is looked in last, so that a person's
own environments and reward functions are still found.
"""

import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The directory that holds our packages: a checkout, or what packages are installed in."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, ours or an environment's, in a process of its own."""
    return [sys.executable, "-P", os.path.abspath(__file__), module, *arguments]


def main() -> None:
    """Run the module that the first argument names, with the rest as its arguments."""
    # Of a launcher that starts this file without -P, as torchrun does: the modules beside it are no top-level ones.
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != os.path.dirname(os.path.abspath(__file__))]
    if ROOT not in sys.path:  # where it is, its place is right: before the standard library it would shadow that
        sys.path.insert(0, ROOT)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

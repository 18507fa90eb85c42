"""A pipe that ties a service to its flow: when the write end is gone, by will or by death, so is the service."""

import os
import weakref

_open: weakref.WeakSet["Lifeline"] = weakref.WeakSet()


class Lifeline:
    """Both ends of a guardian's pipe; neither survives an exec unless it is passed on by name."""

    def __init__(self) -> None:
        self.read, self._write = os.pipe()
        self._closed = False
        _open.add(self)

    def close(self) -> None:
        """Let the service end; calling it again does nothing."""
        if not self._closed:
            self._closed = True
            os.close(self._write)


def _let_go() -> None:
    """In a forked child: close the pipes, or the services would live as long as the child."""
    for lifeline in list(_open):
        lifeline.close()


os.register_at_fork(after_in_child=_let_go)

"""Leases: who may use what is one thing at a time: the engine, which holds one policy, or servers of environments."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Lease:
    """Shared by all who want the same policy; whoever wants another waits until nobody holds this one.

    Those who want the policy that is held are let in also while others wait for another: a policy is only asked for as
    long as its step, or its evaluation, goes on, so that all come to their turn.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = ""
        self._holders = 0

    @contextmanager
    def of(self, policy_key: str) -> Iterator[None]:
        """Hold a policy within the block; waits for those who hold another, for ever if need be.

        Who holds one policy and asks for another within would wait for itself.
        """
        with self._free:
            self._free.wait_for(lambda: not self._holders or self._held == policy_key)
            self._held = policy_key
            self._holders += 1
        try:
            yield
        finally:
            with self._free:
                self._holders -= 1
                self._free.notify_all()

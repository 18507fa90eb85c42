"""A session: everything that lives as long as one run, and the events that others want to see.

`open_session` makes one for a config. Services start early, in parallel, and only those that missing work needs; before
that `flows.runtime.preflight` looks for what would make the run fail later.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.run import RunConfig, only_teachers_sample, policy_scores
from configs.store_paths import relative_paths
from flows.orchestration.gate_answers import approval
from flows.orchestration.gpu_slots import gpu_slot
from flows.orchestration.server import current_flow_run
from flows.orchestration.signals import is_end, lost_terminations_repeated
from flows.orchestration.states import (
    Cancellation,
    RunCancelled,
    cancelled_text,
    event_of,
    mark_crashed,
    other_writers,
    resume_command,
)
from flows.orchestration.task_runs import TaskRuns
from flows.reporting.messages import step_message
from flows.runtime.machine_facts import versions
from flows.runtime.resolve_run import Source, find_policy, nothing_started, source_of
from flows.services.base import RunService, Supervisor
from flows.services.engine import InferenceService
from flows.services.environments import EnvironmentServers, GraderProcesses
from flows.services.judge_proxy import JudgeProxy
from flows.services.learner import LearnerProcess
from flows.services.ownership import recorded_identity
from flows.services.teachers import TeacherEngines, asked_teachers
from storage.errors import StoreError
from storage.records import LOST, STARTS
from storage.roots import check_links
from storage.store import open_store
from tasks.metrics.warnings import Replies
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Renderer, Services
from tasks.runtime.stage import Policy, Ref
from tasks.stage_tasks import services_of

Watcher = Callable[[str, Mapping[str, Any]], None]


class Session:
    """One run at work: its place in a store, where it starts from, its services, and its watchers."""

    def __init__(
        self,
        context: RunContext,
        source: Source,
        supervisor: Supervisor,
        watchers: tuple[Watcher, ...] = (),
        policy: Policy | None = None,
    ) -> None:
        self.context, self.config = context, context.config
        context.note_units = self._note_groups
        self.source = source
        self.policy = policy
        """The policy to evaluate, where one of the store was named."""
        self.watchers = watchers
        self.missing: Sequence[Ref] = ()
        """Results of the run that were still to be computed when it was opened."""
        self.engine = InferenceService(supervisor, context, Path(source.weights))
        self.teachers = TeacherEngines(supervisor, self.config)
        self.judges = JudgeProxy(self.config, context.store.answers, self.teachers)
        self.environments = EnvironmentServers(supervisor, self.config, self.engine.key, self.judges)
        self.learner = self.engine.learner = LearnerProcess(supervisor, context, self.engine.asleep)
        self.graders = GraderProcesses(supervisor, self.config, self.judges)
        self.replies: dict[int, Callable[[], Replies]] = {}
        """Read the replies of the last steps."""
        self.num_computed = self.num_found = 0
        """Results that were computed in this session, and that the ledger had."""
        self.task_runs = TaskRuns(context.run, self.config.prefect.task_runs)
        """What of the work is a task run in Prefect."""
        self.slot = ExitStack()
        """Holds a GPU slot from the first service of this machine on; `open_session` closes it after the last one."""
        self.position = ""
        """The work that was begun last, in words."""
        self._supervisor = supervisor
        self._cancellation = Cancellation(tell=self._note)
        self._seen_writers = set[str]()
        """The other processes on this run that the watchers know of, as texts."""
        self._step = 0
        """The step that a stage was last begun for."""
        self._recorded = False
        """Whether the run has its first event; a run without one is not known."""
        # Re-entrant: a watcher that is notified may notify in turn.
        self._lock = threading.RLock()

    @cached_property
    def services(self) -> Services:
        """What stages may ask for."""
        return Services(
            engine=self.engine,
            teachers=self.teachers,
            environments=self.environments,
            learner=self.learner,
            graders=self.graders,
            example_source=self.environments,
            approve=approval(self.context.run, self.config.store, self.notify),
            render=self._renderer() if self.config.kind == "sft" else None,
        )

    def _renderer(self) -> Renderer:
        from tasks.inference.trace_rows.demonstrations import demonstration_renderer

        model = self.config.model
        return demonstration_renderer(model.tokenizer or self.source.weights, model.renderer, model.renderer_settings)

    def count(self, computed: bool) -> None:
        """Count a result; threads of the run may do so at the same time."""
        with self._lock:
            self.num_computed += computed
            self.num_found += not computed

    def close(self) -> None:
        """End all services; whoever waits for one gets an error."""
        # Threads that sample wait for the engine, and end when it is gone.
        self._supervisor.close()

    def begin(self, missing: Sequence[Ref]) -> None:
        """Start the services that the missing work needs, in parallel; does not wait for them."""
        services = self.needed_services(missing)
        is_local = self.config.placement.services == "local"
        # What is on pools has GPUs of their workers, which bound by themselves how many they serve at a time.
        if any(is_local or not service.deployment for service in services):
            self.slot.enter_context(gpu_slot(self.context.run, self._note))
        # All in one go: an engine takes minutes, and others start meanwhile.
        for service in services:
            service.begin()

    def needed_services(self, missing: Sequence[Ref]) -> list[RunService]:
        """Return the services that the missing work needs, in the order of the work."""
        return [getattr(self, keyword) for keyword in needs(missing, self.config)]

    def stop_if_cancelled(self, step: int, stage: str) -> None:
        """Raise RunCancelled where someone has asked Prefect to cancel the run; meant to be called between stages."""
        if text := self._cancellation.asked_for(current_flow_run()):
            when = f"before stage {stage} of step {step}, {text}"
            raise RunCancelled(cancelled_text(when, self.context.run, self.config.store))

    def notify(self, event: str, **facts: Any) -> None:
        """Let the watchers (panel, artifacts, monitor) see an event."""
        with self._lock:  # threads of the run have things to tell at the same time
            if event == "stage":
                self.position = f"{facts['stage']} of step {facts['step']}"
                if not facts["evaluating"] and facts["step"] != self._step:
                    self._step = facts["step"]
                    self.note_other_writers()
            for watch in self.watchers:
                watch(event, facts)
        if event == "step":
            self.task_runs.end_step(facts["step"], step_message(facts))
        elif event == "end":
            self.task_runs.end(facts["ending"])

    def _note(self, text: str) -> None:
        self.notify("note", text=text)

    def note_other_writers(self) -> None:
        """Let the watchers see each other process that has gone to work on this run."""
        for text in {*other_writers(self.context.store, self.context.run)} - self._seen_writers:
            self._seen_writers.add(text)
            self._note(text)

    def _note_groups(self, step: int, num_groups: int) -> None:
        """Let the watchers see how many rollouts of a step are there, while others are still sampled."""
        size, groups = self.config.assignment.group_size, self.config.assignment.groups_per_step
        self.notify("rollouts", step=step, done=num_groups * size, wanted=groups * size)

    def note_service(self, event: str, **facts: Any) -> None:
        """Let the watchers see an event of a service; a loss is a note, and an event of a run that has begun."""
        if event == "lost":
            self._note(facts["text"])
            try:
                if self._recorded:
                    self.record(LOST, self._step, facts["text"])
            except StoreError as problem:  # the thread that watches the service must go on, and so must the run
                self._note(f"the loss of {facts['service']} is not among the run's events: {problem}")
        self.notify(event, **facts)

    def record(self, event: str, step: int = 0, message: str = "") -> None:
        """Write an event in the life of the run; a start or resumption says which process it is."""
        self.context.store.runs.record(
            run=self.context.run,
            event=event,
            kind=self.config.kind,
            config=relative_paths(self.config, self.context.store.root.directory).model_dump(mode="json"),
            step=step,
            message=message,
            parent_run=self.config.replay.run or self.config.fork.partition(":")[0] or None,
            flow_run=current_flow_run(),
            process=recorded_identity() if event in STARTS else "",
        )
        self._recorded = True


@contextmanager
def open_session(config: RunConfig, watchers: tuple[Watcher, ...] = ()) -> Iterator[Session]:
    """Open a session for a resolved config; its services are gone when the block ends, in whatever way."""
    store = open_store(config.store)
    # Before this run writes its own event: after it, an earlier process of the same run could not be distinguished.
    mark_crashed(store)
    context = RunContext(store, config.name, config, versions(config))
    with nothing_started():
        chosen = find_policy(store, config.evaluation.policy) if config.kind == "evaluate" else None
    # The slot encloses the supervisor: it is given back when the last process on the GPU is gone.
    with (
        ExitStack() as slot,
        Supervisor(config.name, log_directory(config)) as supervisor,
    ):
        session = Session(context, source_of(config), supervisor, watchers, chosen)
        session.slot = slot
        slot.callback(session.judges.close)
        slot.enter_context(supervisor.subscribe(session.note_service))
        session.note_other_writers()
        yield session


@contextmanager
def record_run(session: Session) -> Iterator[None]:
    """Write how a run began and ended into its events; what went wrong is passed on."""
    # Read before the first event is written, which makes the run known.
    known = session.context.run in session.context.store.runs.names()
    session.record("resumed" if known else "started")
    try:
        with lost_terminations_repeated():
            yield
    # Ctrl-C and SIGTERM end a run too, and its events must say so.
    except BaseException as error:
        event, message = event_of(error, session.context.run, session.config.store, session.position)
        if is_end(error):  # the last line of its log; Prefect's worker writes the state, in words of its own
            session.notify("note", text=message)
        try:
            session.record(event, message=message)
        except StoreError as problem:  # which must not hide the error of the run, mostly of the same cause
            error.add_note(f"This is not among the run's events: {problem.what}")
        if isinstance(error, KeyboardInterrupt):
            command = resume_command(session.context.run, session.config.store)
            error.add_note(f"What is committed is safe; go on with: {command}")
        session.notify("end", ending=event, text=f"run {session.context.run} {event}: {message}")
        raise
    session.record("finished")
    text = f"run {session.context.run} finished: {session.num_computed:,} computed, {session.num_found:,} cached"
    session.notify("end", ending="finished", text=text, num_computed=session.num_computed)


def log_directory(config: RunConfig) -> Path:
    """Return the local directory for the logs of a run's services: in the store where that is local."""
    # Processes append to logs, which an object store cannot take.
    root = Path(".stagecoach") if "://" in config.store else Path(config.store).expanduser()
    check_links(root, f"logs/{config.name}")
    return (root / "logs" / config.name).resolve()


def needs(missing: Sequence[Ref], config: RunConfig) -> list[str]:
    """Return the services that the missing work needs, by their keywords, in the order of the work."""
    stages = dict.fromkeys(ref.stage for ref in missing)
    # Stages name the services they may ask; the config says that some will not be asked.
    unneeded = set() if any(True for _ in asked_teachers(config)) else {"teachers"}
    # A policy samples unless teachers do, and scores where an algorithm wants that.
    evaluated = config.kind == "evaluate" or (config.kind != "replay" and config.evaluation.evaluates_training)
    samples = "rollout" in stages and (evaluated or not only_teachers_sample(config))
    if "regrade" not in stages and not any(entry.group_rewards for entry in config.served_environments.values()):
        unneeded.add("graders")
    if config.external or not (samples or ("reference" in stages and policy_scores(config))):
        unneeded.add("engine")
    keywords = dict.fromkeys(keyword for stage in stages for keyword in services_of(stage))
    return [keyword for keyword in keywords if keyword not in unneeded]

"""The room of the teachers: an engine for each frozen model that a run asks, from a directory of ours or of others.

Nothing is ever loaded into them after the start, so they need no proof but that they serve what the config says.
"""

import secrets
import threading
from contextlib import closing
from typing import Any

from configs.algorithms import TeacherConfig
from configs.run import RunConfig
from flows.processes.service import Handle, ServiceFailed, ServiceSpec
from flows.processes.services import Supervisor
from flows.runtime.teacher_versions import asked_teachers, external_key, require_teachers, salt_of, served_version
from flows.runtime.versions import model_directory
from tasks.inference.engine.client import MODEL, Engine, EngineLost
from tasks.inference.engine.client import command as engine_command
from tasks.inference.engine.scoring import Served
from tasks.runtime.services import MOST_LOSSES

NAMED = 8
"""Digits of a version that name a teacher's service."""


class TeacherChanged(ValueError):
    """An engine that someone else runs serves another model than the run began with."""


class TeacherRoom:
    """One engine for each distinct teacher of a run, started when it is needed and watched until the session ends."""

    def __init__(self, supervisor: Supervisor, config: RunConfig) -> None:
        self._supervisor = supervisor
        self._config = config
        self._key = secrets.token_hex(16)
        self._handles: dict[str, Handle] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the teachers that the run asks, side by side, or adopt external ones; returns at once."""
        for _, teacher in asked_teachers(self._config):
            self._handle(teacher)

    def reach(self) -> None:
        """Raise ConfigError where a teacher is not there, is another than recorded, or cannot teach; starts nothing."""
        require_teachers(self._config)

    def at(self, teacher: TeacherConfig) -> Served:
        """Return where a teacher is served; waits for a restart.

        Raises ServiceFailed when none is left or an external one does not answer, TeacherChanged when that serves
        another model than the one of `teacher.version`.
        """
        url = self._handle(teacher).wait()["url"]
        if teacher.url:
            return self._external(teacher)
        return Served(url, self._key, MODEL, teacher.version)

    def _external(self, teacher: TeacherConfig) -> Served:
        key = external_key(teacher)
        losses = 0
        while True:
            try:
                name, version = served_version(teacher.url, key)
                break
            except EngineLost as error:
                losses += 1  # it is not ours to restart, but may be busy
                if losses > MOST_LOSSES:
                    raise ServiceFailed(
                        f"the teacher at {teacher.url} does not answer: {error}. What is in the store is safe: start "
                        "it again and resume the run"
                    ) from error
        if version != teacher.version:
            raise TeacherChanged(
                f"the teacher at {teacher.url} serves {version!r}, the run began with {teacher.version!r}. Nothing "
                "more was done with it, what is in the store is safe: serve that again and resume the run, or start "
                "a new run"
            )
        return Served(teacher.url, key, name, salt_of(version))

    def _handle(self, teacher: TeacherConfig) -> Handle:
        with self._lock:
            weights = teacher.url or teacher.version  # the same weights in two places need one engine
            if weights not in self._handles:
                self._handles[weights] = self._supervisor.start(self._spec(teacher))
            return self._handles[weights]

    def _ready(self, report: dict[str, Any]) -> bool:
        with closing(Engine(report["url"], self._key)) as engine:
            return engine.healthy()

    def _spec(self, teacher: TeacherConfig) -> ServiceSpec:
        name = f"teacher-{teacher.version[:NAMED]}" if teacher.path else f"teacher-{len(self._handles)}"
        report = self._supervisor.directory / f"{name}.json"
        argv, environment = ([], {}) if teacher.url else self._command(teacher, report)
        return ServiceSpec(
            name=name.replace("-", " ", 1),
            argv=argv,
            env=environment,
            report=report,
            log=report.with_suffix(".log"),
            ready=(lambda _: True) if teacher.url else self._ready,  # who is asked for one asks what it serves
            startup_seconds=teacher.startup_seconds,
            max_restarts=teacher.max_restarts,
            external=teacher.url,
        )

    def _command(self, teacher: TeacherConfig, report: Any) -> tuple[list[str], dict[str, str]]:
        own = ("threads", "memory_gib", "gpu_memory_utilization")
        engine = self._config.engine.model_copy(update={name: getattr(teacher, name) for name in own})
        weights = model_directory(teacher.path, "teacher.path")
        argv, environment = engine_command(engine, self._config.model, weights, report, frozen=True)
        gpus = {"CUDA_VISIBLE_DEVICES": teacher.gpus} if teacher.gpus else {}
        return argv, {**environment, **gpus, engine.api_key_variable: self._key}

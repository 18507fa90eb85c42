"""Teachers of a run: frozen models that it asks, their versions, and an engine for each, of ours or of others.

Nothing is ever loaded into them after the start, so they need no proof but that they serve what the config says.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from configs.algorithms import ChatTeacherConfig, TeacherConfig, teacher_of
from configs.errors import ConfigError, did_you_mean
from configs.judges import JudgeConfig
from configs.replay import replayed_stages
from configs.resolve import with_versions
from configs.run import RunConfig
from flows.services.base import Command, RunService, Supervisor
from flows.services.engine import NEEDS, is_healthy
from flows.services.process import Handle, Report, ServiceFailed, ServiceSpec
from storage.keys import content_key
from tasks.inference.engine import model_info
from tasks.inference.engine.checks import tokenizer_difference
from tasks.inference.engine.client import MODEL, Engine, EngineError, EngineLost, ServedModel
from tasks.inference.engine.command import command as engine_command
from tasks.inference.engine.hanging import hangs
from tasks.inference.engine.model_info import directory_digest, model_directory, tokenizer_digest
from tasks.inference.engine.weights_view import require_weights
from tasks.runtime.stage import retry_lost

FrozenModel = TeacherConfig | JudgeConfig
NAMED = 8
"""Digits of a version that name a teacher's service."""
ASK_SECONDS = 10.0
"""Longest wait for an answer about an engine that someone else runs."""
SAMPLING = {
    "train": ("rollout", "judging", "advantage"),
    "dpo": ("rollout", "advantage"),
    "evaluate": ("rollout",),
    "sft": ("rollout",),
}
"""The stages that ask teachers, by the kind of a run; a replay does some of them again."""


class TeacherChanged(ValueError):
    """An engine that someone else runs serves another model than the run began with."""


class TeacherEngines(RunService):
    """One engine for each distinct teacher of a run, started when it is needed and watched until the session ends."""

    def __init__(self, supervisor: Supervisor, config: RunConfig) -> None:
        super().__init__(supervisor, config)
        self._key = secrets.token_hex(16)

    def begin(self) -> None:
        """Start the teachers that the run asks, side by side, or adopt external ones; returns at once."""
        for _, teacher in asked_teachers(self._config):
            if not teacher.chat:
                self._engine(teacher)

    def check_available(self) -> None:
        """Raise ConfigError where a teacher is not there, is another than recorded, or cannot teach; starts nothing."""
        require_teachers(self._config)

    def serve(self, teacher: FrozenModel) -> ServedModel:
        """Return where a teacher is served; waits for a restart.

        Raises ServiceFailed when none is left or an external one does not answer, TeacherChanged when that serves
        another model than the one of `teacher.version`.
        """
        if chat := teacher.chat:
            return ServedModel(chat.url, os.environ.get(chat.api_key_variable, ""), chat.model, chat=chat)
        url = self._engine(teacher).wait()["url"]
        if not teacher.url:
            return ServedModel(url, self._key, MODEL, teacher.version)
        try:
            name, version = retry_lost(lambda: served_version(teacher), EngineLost)  # it may only be busy
        except EngineLost as error:
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
        # What it says of itself holds more than a salt may.
        return ServedModel(teacher.url, os.environ.get(teacher.api_key_variable, ""), name, content_key(version))

    def _engine(self, teacher: FrozenModel) -> Handle:
        # The same weights in two places need one engine, but for a judge of longer texts.
        longest = teacher.max_model_len if isinstance(teacher, JudgeConfig) else None
        return self._process(f"{teacher.url or teacher.version} {longest or ''}", lambda: self._spec(teacher))

    def _spec(self, teacher: FrozenModel) -> ServiceSpec:
        def ready(report: Report) -> bool:
            return bool(teacher.url) or is_healthy(report["url"], self._key)  # who is asked for one asks what it serves

        return self._describe(
            f"{'judge' if isinstance(teacher, JudgeConfig) else 'teacher'} "
            f"{teacher.version[:NAMED] if teacher.path else len(self._handles)}",
            lambda report: self._command(teacher, report),
            ready,
            teacher,
            external=teacher.url,
            needs=NEEDS,
            hangs=lambda report: hangs(report, self._key, teacher.hang_seconds),
        )

    def _command(self, teacher: FrozenModel, report: Path) -> Command:
        # All else as the policy's engine, but never in 8 bits: the same length, precision and log-prob settings.
        own = {name: getattr(teacher, name) for name in ("threads", "memory_gib", "gpu_memory_utilization", "gpus")}
        model = self._config.model
        if isinstance(teacher, JudgeConfig):  # it reads and writes text, by its own tokenizer
            model = model.model_copy(update={"tokenizer": ""})
            own["max_model_len"] = teacher.max_model_len or self._config.engine.max_model_len
        engine = self._config.engine.model_copy(update={**own, "url": "", "replicas": 1, "quantization": None})
        weights = model_directory(teacher.path, "teacher.path")
        argv, environment = engine_command(engine, model, weights, report, frozen=True)
        return argv, {**environment, engine.api_key_variable: self._key}


def asked_teachers(config: RunConfig) -> Iterator[tuple[str, FrozenModel]]:
    """Yield the frozen models that the stages of a run ask, with where the config names them: teachers and players."""
    again = replayed_stages(config.replay) if config.kind == "replay" else SAMPLING.get(config.kind, ())
    if "rollout" in again:
        # Those that play single seats.
        for where, environment in config.served_environments.items():
            players = environment.players.items()
            yield from ((f"{where}.{key}", player) for key, player in players if not player.beside)
    inside = config.environment_judges if "rollout" in again else {}
    if inside or "judging" in again or (config.kind == "replay" and config.replay.regrade):
        yield from ((f"judges.{index}", judge) for index, judge in enumerate(config.judges))
    # Nothing is credited in an evaluation, and no demonstration by a model.
    if config.kind in ("evaluate", "sft"):
        return
    for where, algorithm in config.used_algorithms.items():
        teacher = teacher_of(algorithm)
        stage = "rollout" if algorithm.sampled_by == "teacher" else "advantage"
        if teacher is not None and stage in again:
            yield f"{where}.teacher", teacher


def teacher_facts(config: RunConfig, local: bool = False) -> dict[str, dict[str, str]]:
    """Return under `teachers` the version of each teacher that the run asks, by the dotted key of its section.

    A recorded one that is not there any more keeps its version: a run whose work is done can be looked at without it.
    With `local`, of those whose weights are here: nothing is downloaded and nobody is asked. Raises ConfigError for one
    that cannot teach: see `require_teachers`.
    """
    teachers = [pair for pair in asked_teachers(config) if is_here(pair[1]) or not (local or pair[1].version)]
    return {"teachers": _versions(config, teachers)}


def reopened_teachers(config: RunConfig) -> RunConfig:
    """Return `config` with the versions of the teachers open again that it asks: another one may be named."""
    # Those that are gone keep theirs: nobody could say another.
    available = [where for where, each in asked_teachers(config) if each.url or each.chat or is_here(each)]
    return with_versions(config, {f"{where}.version": "" for where in available})


def require_teachers(config: RunConfig) -> None:
    """Raise ConfigError, with every reason, where a teacher that the run asks is not there, or cannot teach its model:
    weights other than recorded, or another tokenizer."""
    _versions(config, list(asked_teachers(config)))


def served_version(teacher: FrozenModel) -> tuple[str, str]:
    """Return the name of the model that a teacher of someone else serves, and what it says of it.

    Raises EngineLost where nobody answers, EngineError where it is no engine of our kind.
    """
    with closing(_external(teacher)) as engine:
        return engine.describe_model()


def is_here(teacher: FrozenModel) -> bool:
    """Tell whether a teacher's weights lie in a directory of this machine."""
    return bool(teacher.path) and Path(teacher.path).expanduser().is_dir()


def _external(teacher: FrozenModel, model: str = MODEL) -> Engine:
    key = os.environ.get(teacher.api_key_variable, "")
    return Engine(teacher.url, key, timeout=ASK_SECONDS, model=model)


def _versions(config: RunConfig, teachers: list[tuple[str, FrozenModel]]) -> dict[str, str]:
    versions: dict[str, str] = {}
    lines: list[str] = []
    for where, teacher in teachers:
        try:
            if teacher.chat:
                version, problem = _by_chat(teacher.chat, "" if isinstance(teacher, JudgeConfig) else "chat.")
            else:
                version, problem = _by_url(config, teacher) if teacher.url else _by_path(config, where, teacher)
        # With the others' problems, not instead of them: all are reported at once.
        except (EngineError, EngineLost) as error:
            place = "chat.url" if teacher.chat and isinstance(teacher, TeacherConfig) else "url"
            lines.append(f"{where}.{place}: {error}. Start it again, or give the path of its weights")
            continue
        versions[where] = version
        lines += [f"{where}.{problem}"] if problem else []
        if teacher.version and teacher.version != version:
            lines.append(
                f"{where}.version: recorded as {teacher.version!r}, here it is {version!r}; give back the weights that "
                "the run began with, or start a new run"
            )
    if lines:
        raise ConfigError(lines)
    return versions


def _by_path(config: RunConfig, where: str, teacher: FrozenModel) -> tuple[str, str]:
    """Return the version of a teacher whose weights are here, and what speaks against it, if anything."""
    directory = model_directory(teacher.path, f"{where}.path")
    model_info.read(directory)  # refuses a directory without a config.json
    require_weights(directory)
    own = config.model.tokenizer_digest
    if not own and config.model.path:
        own = tokenizer_digest(model_directory(config.model.tokenizer or config.model.path))
    other = not isinstance(teacher, JudgeConfig) and tokenizer_digest(directory) != own
    problem = f"path: the tokenizer of {teacher.path} is not the model's: its files have another digest"
    return directory_digest(directory), problem if other else ""


def _by_url(config: RunConfig, teacher: FrozenModel) -> tuple[str, str]:
    """Return the version of a teacher that someone else serves, and what speaks against it, if anything."""
    name, version = served_version(teacher)
    tokenizer = config.model.tokenizer or config.model.path
    with closing(_external(teacher, name)) as engine:
        other = tokenizer_difference(engine, model_directory(tokenizer)) if tokenizer else ""
    return version, f"url: it has another tokenizer than the model: {other}" if other else ""


def _by_chat(chat: ChatTeacherConfig, place: str) -> tuple[str, str]:
    """Return the model that a chat API is asked for, and what speaks against it, by the API's list if it has one."""
    key = os.environ.get(chat.api_key_variable, "")
    with closing(Engine(chat.url.removesuffix("/v1"), key, timeout=ASK_SECONDS)) as engine:
        names = engine.model_names() or [chat.model]
    problem = f"{place}model: {chat.url} serves no {chat.model!r}{did_you_mean(chat.model, names)}"
    return chat.model, "" if chat.model in names else problem

"""Teachers with a real engine: ours, which is started again when it dies, and one of somebody else."""

import signal
from dataclasses import dataclass

import pytest

from configs.errors import ConfigError
from configs.resolve import resolve
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.guardian import descendants, send
from flows.services.teachers import TeacherChanged, TeacherEngines, teacher_facts
from tasks.inference.engine.client import score
from tasks.learner.tiny import tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEQUENCE = [(7 * index) % 256 for index in range(20)]
VARIABLE = "KEY_OF_THE_TAUGHT"


@dataclass
class Taught:
    """A run with a teacher of its own, and the service that keeps it."""

    config: RunConfig
    supervisor: Supervisor
    teachers: TeacherEngines

    @property
    def teacher(self):
        return self.config.algorithm.teacher

    def elsewhere(self, served, **changes):
        """Return the run with the teacher as somebody else serves it."""
        teacher = {"url": served.url, "api_key_variable": VARIABLE}
        algorithm = {"type": "opd", "teacher": teacher}
        tree = self.config.model_dump(mode="json") | {"algorithm": algorithm} | changes
        return RunConfig.model_validate(tree)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    root = tmp_path_factory.mktemp("taught")
    models = {name: tiny_qwen3(root / name, seed=seed, layers=2) for seed, name in enumerate(("policy", "teacher"))}
    teacher = {"path": str(models["teacher"]), "memory_gib": 0.1, "startup_seconds": 600}
    config = RunConfig.model_validate(
        {
            "seed": 1,
            "algorithm": {"type": "opd", "teacher": teacher},
            "environments": ({"name": "e", "taskset": {"id": "t"}},),
            "model": {"path": str(models["policy"]), "vocab_size": 512, "renderer": "qwen3"},
            "engine": {"max_model_len": 64},
        }
    )
    config = resolve(config, teacher_facts(config))
    with Supervisor("taught", root / "logs") as supervisor:
        yield Taught(config, supervisor, TeacherEngines(supervisor, config))


@pytest.fixture
def others(taught, monkeypatch):
    """The run's teacher as somebody else serves it, whose key is known here."""
    served = taught.teachers.serve(taught.teacher)
    monkeypatch.setenv(VARIABLE, served.api_key)
    return served


def scored(served):
    ((_, found),) = score(served, [SEQUENCE], 1)
    return found


@pytest.mark.nightly
def test_a_teacher_that_dies_is_started_again_with_the_same_weights(taught):
    taught.teachers.check_available()
    taught.teachers.begin()
    served = taught.teachers.serve(taught.teacher)
    assert served.salt == taught.teacher.version and served.api_key not in repr(served)
    before = scored(served)
    (handle,) = taught.teachers._handles.values()
    send(signal.SIGKILL, descendants(handle._process.pid))  # some go by themselves when the first has
    while handle.generation == 1:
        handle.wait()
    again = taught.teachers.serve(taught.teacher)
    assert again.url != served.url and scored(again) == pytest.approx(before, abs=1e-5)


def test_a_teacher_of_somebody_else_is_known_by_what_it_says_it_serves(taught, others):
    config = taught.elsewhere(others)
    config = resolve(config, teacher_facts(config))
    teacher = config.algorithm.teacher
    assert taught.teacher.path in teacher.version and "vllm" in teacher.version
    teachers = TeacherEngines(taught.supervisor, config)
    teachers.check_available()
    found = teachers.serve(teacher)
    assert (found.url, found.model) == (others.url, "policy") and len(found.salt) == 32
    assert scored(found) == pytest.approx(scored(others), abs=1e-6)
    with pytest.raises(TeacherChanged, match="the run began with 'another'"):
        teachers.serve(teacher.model_copy(update={"version": "another"}))


def test_a_teacher_of_somebody_else_with_other_tokens_or_another_key_is_refused(taught, others, monkeypatch, tmp_path):
    words = tiny_qwen3(tmp_path / "words", layers=1, words=("quick", "brown"))
    words_of = taught.config.model.model_dump(mode="json") | {"tokenizer": str(words)}
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.url: it has another tokenizer .* here \('quick'\)"):
        teacher_facts(taught.elsewhere(others, model=words_of))
    monkeypatch.setenv(VARIABLE, "another key")
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.url: .*401"):
        teacher_facts(taught.elsewhere(others))

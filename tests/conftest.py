"""What holds for all tests: which are read, where their files lie, who shares an engine, and no property is timed."""

import os
import re
import shutil
import signal
import tempfile
import traceback
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from storage.policies.scratch import ScratchDirectories
from tasks.runtime.torchvision_operators import declare_torchvision_operators

# A busy machine is no fault of the code. Examples are new at every run, so that few at a time come to many.
settings.register_profile("untimed", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# No test needs the hub. A process that asked for it by mistake would try for half a minute where there is no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers of xdist get a width, by which commands would break their lines as on a terminal.
os.environ.pop("COLUMNS", None)
pytest_plugins = ["tests.fixtures.faults"]
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 2 * 2**30
PLACE = pytest.StashKey()
MARK = re.compile(r"\bpytest\.mark\.(\w+)")
WHOLE_FILE = re.compile(r"^pytestmark = .*?(?=\n\S|\Z)", re.MULTILINE | re.DOTALL)
MODELS = re.compile(r"^ +from (transformers|peft|vllm)\b", re.MULTILINE)
SHARED_ENGINE = re.compile(r"\bsmall_engine\b")


def pytest_configure(config):
    """Put the files of tests that start no engine into memory: making a commit durable on a disk is most of their time.

    The disk is used where memory is scarce, as in a container with a small /dev/shm, and where a person named a place.
    What earlier runs left there (after a failure, for people to look at) goes now; that of a run at work stays.
    """
    # A program that was started in the background, by `nohup` say, ignores Ctrl-C, and so does all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Files with the most tests go first, so that no worker is left with a long one at the end. With engines the number
    # of tests says nothing of the time: there files go by their names, whole runs first and what takes seconds last.
    config.option.loadscopereorder = "not engine" in config.option.markexpr
    pure = "not engine" in config.option.markexpr and "TMPDIR" not in os.environ and not config.option.basetemp
    if pure and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
        scratches = ScratchDirectories(MEMORY / f"stagecoach-tests-{os.getuid()}")
        config.stash[PLACE] = scratches, scratches.make("run")
        os.environ["TMPDIR"] = tempfile.tempdir = str(config.stash[PLACE][1])


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report, config):
    """Name a test as soon as it fails: a suite that is stopped from outside never comes to its summary."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and terminal and isinstance(report, pytest.TestReport) and not hasattr(config, "workerinput"):
        terminal.write_line(f"\n{report.when} of {report.nodeid} failed after {report.duration:.0f} s")


def pytest_ignore_collect(collection_path, config):
    """Leave a file unread whose tests are all deselected by `-m`: to import it may be to load torch or an engine.

    Known by its text: a mark that is asked for stands nowhere in it, or one that is not wanted marks it as a whole.
    Each file is read by one call of `make test-all`, so that one that cannot be imported is noticed.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    marks, of_all = set(MARK.findall(text)), set(MARK.findall("".join(WHOLE_FILE.findall(text))))
    wanted = config.option.markexpr.strip().split(" and ") if config.option.markexpr else []
    if "cuda_wheels" in of_all - set(wanted):
        return True
    unread = (term[4:] in of_all if term.startswith("not ") else term not in marks for term in wanted)
    return any(unread) or None


def pytest_sessionfinish(session, exitstatus):
    """Give the memory back; after a failure the files stay until the next run.

    A worker that was called wrongly says how: xdist says "no active workers" and nothing else.
    """
    if hasattr(session.config, "workerinput") and exitstatus == pytest.ExitCode.USAGE_ERROR:
        traceback.print_exc(limit=-3)
    if exitstatus != pytest.ExitCode.TESTS_FAILED and PLACE in session.config.stash:
        scratches, place = session.config.stash[PLACE]
        scratches.discard(place)


@pytest.fixture(autouse=True)
def _importable_models(request):
    """Have torchvision import in a test whose file loads models by itself; torch takes too long for all others."""
    if _loads_models(str(request.path)):
        declare_torchvision_operators()


@cache
def _loads_models(path):
    return MODELS.search(Path(path).read_text()) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Refuse marks that the choice of tests cannot see.

    Files that share an engine come first: together they are the longest piece of work that one worker gets.
    """
    for item in items:
        if item.get_closest_marker("essential") and not item.get_closest_marker("engine"):
            raise pytest.UsageError(
                f"{item.nodeid}: `essential` chooses among tests marked `engine`, which this is not"
            )
    for path in {item.path for item in items if item.get_closest_marker("engine")}:
        if "engine" not in MARK.findall(path.read_text()):
            raise pytest.UsageError(f"{path}: write pytest.mark.engine in the file itself: by its text it is read")
    items.sort(key=lambda item: not shares_engine(str(item.path)))


@cache
def shares_engine(path):
    """Say whether a file's tests use the engine that all share."""
    return bool(SHARED_ENGINE.search(Path(path).read_text()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a worker whole files, and all files that share an engine to one: it is started once."""
    from xdist.scheduler import LoadFileScheduling

    if config.getvalue("dist") != "loadfile":
        return None

    class FilesByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = str(super()._split_scope(nodeid))
            return "the shared engine" if shares_engine(str(config.rootpath / file)) else file

    return FilesByEngine(config, log)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Small models: a and b differ in every weight; tied and tied_b share their heads with their embeddings."""
    from tasks.learner.tiny import tiny_qwen3

    root = tmp_path_factory.mktemp("models")
    return {
        "a": tiny_qwen3(root / "a", seed=1),
        "b": tiny_qwen3(root / "b", seed=2),
        "tied": tiny_qwen3(root / "tied", seed=3, tied=True),
        "tied_b": tiny_qwen3(root / "tied_b", seed=4, tied=True),
    }


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory):
    """A small model that sees."""
    from tasks.learner.tiny_vision import tiny_qwen3_vl

    return tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "seeing", seed=1)


@pytest.fixture(scope="session")
def small_engine(models, tmp_path_factory):
    """One engine for all tests that leave it alive; it was started with the weights of model a."""
    from tests.fixtures.hosts import engine_of

    with engine_of(models["a"], tmp_path_factory.mktemp("engine") / "report.json") as client:
        yield client

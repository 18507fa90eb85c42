"""Which API is used and what it is told: pure parts."""

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flows.orchestration import server as prefect_api
from flows.orchestration import server_process
from flows.orchestration.settings import SettingsUnreadable, configured_url
from flows.services.ownership import identity
from tests.fixtures.waiting import PATIENCE

URL = "http://127.0.0.1:1/api"


@pytest.fixture
def place(place, monkeypatch):
    """An empty working directory and home, with no Prefect variable set."""
    monkeypatch.delenv("PREFECT_HOME")
    (place / "home" / ".prefect").mkdir(parents=True)
    return place


def output(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def write(place):
    """Write a file below the working directory."""
    return lambda name, text: (place / name).write_text(text)


PROFILES = "home/.prefect/profiles.toml"


def test_every_place_of_configuration_in_prefects_own_order(write, monkeypatch):
    assert configured_url() == ""
    write(PROFILES, 'active = "mine"\n[profiles.mine]\n')
    write("pyproject.toml", "[project]\nname = 'x'\n")
    assert configured_url() == ""
    profiles = '[profiles.mine]\nPREFECT_API_URL = "profile"\n[profiles.other]\nPREFECT_API_URL = "other"\n'
    write(PROFILES, 'active = "mine"\n' + profiles)
    assert configured_url() == "profile"
    monkeypatch.setenv("PREFECT_PROFILE", "other")
    assert configured_url() == "other"
    write("pyproject.toml", '[tool.prefect.api]\nurl = "pyproject"\n')
    assert configured_url() == "pyproject"
    write("prefect.toml", '[api]\nurl = "toml"\n')
    assert configured_url() == "toml"
    write(".env", "# PREFECT_API_URL=no\nexport PREFECT_API_URL='dotenv'\n")
    assert configured_url() == "dotenv"
    monkeypatch.setenv("PREFECT_API_URL", "environment")
    assert configured_url() == "environment"


@pytest.mark.engine
def test_the_order_is_prefects_own(write):
    write(PROFILES, 'active = "m"\n[profiles.m]\nPREFECT_API_URL = "http://a/api"\n')
    write("prefect.toml", '[api]\nurl = "http://b/api"\n')
    program = "from prefect.settings import get_current_settings; print(get_current_settings().api.url)"
    assert output(program).stdout.strip() == configured_url() == "http://b/api"


def test_a_broken_settings_file_is_named(write):
    write("prefect.toml", "[api\n")
    with pytest.raises(SettingsUnreadable, match=r"prefect\.toml is not valid TOML"):
        configured_url()


def test_a_configured_api_that_does_not_answer_is_one_clear_error(place, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", URL)
    before = dict(os.environ)
    api = prefect_api.begin(place / "state")
    assert (api.url, api.embedded, api.ui_url) == (URL, False, "http://127.0.0.1:1")
    with pytest.raises(prefect_api.PrefectUnreachable, match=r"127.0.0.1:1/api: .*Nothing was started"):
        api.wait()
    assert dict(os.environ) == before
    assert not (place / "state").exists()


def test_a_run_is_gone_only_when_its_process_certainly_is():
    mine = prefect_api.run_tags("demo", "/data/store")
    assert {"stagecoach", "run:demo", "store:/data/store"} < set(mine)
    host, boot, process = prefect_api.process_of(mine)
    assert (host, process) == (socket.gethostname(), identity())
    number, _, started = process.partition(":")

    def gone(host, boot, number, started, embedded):
        return prefect_api.is_gone(["stagecoach", f"process:{host}/{boot}:{number}:{started}"], embedded)

    assert not prefect_api.is_gone(mine, embedded=True)
    assert not prefect_api.is_gone([], embedded=True)
    assert not prefect_api.is_gone(["process:nonsense"], embedded=True)
    assert gone(host, boot, number, str(int(started) + 1), embedded=False)  # the number was reused
    assert gone(host, boot, str(2**22 + 1), started, embedded=False)
    assert not gone(f"{host}x", boot, "1", started, embedded=True)
    assert gone(host, "another", number, started, embedded=True)
    assert not gone(host, "another", number, started, embedded=False)


@pytest.mark.engine
@pytest.mark.parametrize("where", ["outside a flow", "while Prefect hands it on"])
def test_sigterm_ends_the_process_in_order(where):
    send = "os.kill(os.getpid(), signal.SIGTERM)"
    if where == "outside a flow":
        body = f"    {send}; until_told()"
    else:
        body = (
            "    try:\n        raise TerminationSignal\n"
            f"    except TerminationSignal:\n        {send}; time.sleep(0.05); print('reported')\n        raise"
        )
    program = (
        "import os, signal, time\nfrom flows.orchestration.signals import termination_reported\n"
        "from tests.fixtures.waiting import until_told\n"
        f"class TerminationSignal(BaseException): pass\nwith termination_reported():\n{body}\n"
    )
    answer = output(program)
    assert answer.returncode == 143
    assert answer.stdout == ("" if where == "outside a flow" else "reported\n")
    assert answer.stderr == ""


@pytest.mark.engine
def test_the_first_server_prepares_its_installation_with_prefects_tables_and_no_rows(tmp_path, monkeypatch):
    template, database = tmp_path / "kept/template.db", tmp_path / "new.db"
    # What a user has set up for servers of their own is not touched.
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:///no/x")
    server_process.begin_database(database, template)
    with closing(sqlite3.connect(database)) as opened:
        assert opened.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
        assert opened.execute("SELECT count(*) FROM flow_run").fetchone() == (0,)
    assert not (tmp_path / "mine").exists() and [path.name for path in template.parent.iterdir()] == ["template.db"]


def test_a_new_database_is_a_copy_of_the_template_and_neither_is_overwritten(tmp_path):
    template, database = tmp_path / "template.db", tmp_path / "new.db"
    server_process.begin_database(database, Path(__file__, "none"))
    assert not database.exists(), "without a template the server migrates its database itself"
    for content in (b"kept", b"another"):
        template.write_bytes(content)
        server_process.prepare(template)
        server_process.begin_database(database, template)
        assert (template.read_bytes(), database.read_bytes()) == (content, b"kept")
    assert {path.name for path in tmp_path.iterdir()} == {"template.db", "new.db"}

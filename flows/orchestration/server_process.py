"""A whole Prefect server with its UI in one process, started as `python -P server_process.py REPORT PORT_FILE`.

It binds its port before it imports Prefect, so that its address is known in milliseconds, no other program can take
the port, and the UI gets the right one (`prefect server start --port` gives it 4200). The port is kept in PORT_FILE:
a server started again answers where the flow expects it.

Prefect fills a new database by some hundred migrations, seven processor seconds. `make install` keeps the result, by
this file without arguments, or else the first server of an installation does; new databases of the same version begin
as a copy.
"""

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path


def bind(port_file: Path) -> socket.socket:
    """Return a socket bound to the port in the file, or to one that the system chooses, which the file then holds."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Or a restart within a minute finds its own port still taken.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", int(port_file.read_text()) if port_file.exists() else 0))
    port_file.write_text(str(bound.getsockname()[1]))
    return bound


def serve(bound: socket.socket) -> None:
    """Serve the Prefect API and UI on a bound socket until SIGTERM."""
    port = bound.getsockname()[1]
    os.environ |= {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    begin_database(Path(os.environ["PREFECT_HOME"]) / "prefect.db", template_of_installation())
    import uvicorn
    from prefect.server.api.server import create_app

    # Open event streams of browsers and flows would otherwise hold the end up.
    config = uvicorn.Config(create_app(final=True), log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[bound])


def template_of_installation() -> Path:
    """Return where this installation keeps the migrated database of its Prefect."""
    return Path(sys.prefix) / f"share/stagecoach/prefect-{version('prefect')}.db"


def prepare(template: Path) -> None:
    """Migrate a new database and keep it as the template, unless there is one; no server is started."""
    if template.exists():
        return
    template.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prefect-", dir=template.parent) as home:
        database, whole = Path(home, "prefect.db"), Path(home, "whole.db")
        # Read when Prefect is imported; a profile of the user may name a database that is in use.
        os.environ |= {
            "PREFECT_HOME": home,
            "PREFECT_PROFILES_PATH": f"{home}/profiles.toml",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        }
        from prefect.server.database import provide_database_interface

        asyncio.run(provide_database_interface().create_db())
        with closing(sqlite3.connect(database)) as migrated:
            migrated.execute("VACUUM INTO ?", (str(whole),))  # with what its write-ahead log holds
        whole.replace(template)


def begin_database(database: Path, template: Path) -> None:
    """Copy the template to a database that does not exist; one that another process began stands.

    A missing template is made before, in a process with settings of its own. Where it cannot be, no database is begun.
    """
    if database.exists():
        return
    if not template.exists():  # an installation that is read-only is no error of the server
        command = [sys.executable, "-P", __file__, str(template)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not template.exists():
        return
    draft = database.with_name(f".{database.name}.{os.getpid()}")
    shutil.copyfile(template, draft)
    with suppress(FileExistsError):
        os.link(draft, database)
    draft.unlink()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        prepare(Path(sys.argv[1]) if sys.argv[1:] else template_of_installation())
        sys.exit()
    ready = bind(Path(sys.argv[2]))
    report = Path(sys.argv[1])
    draft = report.with_name(f".{report.name}.draft")
    draft.write_text(json.dumps({"url": f"http://127.0.0.1:{ready.getsockname()[1]}"}))
    draft.replace(report)  # never half of it is seen
    serve(ready)

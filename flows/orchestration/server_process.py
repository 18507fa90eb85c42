"""A whole Prefect server with its UI in one process, started as `python -P prefect_server.py REPORT PORT_FILE`.

It binds its port before it imports Prefect, so that its address is known in milliseconds, no other program can take
the port, and the UI gets the right one (`prefect server start --port` gives it 4200). The port is kept in PORT_FILE:
a server started again answers where the flow expects it.

Prefect fills a new database by some hundred migrations, seven processor seconds. `make install` keeps the result, by
this file without arguments, or else the first server of an installation does, without its rows. Later servers of the
same version begin with a copy.
"""

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import sys
import tempfile
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


def bind(port_file: Path) -> socket.socket:
    """Return a socket bound to the port in the file, or to one that the system chooses, which the file then holds."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Or a restart within a minute finds its own port still taken.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", int(port_file.read_text()) if port_file.exists() else 0))
    port_file.write_text(str(bound.getsockname()[1]))
    return bound


def report(path: Path, port: int) -> None:
    """Write the server's address, all at once."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    # Whoever polls for the file must never see half of it.
    draft.replace(path)


def serve(bound: socket.socket) -> None:
    """Serve the Prefect API and UI on a bound socket until SIGTERM."""
    port = bound.getsockname()[1]
    os.environ |= {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"
    template = template_of_installation()
    is_new = not database.exists()
    if is_new and template.exists():
        begin_database(database, template)
    import uvicorn
    from prefect.server.api.server import create_app

    class PrefectServer(uvicorn.Server):
        async def startup(self, *arguments: Any, **named: Any) -> None:
            await super().startup(*arguments, **named)
            if is_new and not template.exists():
                keep_template(database, template)

    # open event streams of browsers and flows would otherwise hold the end up
    config = uvicorn.Config(create_app(final=True), log_level="warning", timeout_graceful_shutdown=2)
    PrefectServer(config).run(sockets=[bound])


def template_of_installation() -> Path:
    """Return where this installation keeps the migrated database of its Prefect."""
    return Path(sys.prefix) / f"share/stagecoach/prefect-{version('prefect')}.db"


def prepare(template: Path) -> None:
    """Migrate a new database and keep it as the template, unless there is one; no server is started."""
    if template.exists():
        return
    with tempfile.TemporaryDirectory(prefix="stagecoach-prefect-") as home:
        database = Path(home, "prefect.db")
        # Read when Prefect is imported; a profile of the user may name a database that is in use.
        os.environ |= {
            "PREFECT_HOME": home,
            "PREFECT_PROFILES_PATH": f"{home}/profiles.toml",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        }
        from prefect.server.database import provide_database_interface

        asyncio.run(provide_database_interface().create_db())
        keep_template(database, template)


def begin_database(database: Path, template: Path) -> None:
    """Copy the template to a database that is not there yet; one that another process begins meanwhile stands."""
    draft = database.with_name(f".{database.name}.{os.getpid()}")
    shutil.copyfile(template, draft)
    with suppress(FileExistsError):
        os.link(draft, database)
    draft.unlink()


def keep_template(database: Path, template: Path) -> None:
    """Keep the tables of a migrated database, and of its rows the migration alone; does nothing where it may not."""
    if not database.exists():  # the server has another, as its user configured
        return
    draft = template.with_name(f".{template.name}.{os.getpid()}")
    with suppress(OSError, sqlite3.Error):  # an installation that is read-only, or a database of another kind
        template.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(draft)) as copy:
            source.backup(copy)
            names = [name for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for name in names:
                if name != "alembic_version" and not name.startswith("sqlite_"):
                    copy.execute(f'DELETE FROM "{name}"')
            copy.commit()
            copy.execute("VACUUM")
        draft.replace(template)
    with suppress(OSError):
        draft.unlink()  # of one that failed


if __name__ == "__main__":
    if len(sys.argv) == 1:
        prepare(template_of_installation())
        sys.exit()
    ready = bind(Path(sys.argv[2]))
    report(Path(sys.argv[1]), ready.getsockname()[1])
    serve(ready)

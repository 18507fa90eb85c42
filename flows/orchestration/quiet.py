"""Prefect's own log lines go to a file, so that they do not tear the panel apart."""

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def route_prefect_logs(log: Path) -> None:
    """Send what Prefect would print to a file instead; what it sends to its API stays as it is.

    Must be called after Prefect was imported and before a flow is called.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import PrefectConsoleHandler

    setup_logging()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger("stagecoach").setLevel(logging.INFO)  # how sampling went, say; the root keeps to warnings
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for logger in [logging.root, *loggers]:
        consoles = [handler for handler in logger.handlers if isinstance(handler, PrefectConsoleHandler)]
        for handler in consoles:
            logger.removeHandler(handler)
        if consoles:
            logger.addHandler(file)

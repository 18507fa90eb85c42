"""A service that gives itself a title longer than its command line, as inference engines do."""

import json
import sys
import time
from pathlib import Path

import setproctitle

setproctitle.setproctitle("Engine::Core " + "x" * 4000)
Path(sys.argv[1]).write_text(json.dumps({}))
time.sleep(600)

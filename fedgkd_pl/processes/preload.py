"""Imported by multiprocessing's fork server alone: what the processes it forks will need.

The server watches its parent only after all imports; until then the kernel does, so that it does
not go on for seconds after its parent was killed.
"""

import atexit
import ctypes
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

from fedgkd_pl.processes.start import PRELOAD

PR_SET_PDEATHSIG = 1

_parent, *_modules = os.environ.get(PRELOAD, str(os.getppid())).split()
# The signal comes when the thread that started us ends, which waits until we serve.
_end_with_parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
_end_with_parent(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(_parent):  # it ended before that
    os._exit(1)
try:
    for _name in _modules:
        with suppress(ImportError):  # not installed; reported where it is needed
            import_module(_name)
finally:
    _end_with_parent(PR_SET_PDEATHSIG, 0)
atexit.register(os._exit, 0)  # at once: torch takes seconds to clean up

"""Imported by multiprocessing's fork server alone: what the processes it forks will need.

It looks after its parent when it serves, which is not before all is imported; until then the
kernel does, so that a server whose parent was killed does not go on for seconds.
"""

import atexit
import ctypes
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

from fedgkd_pl.processes.output import only_our_warnings
from fedgkd_pl.processes.start import PRELOAD

PR_SET_PDEATHSIG = 1

_parent, *_modules = os.environ.get(PRELOAD, str(os.getppid())).split()
# The signal comes when the thread that started us ends, which it does not before we serve.
_end_with_parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
_end_with_parent(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(_parent):  # it ended before that
    os._exit(1)
only_our_warnings()
try:
    for _name in _modules:
        with suppress(ImportError):  # of something that is not installed; who needs it will tell
            import_module(_name)
finally:
    _end_with_parent(PR_SET_PDEATHSIG, 0)
atexit.register(os._exit, 0)  # at once: to clear up what torch has loaded takes seconds

"""Ctrl-C in a notebook: a run ends in order, the process stays usable, the run goes on in it."""

from pathlib import Path

from tests.support.faults import warm_script

# A timer's SIGINT, as a notebook's stop button sends it.
SCRIPT = """
import logging, multiprocessing, os, signal, threading, warnings
from pathlib import Path
import fedgkd_pl
from fedgkd_pl import build
from lightning.pytorch import Callback

warnings.filterwarnings("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)

class Stop(Callback):
    def on_train_batch_start(self, trainer, server, batch, index):
        if trainer.current_epoch == 1:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            signal.pause()

def usable():
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert not multiprocessing.active_children()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        return
    raise SystemExit("Ctrl-C is not answered any more")

def make(name, workers):
    return build("smoke", name=name, **{"model.engine.workers": workers, "rounds": 3})

whole = make("whole", 1).fit().path
run = make("stopped", 2)
run.trainer.callbacks.insert(0, Stop())
try:
    run.fit()
except KeyboardInterrupt as stop:
    text = str(stop)
usable()
folder = Path("runs/stopped/version_0")
assert text.startswith("stopped by SIGINT"), text
assert text.endswith(f"; go on with: build(resume='{folder}').fit()"), text
assert build(resume=folder).fit().path == folder
for name in ("metrics.csv", "global.safetensors", "partition.json"):
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
usable()
"""


def test_a_run_that_is_interrupted_goes_on_in_the_same_process(tmp_path: Path) -> None:
    done = warm_script(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

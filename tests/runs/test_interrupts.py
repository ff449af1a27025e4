"""Ctrl-C in a notebook: a run ends in order, the process stays usable, the run goes on in it."""

from pathlib import Path

from tests.support.faults import warm_script

# A timer's SIGINT, as a notebook's stop button sends it, or what a callback raises itself.
SCRIPT = """
import logging, multiprocessing, os, signal, threading, warnings
from pathlib import Path
import fedgkd_pl
from fedgkd_pl import build
from lightning.pytorch import Callback

warnings.filterwarnings("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)

class Stop(Callback):
    def __init__(self, by_signal):
        self.by_signal = by_signal

    def on_train_batch_start(self, trainer, server, batch, index):
        if trainer.current_epoch == 1 and self.by_signal:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            signal.pause()
        elif trainer.current_epoch == 1:
            raise KeyboardInterrupt

def usable():
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert not multiprocessing.active_children()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        return
    raise SystemExit("Ctrl-C is not answered any more")

def same(one, other):
    for name in ("metrics.csv", "global.safetensors", "partition.json"):
        assert (Path(one) / name).read_bytes() == (Path(other) / name).read_bytes(), name

def make(name, workers):
    return build("smoke", name=name, **{"model.engine.workers": workers, "rounds": 3})

whole = make("whole", 1).fit().path
for by_signal, workers in ((True, 2), (False, 1)):
    run = make(f"stopped{workers}", workers)
    run.trainer.callbacks.insert(0, Stop(by_signal))
    try:
        run.fit()
    except KeyboardInterrupt as stop:
        text = str(stop)
    print(text)
    usable()
    folder = f"runs/stopped{workers}/version_0"
    assert text.endswith(f"; go on with: build(resume='{folder}').fit()"), text
    assert build(resume=folder).fit().path == Path(folder)
    same(folder, whole)
    usable()
"""


def test_a_run_that_is_interrupted_goes_on_in_the_same_process(tmp_path: Path) -> None:
    done = warm_script(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped by SIGINT; go on" in done.stdout and "interrupted; go on" in done.stdout

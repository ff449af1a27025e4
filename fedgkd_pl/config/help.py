"""The short help of ``fit`` and its like: the flags that people look for, without torch."""

import re
from pathlib import Path

TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
COMMON = tuple(re.findall(r"^  --([\w.]+)", TEXT, re.MULTILINE))


def short_help(command: str) -> str:
    """The flags that most runs need."""
    usage, text = "--config FILE [--KEY VALUE ...]", TEXT
    if command != "fit":
        usage = "RUN [--last | --best | --ckpt_path FILE] [--KEY VALUE ...]"
        text = re.sub(r"  --\w+ .*  fit: .*\n", "", text)
    return text.replace("  fit: ", "  ").format(command=command, usage=usage).rstrip()

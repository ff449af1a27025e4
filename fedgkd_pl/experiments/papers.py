"""The table of PAPERS.md, from what the methods' classes say: ``make papers``."""

import re
import sys
from pathlib import Path

from fedgkd_pl.methods import discover
from fedgkd_pl.settings.files import methods

HEADER = "| Method | Paper | Class | Config (CIFAR-10; digits) |\n|---|---|---|---|\n"


def method_rows() -> dict[str, str]:
    """A row of the table for every method that has a config, by the name of its class."""
    configs = methods()
    rows = {}
    for info in discover().values():
        if info.title in configs:
            file = Path(configs[info.title]).name
            where = f"`methods/{info.module.rpartition('.')[2]}.py` `{info.name}`"
            ours = f"`cifar10_{file}`; `digits/{file}`"
            rows[info.name] = f"| {info.title} | {info.citation} | {where} | {ours} |"
    return rows


def write_papers(file: Path) -> None:
    """Puts the table into a page, instead of the one that it has."""
    table = HEADER + "".join(f"{row}\n" for row in method_rows().values())
    text = file.read_text(encoding="utf-8")
    pattern = re.escape(HEADER) + r"(\|.*\n)*"
    file.write_text(re.sub(pattern, lambda _: table, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    write_papers(Path(sys.argv[1]))

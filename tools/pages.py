"""``make pages``: writes the tables of methods in ``docs/methods`` and PAPERS.md from the code.

Every file of a method has a page of its name, written by hand but for the block below its title;
``index.md`` and PAPERS.md have a table each::

    <!-- code: head -->
    …
    <!-- end -->

For a method without a page, one is begun that has all sections and nothing in them.
"""

import re
import sys
from pathlib import Path

import fedgkd_pl
from fedgkd_pl.config.request import folder, methods
from fedgkd_pl.experiments.paper import numbers, paper_rows
from fedgkd_pl.methods import MethodInfo, discover

PLACE = "docs/methods"
BLOCK = re.compile(r"<!-- code: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
TRAVELS = "| method | down | up | the server keeps | a client keeps |\n|---|---|---|---|---|\n"
SECTIONS = ("The equation", "What travels", "Differences and published errors", "Results")
TASKS = {
    "classes": "classes",
    "dense": "a class per pixel",
    "labels": "several labels a sample",
    "values": "numbers",
}


def pages() -> dict[str, list[MethodInfo]]:
    """The methods of every page, by its name: those of one file that have a config."""
    found: dict[str, list[MethodInfo]] = {}
    for info in discover().values():
        if info.title in methods():
            found.setdefault(info.module.rpartition(".")[2], []).append(info)
    return found


def generate(top: Path) -> dict[Path, str]:
    """What the pages should be; what is written by hand stays as it is."""
    files, rows = {}, {}
    for stem, infos in pages().items():
        file = top / PLACE / f"{stem}.md"
        text = file.read_text(encoding="utf-8") if file.exists() else begun(infos)
        files[file] = _filled(text, "".join(map(head, infos)))
        rows |= {info.title: index_row(info, stem) for info in infos}
    index, papers = top / PLACE / "index.md", top / "PAPERS.md"
    order = [info for info in discover().values() if info.title in rows]
    table = INDEX + "".join(rows[info.title] for info in order)
    files[index] = _filled(index.read_text(encoding="utf-8"), table)
    table = PAPERS + "".join(map(papers_row, order))
    files[papers] = _filled(papers.read_text(encoding="utf-8"), table)
    return files


def _filled(text: str, made: str) -> str:
    return BLOCK.sub(lambda block: f"<!-- code: {block[1]} -->\n{made}<!-- end -->", text)


def begun(infos: list[MethodInfo]) -> str:
    """A page with all sections, whose words are still to be written."""
    title = ", ".join(info.title for info in infos)
    parts = [f"# {title}", "<!-- code: head -->\n<!-- end -->"]
    for section in SECTIONS:
        parts.append(f"## {section}")
        if section == "What travels":
            parts.append(TRAVELS + "\n".join(f"| {info.title} | | | | |" for info in infos))
    return "\n\n".join(parts) + "\n"


def head(info: MethodInfo) -> str:
    """The class and the config of a method, what it learns, and the FedGKD paper's numbers."""
    module, config = f"methods/{info.module.rpartition('.')[2]}.py", methods()[info.title]
    cls = getattr(fedgkd_pl, info.name)
    learns = ", ".join(TASKS[task] for task in cls.tasks)
    net = "a net or a LightningModule" if cls.takes_modules else "a net"
    text = (
        f"- `{info.name}`: [source](../../fedgkd_pl/{module}), [config](../../configs/{config}). "
        f"Takes {net}; learns {learns}.\n"
    )
    found = [
        "{:.2f} ± {:.2f} at α={}".format(*numbers(row), row["alpha"])
        for row in paper_rows()
        if (row["table"], row["dataset"], row["method"]) == ("overview", "CIFAR-10", info.title)
    ]
    return text + (f"  The FedGKD paper's CIFAR-10: {', '.join(found)}.\n" if found else "")


INDEX = "| method | what it adds |\n|---|---|\n"
PAPERS = "| Method | Paper | Class | Config (CIFAR-10; digits) |\n|---|---|---|---|\n"


def index_row(info: MethodInfo, stem: str) -> str:
    """A method's row of the index, with the first line of its config."""
    header = (folder() / methods()[info.title]).read_text(encoding="utf-8").splitlines()[0]
    adds = re.sub(r"^# [^:]*: | \([^()]*\)$", "", header)
    return f"| [{info.title}]({stem}.md) | {adds} |\n"


def papers_row(info: MethodInfo) -> str:
    """A method's row of PAPERS.md."""
    file, stem = Path(methods()[info.title]).name, info.module.rpartition(".")[2]
    where = f"{PLACE}/{stem}.md#differences-and-published-errors"
    ours = f"`methods/{stem}.py` `{info.name}` | `cifar10_{file}`; `digits/{file}`"
    return f"| [{info.title}]({where}) | {info.citation} | {ours} |\n"


def main(top: Path) -> int:
    """Writes the pages that differ."""
    for file, text in generate(top).items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path()))

"""``make pages``: what the pages of ``docs/methods`` have from the code.

A method has a page of the name of its config. Blocks between comments are written here, and a test
fails where one differs; the rest is written by hand::

    <!-- code: settings -->
    …
    <!-- end -->

The word is one of :data:`KINDS`; on ``index.md`` it is ``methods``. For a method without a page,
one is begun that has all sections and blocks and nothing else.
"""

import ast
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedgkd_pl.experiments.paper import numbers, paper_rows
from fedgkd_pl.experiments.programs import Page, all_pages, as_python, is_class, program
from fedgkd_pl.methods import discover
from fedgkd_pl.settings.files import METHODS, folder
from fedgkd_pl.settings.signatures import Argument, class_value, own_arguments

PLACE = "docs/methods"
BLOCK = re.compile(r"<!-- code: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
TRAVELS = "What travels and what is kept"
# The sections of every page in their order, each with the block that it begins with.
SECTIONS = {
    "When to use it": "",
    "The equation": "",
    "The algorithm, line by line": "",
    TRAVELS: "",
    "Settings": "settings",
    "Metrics": "",
    "Differences from the paper and from published code": "",
    "Results": "paper",
    "Run it": "run",
}
TASKS = {
    "classes": "classes",
    "dense": "a class per pixel",
    "labels": "several labels a sample",
    "values": "numbers",
}
KEPT = "| down | up | the server keeps | a client keeps |\n|---|---|---|---|\n"


def generate(top: Path) -> dict[Path, str]:
    """What the pages should be; what is written by hand stays as it is."""
    files = {}
    for page in all_pages():
        file = top / PLACE / f"{page.stem}.md"
        text = file.read_text(encoding="utf-8") if file.exists() else begun(page)
        files[file] = BLOCK.sub(lambda block, page=page: _block(block[1], page), text)  # type: ignore[misc]
    index = top / PLACE / "index.md"
    rows = [index_row(page, files[top / PLACE / f"{page.stem}.md"]) for page in all_pages()]
    table = "".join(f"{row}\n" for row in [*INDEX, *rows])
    written = f"<!-- code: methods -->\n{table}<!-- end -->"
    files[index] = BLOCK.sub(lambda _: written, index.read_text(encoding="utf-8"))
    return files


def begun(page: Page) -> str:
    """A page with all sections, whose words are still to be written."""
    parts = [f"# {page.info.title}", "<!-- code: head -->\n<!-- end -->"]
    for section, block in SECTIONS.items():
        parts += [f"## {section}"]
        parts += [f"{KEPT}|  |  |  |  |"] if section == TRAVELS else []
        parts += [f"<!-- code: {block} -->\n<!-- end -->"] if block else []
    return "\n\n".join(parts) + "\n"


def _block(kind: str, page: Page) -> str:
    return f"<!-- code: {kind} -->\n{KINDS[kind](page)}<!-- end -->"


def head(page: Page) -> str:
    """Who wrote the paper, where class and config are, and what can be learned."""
    module = f"methods/{page.info.module.rpartition('.')[2]}.py"
    config = f"configs/{METHODS}/{page.stem}.yaml"
    tasks = class_value(page.path, "tasks") or TASKS
    modules = "no " if class_value(page.path, "takes_modules") is False else "a "
    return (
        f"*{page.info.citation}* · `{page.info.name}` in [{module}](../../fedgkd_pl/{module}) · "
        f"[{config}](../../{config})\n\n"
        f"Learns {', '.join(TASKS[task] for task in tasks)}; takes {modules}"
        "[LightningModule](../modules.md) in place of a net.\n"
    )


def settings(page: Page) -> str:
    """A row for every setting of a method's own, and for others that its config sets."""
    own, rest = own_arguments(page.path)
    config, tuned = page.configured(), page.tuned()
    set_here = dict.fromkeys([*config, *(key for each in tuned.values() for key in each)])
    more = [key for key in set_here if key.partition(".")[0] not in own and key != "net"]
    known = own | {key: _inherited(key, rest) for key in more}
    lines = ["| setting | default | in the configs | meaning |", "|---|---|---|---|"]
    for name, argument in known.items():
        values = _in_configs(name, config, tuned)
        lines.append(f"| `{name}` | {_default(argument)} | {values} | {_markdown(argument.text)} |")
    text = "\n".join(lines) + "\n" if known else "None of its own.\n"
    if rest:
        above = next(each for each in all_pages() if each.info.name == rest)
        where = f"[{above.info.title}]({above.stem}.md#settings)"
        text += f"\nAll other settings are those of {where}.\n"
    return text


def _inherited(key: str, rest: str) -> Argument:
    """A setting that a config gives and the class itself does not have."""
    if key.startswith("net."):
        path, name = "fedgkd_pl.models.resnet.ResNet", key.removeprefix("net.")
    else:
        path, name = f"{discover()[rest].module}.{rest}", key
    return own_arguments(path)[0][name]


def _in_configs(
    name: str, config: Mapping[str, Any], tuned: Mapping[str, Mapping[str, Any]]
) -> str:
    """The value of a method's YAML, and those of single protocols."""
    parts = [f"`{_text(config[name])}`"] if name in config else []
    protocols: dict[str, list[str]] = {}
    for protocol, values in tuned.items():
        for key, value in values.items():
            if key == name or key.startswith(f"{name}."):
                part = key.removeprefix(name).removeprefix(".")
                text = f"{part}={_text(value)}" if part else _text(value)
                protocols.setdefault(text, []).append(protocol)
    parts += [f"`{value}` on {', '.join(names)}" for value, names in protocols.items()]
    return "; ".join(parts)


def _default(argument: Argument) -> str:
    if argument.default is None:
        return "required"
    try:
        return f"`{_text(ast.literal_eval(argument.default))}`"
    except ValueError:  # an expression
        made = argument.default
        text = ast.unparse(made.body if isinstance(made, ast.Lambda) else made)
        return f"`{text.replace('torch.optim.', '').replace('params, ', '')}`"


def _text(value: Any) -> str:
    """As YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if is_class(value):
        return as_python(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _markdown(text: str) -> str:
    return re.sub(r":class:`[~.\w]*?(\w+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def paper(page: Page) -> str:
    """The numbers of the FedGKD paper, no table: accuracies stand in tables of ``results``."""
    found = [
        (row["alpha"], *numbers(row))
        for row in paper_rows()
        if row["table"] == "overview" and row["dataset"] == "CIFAR-10"
        if row["method"] == page.info.title
    ]
    if not found:
        return "The FedGKD paper has no numbers of this method.\n"
    cells = [f"{mean:.2f} ± {std:.2f} at α={alpha}" for alpha, mean, std in found]
    return (
        "The FedGKD paper's Table 3, CIFAR-10, best test accuracy of 100 rounds in %, three "
        f"trials: {', '.join(cells)}.\n"
    )


def run(page: Page) -> str:
    """The commands, and the digits in Python."""
    title, both = page.info.title, f"FedAvg,{page.info.title}"
    only = title if title == "FedAvg" else both
    commands = [
        f"fedgkd-pl fit --config digits/{page.stem}.yaml     # scikit-learn's digits, 30 rounds",
        f"fedgkd-pl fit --config cifar10_{page.stem}.yaml    # the FedGKD paper's CIFAR-10, α=0.1",
        f"fedgkd-pl compare studies/digits.yaml --only method={only}",
    ]
    lines = "\n".join(commands)
    return f"```sh\n{lines}\n```\n\n```python\n{program(page)}```\n"


INDEX = (
    "| method | paper | what it adds | down | up | a client keeps |",
    "|---|---|---|---|---|---|",
)


def index_row(page: Page, text: str) -> str:
    """A method's row of the index: from its class, its config and the table of its page."""
    down, up, _, client = kept(text) or ("", "", "", "")
    header = (folder() / METHODS / f"{page.stem}.yaml").read_text(encoding="utf-8").splitlines()[0]
    adds = re.sub(r"^# [^:]*: | \([^()]*\)$", "", header)
    cells = (f"[{page.info.title}]({page.stem}.md)", page.info.citation, adds, down, up, client)
    return f"| {' | '.join(cells)} |"


def kept(text: str) -> tuple[str, ...] | None:
    """The four cells of a page's table of what travels and what is kept; None without one."""
    _, found, rest = text.partition(KEPT)
    if not found:
        return None
    cells = re.split(r"(?<!\\)\|", rest.partition("\n")[0])
    return tuple(cell.strip() for cell in cells[1:-1])


KINDS: dict[str, Callable[[Page], str]] = {
    "head": head,
    "settings": settings,
    "paper": paper,
    "run": run,
}


def main(top: Path) -> int:
    """Writes the pages that differ."""
    for file, text in generate(top).items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path()))

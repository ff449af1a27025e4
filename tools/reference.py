"""``make reference``: the pages of docs/reference that say what the code takes, written from it.

Classes are read as source and commands as parsers, so nothing here imports torch. A test compares
the pages with what this module would write, and the settings with what a config really may have.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from fedgkd_pl.cli.commands import COMMANDS
from fedgkd_pl.cli.flags import Parser
from fedgkd_pl.cli.predict import add_flags
from fedgkd_pl.settings.files import available
from fedgkd_pl.settings.help import OF_FIT, OF_RUN, short_help

from tools.classes import PAGES, REPO, Group, choices, docstring, members
from tools.signatures import Setting, settings

FOLDER = "docs/reference"
NOTE = "<!-- Written by `make reference` from the code: change that instead. -->\n"
# What every config has at its top, and who reads it.
TOP = {
    "name": ("`fedgkd`", "the run is written to `<output_dir>/<name>/version_k`"),
    "output_dir": ("`runs`", "where runs are kept"),
    "rounds": ("`100`", "communication rounds; the Trainer's `max_epochs` follows it"),
    "seed_everything": ("`0`", "seed of initial weights, partition, cohorts and clients"),
    "trainer": (
        "",
        "arguments of Lightning's Trainer: "
        "[what each does per round](../lightning.md#trainer-flags)",
    ),
    "model": ("", "a method and its settings: [methods](methods.md)"),
    "data": ("", "a dataset and its settings: [data](data.md)"),
    "checkpoint": (
        "",
        "arguments of Lightning's `ModelCheckpoint` that keeps the best round; `monitor` is "
        "`val/acc` (without accuracies `val/loss`), `mode` is `max`",
    ),
    "ckpt_path": ("`null`", "a checkpoint to start from: a file, a run's folder, or `last`"),
    "weights_only": ("`null`", "of Lightning's `fit`; checkpoints are read as data in any case"),
    "profile": ("`false`", "tell where a round's time went, and write `profile.csv`"),
    "quiet": ("`false`", "show no progress"),
}
ABOUT_CONFIGS = """\
A config is a YAML file, and every key is a flag of the same name: `gamma` of the `init_args` of
`model` is `--model.gamma`. [An explained config](../config.md) shows one whole, and what wins over
what."""
ABOUT_CLASSES = """\
A class is named by its short name or its `class_path`; its arguments are `init_args`. The settings
of every class: [methods and losses](methods.md), [data, partitions and cohorts](data.md),
[nets](nets.md), [engines](engines.md), [callbacks](callbacks.md)."""
ABOUT_SHIPPED = """\
`fedgkd-pl configs` lists them. `<protocol>_<method>.yaml`, such as `cifar10_moon.yaml`, is short
for `--config protocols/<protocol>.yaml --config methods/<method>.yaml`; `tuned.yaml` has what a
method takes on one protocol only."""
EXIT_CODES = {
    "0": "done",
    "2": "bad input: one line with the key and the fix, nothing written",
    "3": "the run failed: too many failed rounds, or an error (`error.txt` in the run's folder)",
    "4": "storage: disk full, not writable, or no sound checkpoint left",
    "129": "stopped by a closed terminal (SIGHUP)",
    "130": "stopped by Ctrl-C (SIGINT)",
    "143": "stopped by SIGTERM",
}


def write_page(title: str, groups: Sequence[Group]) -> str:
    """A page of classes and their settings."""
    lines = [f"# {title}", "", NOTE]
    shown: set[str] = set()
    for group in groups:
        lines += [f"## {group.title}", ""] if len(groups) > 1 else []
        lines += [f"Key of a config: `{key}`." for key in [group.key.replace(", ", "`, `")]]
        lines += [group.text] if group.text else []
        lines += [""]
        for name, path in members(group).items():
            lines += _class_lines(name, path, shown, "###" if len(groups) > 1 else "##")
            shown.add(name)
    return "\n".join(lines).rstrip() + "\n"


def _class_lines(name: str, path: str, shown: set[str], level: str) -> Iterator[str]:
    summary = re.split(r"\n\n|\nArgs:", docstring(path) or "")[0]
    yield from (f"{level} {name}", "", markdown(summary), "")
    taken = settings(path)
    above = [one.owner for one in taken if one.owner in shown and one.owner != name]
    own = [one for one in taken if one.owner not in above and one.name not in ("params", "self")]
    if own:
        yield from table(
            ["setting", "type", "default", "meaning"], (_row(one, path) for one in own)
        )
        yield ""
    if above:
        links = [f"[{owner}](#{owner.lower()})" for owner in dict.fromkeys(above)]
        yield from (f"And those of {', '.join(links)}.", "")
    elif not own:
        yield from ("No settings.", "")


def _row(one: Setting, path: str) -> list[str]:
    kind = choices(one.kind, path) if one.kind.isidentifier() else one.kind
    default = "must be given" if one.default is None else f"`{plain(one.default)}`"
    return [
        f"`{one.name}`",
        f"`{plain(kind)}`" if kind else "",
        default,
        markdown(one.text),
    ]


def plain(code: str) -> str:
    """Code as a config's reader would write it."""
    code = re.sub(r"^lambda \w+: (?:torch\.optim\.)?(\w+)\(params, ?", r"\1(", code)
    code = code.replace("OptimizerCallable", "Optimizer").replace(
        "LRSchedulerCallable", "LRScheduler"
    )
    code = re.sub(r"Literal\[([^\]]*)\]", lambda found: found[1].replace(", ", " | "), code)
    return re.sub(r"\bnn\.Module\b", "Module", code).replace(" | ", " or ").replace("'", "")


def markdown(text: str) -> str:
    """A docstring's text: its marks of reStructuredText become Markdown's."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def config_page() -> str:
    """What stands at the top of a config, and the configs that come with the package."""
    rows = [[f"`{key}`", default, text] for key, (default, text) in TOP.items()]
    shipped = [[f"`{name}`", text] for name, text in available().items()]
    lines = [
        *("# Configs", "", NOTE, ABOUT_CONFIGS, ""),
        *(*table(["key", "default", "meaning"], rows), "", ABOUT_CLASSES, ""),
        *("## Configs that come with the package", "", ABOUT_SHIPPED, ""),
        *(*table(["config", "what it is"], shipped), ""),
    ]
    return "\n".join(lines)


def cli_page() -> str:
    """Every command with its flags, and the exit codes."""
    lines = [
        *("# Commands and exit codes", "", NOTE),
        "Every command explains itself with `--help`; `--debug` shows the traceback of an error.",
        "",
        *table(
            ["command", "what it does"], ([f"[`{n}`](#{n})", c.help] for n, c in COMMANDS.items())
        ),
        "",
        "## Exit codes",
        "",
        *table(["code", "meaning"], ([f"`{code}`", text] for code, text in EXIT_CODES.items())),
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"## {name}", ""]
        if name == "figure":
            lines += ["A figure of the paper from finished runs, as SVG, PNG or PDF.", ""]
            kinds = [line.split(None, 1) for line in command.parser["description"].splitlines()]
            lines += [*table(["kind", "figure"], ([f"`{k}`", t] for k, t in kinds)), ""]
        else:
            text = command.parser.get("description") or command.help
            lines += [f"{text[0].upper()}{text[1:]}".rstrip(".") + ".", ""]
        add = add_flags if name == "predict" else command.add
        if add is not None:
            parser = Parser(prog=name)
            add(parser)
            lines += _flags(parser)
        elif name == "fit":
            lines += ["```text", short_help(name).strip(), "```", ""]
        else:
            usage = OF_FIT if name == "partition" else OF_RUN
            lines += [f"`fedgkd-pl {name} {usage}`; the flags are those of [fit](#fit).", ""]
    return "\n".join(lines).rstrip() + "\n"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        if "--help" not in action.option_strings:
            words = action.option_strings or [action.dest.upper()]
            value = action.metavar or (
                "" if action.nargs == 0 or not action.option_strings else "…"
            )
            choices = " (" + ", ".join(map(str, action.choices)) + ")" if action.choices else ""
            rows.append(
                [f"`{', '.join(words)}{f' {value}' if value else ''}`", f"{action.help}{choices}"]
            )
    if rows:
        yield from table(["argument", "meaning"], rows)
        yield ""


def generate() -> dict[str, str]:
    """The text of every page, by its path in the repository."""
    pages = {f"{FOLDER}/{name}.md": write_page(*page) for name, page in PAGES.items()}
    return {f"{FOLDER}/cli.md": cli_page(), f"{FOLDER}/config.md": config_page(), **pages}


def main() -> int:
    """Writes the pages that differ."""
    for name, text in generate().items():
        file = REPO / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

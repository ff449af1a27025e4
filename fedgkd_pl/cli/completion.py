"""``fedgkd-pl completion``: scripts that complete commands, flags, configs and file names.

All names are in the script: pressing TAB starts no Python.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgkd_pl.cli.commands import COMMANDS, Command
from fedgkd_pl.cli.flags import Parser
from fedgkd_pl.methods import discover
from fedgkd_pl.settings.files import TUNED, available, pairs
from fedgkd_pl.settings.help import long_help

STUDIES = "studies/"
OF_FIT = ("--name", "--print_config", "--profile", "--resume")


@dataclass
class Words:
    """What may follow a command."""

    help: str
    first: list[str] = field(default_factory=list)  # what it begins with, beside file names
    flags: dict[str, list[str]] = field(default_factory=dict)  # each with values that are known


def script(shell: str) -> str:
    """The script for a shell."""
    commands = {name: _words(name, command) for name, command in COMMANDS.items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _words(name: str, command: Command) -> Words:
    words = Words(command.help)
    if command.add is None or command.takes_settings:
        shown = "fit" if command.takes_settings else name
        flags = re.findall(r"^  (--[\w.]+)", long_help(shown), re.MULTILINE)
        flags = [flag for flag in flags if not (command.takes_settings and flag in OF_FIT)]
        words.flags = {flag: _values(flag) for flag in [*flags, "--data", "--model.net"]}
    if command.add is not None:
        parser = Parser(add_help=True)
        command.add(parser)
        for action in parser._actions:
            choices = [*map(str, action.choices or ())]
            if isinstance(action, argparse._StoreAction) and not action.option_strings:
                words.first = words.first or choices
            for flag in action.option_strings:
                if flag.startswith("--"):
                    words.flags[flag] = choices
    if name == "compare":
        words.first = [config for config in available() if config.startswith(STUDIES)]
    words.flags |= {"--help": ["all"] if command.add is None else []}
    return words


def _values(flag: str) -> list[str]:
    if flag == "--config":
        ours = [name for name in available() if name != TUNED and not name.startswith(STUDIES)]
        return [*ours, *(f"{pair}.yaml" for pair in pairs())]
    known = {"--model": [*discover()], "--model.engine": ["local", "ray", "flower"]}
    return known.get(flag, [])


def _cases(commands: Mapping[str, Words], many: str) -> str:
    """The ``case`` of bash and zsh that sets ``found``; ``many`` makes a list of words."""
    values = {f: v for words in commands.values() for f, v in words.flags.items() if v}
    lines = ['    case "$command $before" in']
    for name, words in commands.items():
        for flag, known in words.flags.items():
            if known and known != values[flag]:  # another command's flag of this name
                lines.append(f"        '{name} {flag}') found={many % ' '.join(known)} ;;")
    lines += [f"        *' {f}') found={many % ' '.join(v)} ;;" for f, v in values.items()]
    lines += ['        *) case "$command $word" in']
    for name, words in commands.items():
        lines.append(f"            '{name} -'*) found={many % ' '.join(words.flags)} ;;")
        if words.first:
            lines.append(f"            '{name} '*) found={many % ' '.join(words.first)} ;;")
    return "\n".join([*lines, "        esac ;;", "    esac"])


def _bash(commands: Mapping[str, Words]) -> str:
    return f"""\
# In ~/.bashrc: eval "$(fedgkd-pl completion bash)"
_fedgkd_pl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
    local command=${{COMP_WORDS[1]}} found= file
    if [[ $word == = ]]; then
        word=  # bash cuts --flag=value into three words
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    if ((COMP_CWORD == 1)); then
        found='{" ".join([*commands, "--help", "--version"])}'
    else
{_indented(_cases(commands, "'%s'"))}
    fi
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    if [[ $before == --config ]]; then
        compopt -o filenames 2>/dev/null  # quotes them; not in bash 3
        while IFS= read -r file; do
            COMPREPLY+=("$file")
        done < <(compgen -f -X '!*.y*ml' -- "$word")
    fi
}}
complete -o default -F _fedgkd_pl fedgkd-pl
"""


def _zsh(commands: Mapping[str, Words]) -> str:
    described = " ".join(f"'{name}:{_plain(words.help)}'" for name, words in commands.items())
    return f"""\
#compdef fedgkd-pl
# In ~/.zshrc, after compinit: eval "$(fedgkd-pl completion zsh)"
_fedgkd_pl() {{
    local word=${{words[CURRENT]}} before=${{words[CURRENT - 1]}} command=${{words[2]}}
    local -a found
    if ((CURRENT == 2)); then
        found=({described})
        _describe command found
        return
    fi
    if [[ $word == --*=* ]]; then
        before=${{word%%=*}}
        compset -P 1 '*='
        word=${{word#*=}}
    fi
{_cases(commands, "(%s)")}
    compadd -a found
    [[ $word == -* ]] || _files
}}
compdef _fedgkd_pl fedgkd-pl
"""


def _fish(commands: Mapping[str, Words]) -> str:
    lines = ["# In ~/.config/fish/config.fish: fedgkd-pl completion fish | source"]
    complete = "complete -c fedgkd-pl"
    for name, words in commands.items():
        text = _plain(words.help)
        lines.append(f"{complete} -f -n __fish_use_subcommand -a {name} -d '{text}'")
    for name, words in commands.items():
        of = f"{complete} -n '__fish_seen_subcommand_from {name}'"
        for flag, known in words.flags.items():
            values = f" -x -a '{' '.join(known)}'" if known else ""
            if flag == "--config":
                values = values.replace("-x", "-r")  # files, too
            lines.append(f"{of} -l {flag[2:]}{values}")
        if words.first:
            lines.append(f"{of} -a '{' '.join(words.first)}'")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A text that may stand in single quotes, and in zsh after a colon."""
    return text.replace("'", "").replace(":", ",")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())

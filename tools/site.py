"""What mkdocs.yml hooks in: pages from outside of docs/, the API's pages, navigation, versions.

The pages of docs/ link to files beside that folder, as a reader of the repository needs it. On the
site such a link leads to the page that the file becomes (:data:`OUTSIDE`), or to a copy of it.
"""

import ast
import os
import re
from collections.abc import Iterator
from html import unescape
from posixpath import normpath, relpath
from typing import Any

from fedgkd_pl.methods import discover
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import REPO, equations

OUTSIDE = {
    "PAPERS.md": "papers.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "results/README.md": "results.md",
    "benchmarks/RESULTS.md": "benchmarks/speed.md",
    "benchmarks/DIGITS.md": "benchmarks/digits.md",
}
API = {  # title of a page, and the packages whose public names are on it
    "Methods": ("methods",),
    "Data": ("data",),
    "Nets": ("models",),
    "Rounds, clients and losses": ("federation",),
    "Engines": ("engines",),
    "Callbacks": ("callbacks", "runs"),
    "Experiments and runs": ("config", "settings", "experiments", "storage"),
}
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FOLDER = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)\)")
CODE = re.compile(r"<pre\b.*?</pre>|(?<=<code>)([^<]+)(?=</code>)", re.DOTALL)
WORD = re.compile(r"\S*[^\w\s]\S*")
LONGEST = 40  # letters of code that fit into a line of 400 pixels
MARK = re.compile(r"<!-- (?:(?:results|code): .*?|end) -->\n?", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the two parts of the navigation that are lists of what is there.

    The site of ``make docs-version`` gets the selector of versions. That of ``make docs`` has no
    versions beside it, and would ask for their list in vain.
    """
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest", "alias": True}
    parts: dict[str, list[Any]] = {"methods/": list(_methods()), "api/": list(_api())}
    config.nav = [part for part in (_filled(part, parts) for part in config.nav or []) if part]
    return config


def _filled(part: Any, parts: dict[str, list[Any]]) -> Any:
    if isinstance(part, list):
        return [found for found in (_filled(each, parts) for each in part) if found]
    if isinstance(part, dict):
        found = {title: _filled(each, parts) for title, each in part.items()}
        return {title: each for title, each in found.items() if each}
    return parts.get(part, part)


def _methods() -> Iterator[str]:
    """The pages of docs/methods, its index first."""
    names = [file.name for file in (REPO / "docs" / "methods").glob("*.md")]
    yield from (f"methods/{name}" for name in sorted(names, key=lambda n: (n != "index.md", n)))


def _api() -> Iterator[dict[str, str]]:
    yield from ({title: _place(title)} for title in API)


def _place(title: str) -> str:
    return f"api/{title.split(',')[0].split()[0].lower()}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the API's pages, those from outside, and every other file that a page links to."""
    for title, packages in API.items():
        text = f"# {title}\n\n" + "".join(f"::: {path}\n\n" for path in _names(packages))
        files.append(File.generated(config, _place(title), content=text))
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(REPO / source)))
    known = {*OUTSIDE, "README.md"}  # the site has a first page of its own
    for file in list(files.documentation_pages()):
        if file.abs_src_path is not None and not file.src_uri.startswith("api/"):
            for target in _targets(_source(file.src_uri), file.content_string):
                if target not in known and (REPO / target).is_file():
                    known.add(target)
                    copy = File.generated(config, _site(target), abs_src_path=str(REPO / target))
                    files.append(copy)
    return files


def _names(packages: tuple[str, ...]) -> list[str]:
    """The full names of the public classes and functions of some packages."""
    stub = ast.parse((REPO / "fedgkd_pl" / "__init__.pyi").read_text(encoding="utf-8"))
    found = {
        alias.name: f"fedgkd_pl.{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found |= {name: f"{info.module}.{name}" for name, info in discover().items()}
    return [path for path in found.values() if path.split(".")[1] in packages]


def _source(place: str) -> str:
    """Where in the repository a page of the site comes from."""
    return {p: s for s, p in OUTSIDE.items()}.get(place, f"docs/{place}")


def _site(target: str) -> str:
    """Where on the site a file of the repository is."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return {**OUTSIDE, "README.md": "README.md"}.get(target, f"source/{target}")


def _targets(source: str, text: str) -> Iterator[str]:
    """The files outside of docs/ that a page links to."""
    for match in LINK.finditer(text):
        target = normpath(f"{source.rpartition('/')[0]}/{match[2]}").lstrip("/")
        if not target.startswith("docs/"):
            yield target


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links lead to where the site has what they mean; drops the marks of written blocks."""
    place = page.file.src_uri
    folder = _source(place).rpartition("/")[0]

    def moved(match: re.Match[str]) -> str:
        target = normpath(f"{folder}/{match[2]}").lstrip("/")
        if not (REPO / target).is_file():
            return match[0]
        return match[1] + relpath(_site(target), place.rpartition("/")[0] or ".") + match[3]

    def unlinked(match: re.Match[str]) -> str:
        return match[1] if (REPO / folder / match[2]).is_dir() else match[0]

    text = FOLDER.sub(unlinked, MARK.sub("", markdown))  # a folder has no page
    if place.startswith("methods/") and place != "methods/index.md":
        text = equations.of_blocks(text)
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), text)  # GitHub wants \|
    return LINK.sub(moved, text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drops the roles of docstrings, sets equations, keeps words of code whole."""
    html = equations.inline(html)
    html = re.sub(r":(?:class|meth|func|data|attr|mod):(?=<code>)", "", html)
    html = re.sub(r"(?<=<code>)~(?:\w+\.)*(?=\w+</code>)", "", html)
    return CODE.sub(lambda code: WORD.sub(_whole, code[0]) if code[1] else code[0], html)


def _whole(word: re.Match[str]) -> str:
    """A word that a browser would break at a hyphen, unless it is too long for a line."""
    short = len(unescape(word[0])) <= LONGEST
    return f'<span class="whole">{word[0]}</span>' if short else word[0]

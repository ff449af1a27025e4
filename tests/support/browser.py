"""A page as a headless Chromium shows it: it is asked by a script that is put into a copy."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM = CHROMIUM or shutil.which("google-chrome")
MISSING = "no Chromium on this machine: apt-get install chromium"
QUIET = "gpu sync quic background-networking component-update extensions".split()
CATCH = """<script>
const problems = [];
addEventListener("error", event => problems.push(event.message));
for (const name of ["error", "warn"]) console[name] = (...all) => problems.push(all.join(" "));
</script></head>"""
# Marks are what is drawn of the data: neither axes nor text, and not the pale bands.
ASK = """<script>
function parts(shape) {  // line and filling, as far as it has them
  const style = getComputedStyle(shape);
  return ["stroke", "fill"].filter(part => style[part] !== "none")
    .map(part => [style[part], style.opacity * style[part + "Opacity"]]);
}
function shapes(panel) {
  const axes = panel.querySelectorAll(":scope > g[id*='matplotlib.axis']");
  return [...panel.querySelectorAll("path, use, image")].filter(shape => {
    const box = shape.getBoundingClientRect();
    return ![...axes].some(axis => axis.contains(shape)) && !shape.closest("defs")
      && (box.width > 0 || box.height > 0)
      && parts(shape).some(([colour, alpha]) => colour !== text && alpha > 0.3);
  });
}
const probe = document.createElement("i");
probe.style.color = "var(--figure)";
document.body.append(probe);
const text = getComputedStyle(probe).color;
const figures = [...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  const panels = [...svg.querySelectorAll("g[id*='-axes_']")];
  const behind = [...svg.querySelectorAll("path")].filter(path => {
    const style = getComputedStyle(path), own = path.getBoundingClientRect();
    return style.fill !== "none" && style.fillOpacity > 0.5 && !path.closest("defs")
      && own.width > 0.95 * box.width && own.height > 0.95 * box.height;
  });
  return {
    name: figure.dataset.name,
    size: [box.width, box.height],
    buttons: figure.previousElementSibling.querySelectorAll("button").length,
    marks: panels.map(panel => shapes(panel).length),
    backgrounds: behind.length,
  };
});
const facts = {
  problems, figures,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  width: innerWidth,
  needed: document.documentElement.scrollWidth,
};
parent.postMessage(JSON.stringify(facts), "*");
</script></body>"""
# A window has at least 500 pixels, a frame has as many as it is given.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><pre></pre><script>
addEventListener("message", event => document.querySelector("pre").textContent = event.data);
</script><iframe src="page.html" style="width: {}px; height: 900px; border: 0"></iframe>"""


def look(page: Path, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page; the folder is for its own files."""
    folder.mkdir()
    text = page.read_text(encoding="utf-8").replace("</head>", CATCH, 1)
    (folder / "page.html").write_text(text.replace("</body>", ASK, 1), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width), encoding="utf-8")
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--no-first-run"),
            *(f"--disable-{name}" for name in QUIET),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *("--window-size=1600,1000", "--hide-scrollbars"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--virtual-time-budget=5000", "--dump-dom", (folder / "frame.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stderr
    facts: dict[str, Any] = json.loads(unescape(found[1]))
    return facts

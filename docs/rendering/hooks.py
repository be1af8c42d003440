"""What the site does beyond Markdown: pages that are made, formulas as MathML, the picture of the imports as SVG.

Nothing is fetched when a page is read: no script, no fonts from elsewhere.
"""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import docstrings  # noqa: F401 - roles.py finds it loaded: the path is put back after this file
from drawing import svg
from pages import made, menu

SPAN = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
MERMAID = re.compile(r"```mermaid\nflowchart TD\n(.*?)```", re.DOTALL)


def on_config(config: Any) -> Any:
    config["nav"] = menu()
    return config


def on_files(files: Files, config: Any) -> Files:
    for address, content in made().items():
        files.append(File.generated(config, address, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = markdown.replace("](../benchmarks/papers/", "](papers/").replace(
        "](../benchmarks/results/", "](results/"
    )
    markdown = markdown.replace("](../README.md)", "](index.md)")
    markdown = re.sub(r"\]\(\.\./(tutorials/\w+)\.ipynb\)", r"](\1.md)", markdown)
    return MERMAID.sub(lambda m: svg(m[1]), markdown)


def formula(match: re.Match[str]) -> str:
    shown = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]).strip(), display=shown))


def on_page_content(html: str, **_: Any) -> str:
    return SPAN.sub(formula, html)

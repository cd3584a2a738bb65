"""Format a page: its template with data, as one HTML text that needs no other file."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from common.files import atomic_write

PERMISSIONS = "{permissions}"  # in a template: what its content security policy lets a page load
# From its server, or while its run goes on a script beside it: the key is then in the content.
RULES = {"server": "connect-src 'self';", "nextSnapshot": "script-src-elem 'unsafe-inline' file:;"}
WEB_FOLDER = Path(__file__).parent / "web"
INCLUDE = re.compile(r"(?:/\*|<!--) ([\w/]+\.(?:html|css|js)) (?:\*/|-->)\n")
# The only forms that glass/page/web uses: named imports of files by their relative path, and
# exports of declarations whose binding never changes.
IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) (\$|\w+)", re.MULTILINE)


@dataclass(repr=False)
class FramedPage:
    """A page in a frame, which a notebook shows if it is the value of a cell."""

    html: str  # of the page
    address: str  # what is selected, as web/address.js reads it

    def _repr_html_(self) -> str:
        return (
            f'<iframe name="{escape(self.address)}" srcdoc="{escape(self.html)}" '
            f'style="width: 100%; height: 800px; border: 0"></iframe>'
        )


def write_html(path: Path, parts: Iterable[str]) -> Path:
    """Write the parts of a page atomically, and return its path; see `format_html`."""
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="\n") as f:
        f.writelines(parts)
    return path


def format_html(template: str, content: dict[str, Any], blobs: Sequence[str] = ()) -> Iterator[str]:
    """Yield the parts of a page: an HTML template of glass/page/web with its content.

    The content refers to the `blobs` by number.
    """
    permissions = " ".join(rule for key, rule in RULES.items() if content.get(key))
    head, foot = expand_template(template).split("<!-- data -->")
    yield head.replace(PERMISSIONS, permissions)
    yield f'<script type="application/json" id="data">{embed_json(content)}</script>\n'
    for blob in blobs:
        yield f'<script type="text/plain" class="blob">{blob}</script>\n'
    yield foot


def expand_template(name: str) -> str:
    """Return a file of glass/page/web with the files that it names in comments inserted."""
    if name.endswith(".js"):
        return bundle(WEB_FOLDER / name)
    text = (WEB_FOLDER / name).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda match: expand_template(match[1]), text)


def embed_json(value: object) -> str:
    """Return JSON in ASCII that cannot end or open an HTML element: < > & are escaped."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def bundle(entry: Path) -> str:
    """Return one script with an ES module and all that it imports; a browser loads none from disk.

    Each module becomes a function that is called once and returns its exports; modules stand in
    the order of their imports.
    """
    scripts: dict[Path, str] = {}
    _add_module(entry.resolve(), scripts)
    return '"use strict";\n' + "".join(scripts.values())


def _add_module(path: Path, scripts: dict[Path, str]) -> None:
    if path in scripts:
        return
    source = path.read_text(encoding="utf-8")
    bindings = []
    for names, address in IMPORT.findall(source):
        imported = (path.parent / address).resolve()
        _add_module(imported, scripts)
        if names:
            names = names.replace(" as ", ": ")
            bindings.append(f"const {{{names}}} = {_module_name(imported)};\n")
    exports = ", ".join(name for _, name in EXPORT.findall(source))
    body = EXPORT.sub(r"\1 \2", IMPORT.sub("", source))
    scripts[path] = (
        f"const {_module_name(path)} = (() => {{\n"
        f"{''.join(bindings)}{body}return {{ {exports} }};\n}})();\n"
    )


def _module_name(path: Path) -> str:
    return f"module_{path.parent.name}_{path.stem}"

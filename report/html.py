"""Write a page: its template with data, as one HTML file that works offline."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import atomic_write
from report.bundle import bundle

WEB_FOLDER = Path(__file__).parent / "web"
INCLUDE = re.compile(r"(?:/\*|<!--) (\w+\.(?:html|css|js)) (?:\*/|-->)\n")


def write_html(path: Path, template: str, content: dict[str, Any], blobs: Sequence[str]) -> Path:
    """Write a page atomically and return its path.

    `template` names an HTML file in report/web, and `content` is the page's data. The page has an
    element for each of the blobs, compressed data in base64; `content` refers to them by number.
    """
    head, foot = expand_template(template).split("<!-- data -->")
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="\n") as f:
        f.write(f'{head}<script type="application/json" id="data">{embed_json(content)}</script>\n')
        f.writelines(f'<script type="text/plain" class="blob">{blob}</script>\n' for blob in blobs)
        f.write(foot)
    return path


def expand_template(name: str) -> str:
    """Return a file of report/web with the files that it names in comments inserted.

    A JavaScript file is the entry of a bundle.
    """
    if name.endswith(".js"):
        return bundle(WEB_FOLDER / name)
    text = (WEB_FOLDER / name).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda match: expand_template(match[1]), text)


def embed_json(value: object) -> str:
    """Return JSON in ASCII that cannot end or open an HTML element: < > & are escaped."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)

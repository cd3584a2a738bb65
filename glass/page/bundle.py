"""Bundle the ES modules of a page into one script, because a browser loads none from disk.

Each module becomes a function that is called once and returns its exports; modules stand in the
order of their imports.
"""

import re
from pathlib import Path

# The only forms that glass/page/web uses: named imports of files by their relative path, and
# exports of declarations whose binding never changes.
IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) (\$|\w+)", re.MULTILINE)


def bundle(entry: Path) -> str:
    """Return one script that evaluates the module `entry` after all modules that it imports."""
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

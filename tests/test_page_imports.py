"""The folders of the page's JavaScript import only what lies below them."""

import graphlib
from pathlib import Path

import pytest

from glass.page.html import IMPORT, WEB_FOLDER

# What each folder may import. The modules in none of them are the entries and may import all.
ALLOWED = {
    "base": set(),
    "charts": {"base"},
    "engine": set(),
    "state": {"base", "engine"},
    "client": {"base", "engine", "state"},
    "views": {"base", "charts", "engine", "state", "client"},
    "patching": {"base", "charts", "engine", "state", "client", "views"},
    "sweep": {"base", "charts"},
}
MODULES = [path.relative_to(WEB_FOLDER) for path in WEB_FOLDER.rglob("*.js")]


def imported_modules(module: Path) -> list[Path]:
    path = WEB_FOLDER / module
    addresses = [address for _, address in IMPORT.findall(path.read_text(encoding="utf-8"))]
    return [(path.parent / address).resolve().relative_to(WEB_FOLDER) for address in addresses]


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_lies_below_it(folder):
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        if module.parts[0] == folder
        for imported in imported_modules(module)
        if imported.parts[0] not in ALLOWED[folder] | {folder}
    ]
    assert not wrong


def test_every_folder_is_in_the_table():
    assert {module.parts[0] for module in MODULES if len(module.parts) > 1} == ALLOWED.keys()


def test_modules_and_folders_import_each_other_in_no_circle():
    graphlib.TopologicalSorter({module: imported_modules(module) for module in MODULES}).prepare()
    graphlib.TopologicalSorter(ALLOWED).prepare()

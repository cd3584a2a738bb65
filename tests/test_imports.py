"""The folders and files of the repository import only what lies below them."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

# What each room may import: a folder or a file of the repository's root, or a folder of glass.
# The room `glass` has the files that are in none of its folders.
MODEL = {"model", "kernels", "config", "common"}
TRAINING = {"training", "variants", "generation", "data", "run"} | MODEL
HEADS = {"glass.heads.measure", "glass.heads.say"}
ALLOWED = {
    "common": set(),
    "config": {"common"},
    "kernels": set(),
    "model": MODEL,
    "generation": MODEL,
    "variants": MODEL,
    "run": {"config", "common"},
    "data": {"run", "config", "common"},
    "cli": {"run", "config", "common"},
    "training": TRAINING,
    "distributed": TRAINING,
    "interop": TRAINING,
    "glass.heads.measure": TRAINING,
    "glass.heads.say": {"glass.heads.measure", "run", "common"},
    "glass.page": HEADS | TRAINING,
    "glass": {"glass.page", "interop"} | HEADS | TRAINING,
    "glass.live": {"glass.page", "interop", "cli"} | HEADS | TRAINING,
    "studies": {"run", "config", "common"},
    "sweeps": {"glass.page", "studies", "cli"} | TRAINING,
}
UPWARD = {"model": ["generation"]}  # `GPT.generate` imports it when it is called
COMMANDS = {"train", "sample", "explore", "callback", "interop.__main__"}  # may import every room
IGNORED = {"tests", "benchmarks"}


def find_room(module: str) -> str | None:
    """Return the innermost room of a module, such as glass.page of glass.page.write."""
    rooms = [room for room in ALLOWED.keys() | COMMANDS if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def source_files(room: str) -> list[Path]:
    path = ROOT / room.replace(".", "/")
    files = [*path.rglob("*.py")] or [path.with_suffix(".py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return [file for module, file in modules.items() if find_room(module) == room]


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the room and the line of each import of our own, except those for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if room := find_room(name):
                yield room, node.lineno


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    upward = [
        (imported, f"{path.relative_to(ROOT)}:{line}")
        for path in source_files(room)
        for imported, line in imported_rooms(path)
        if imported not in ALLOWED[room] | {room}
    ]
    assert [imported for imported, _ in upward] == UPWARD.get(room, []), upward


def test_rooms_import_each_other_in_no_circle():
    below = {room: allowed - {room} for room, allowed in ALLOWED.items()}
    TopologicalSorter(below).prepare()  # otherwise raises CycleError


def test_every_file_is_in_a_room():
    files = {path.stem for path in ROOT.glob("*.py")}
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    rooms = {room.partition(".")[0] for room in ALLOWED.keys() | COMMANDS}
    assert files | folders == rooms | IGNORED

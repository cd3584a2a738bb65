"""The rooms of the repository import only what lies below them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# What each room may import; a room is a folder or a file of the repository's root.
MODEL = {"model", "generation", "kernels", "config", "common"}
TRAINING = {"training", "variants", "data", "cli"} | MODEL
ALLOWED = {
    "common": set(),
    "config": {"common"},
    "kernels": {"config", "common"},
    "generation": {"kernels", "config", "common"},
    "model": MODEL,
    "variants": MODEL,
    "data": {"config", "common"},
    "cli": {"config", "common"},
    "training": TRAINING,
    "distributed": TRAINING,
    "interop": TRAINING,
    "glass": {"interop"} | TRAINING,
    "studies": {"cli", "config", "common"},
    "sweeps": {"glass", "interop"} | TRAINING,
}
COMMANDS = {"train", "sample", "explore"}  # may import every room
IGNORED = {"tests", "benchmarks"}


def source_files(room: str) -> list[Path]:
    return (
        [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else [*(ROOT / room).rglob("*.py")]
    )


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
            room = name.partition(".")[0]
            if room in ALLOWED.keys() | COMMANDS:
                yield room, node.lineno


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in source_files(room)
        for imported, line in imported_rooms(path)
        if imported not in ALLOWED[room] | {room}
    ]
    assert not wrong


def test_every_file_is_in_a_room():
    files = {path.stem for path in ROOT.glob("*.py")}
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    assert files | folders == ALLOWED.keys() | COMMANDS | IGNORED

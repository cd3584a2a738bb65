"""Print the lines of Python outside tests/ and benchmarks/; fail on a long file or function.

A reader gives up at about 12,000 lines in all. A file has at most 450, a function at most 60.
"""

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


def main() -> None:
    """Measure every Python file that git tracks outside tests/ and benchmarks/."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [Path(name) for name in tracked if not name.startswith(("tests/", "benchmarks/"))]
    problems = []
    total = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        total += lines
        if lines > MAX_FILE_LINES:
            problems.append(f"{path} has {lines} lines; the limit is {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    problems.append(
                        f"{path}:{node.lineno}: {node.name} has {length} lines; "
                        f"the limit is {MAX_FUNCTION_LINES}"
                    )
    print(f"{total:,} lines of Python outside tests/ and benchmarks/")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()

from pathlib import Path


def write_page(run_dir: Path) -> Path:
    path = run_dir / "report.html"
    path.write_text("<p>to come</p>")
    return path

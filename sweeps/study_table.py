"""Print tables of results in the terminal, and the verdicts on the claims of a study."""

from collections.abc import Callable

from rich import box
from rich.table import Table
from rich.text import Text

from common.text import printable
from studies.verdicts import ResultTable, StudyResults


def print_study(results: StudyResults, print_line: Callable[[str | Table], None]) -> None:
    """Print a study's tables, and below them the verdict on each claim with its reason."""
    print_line(results.study.title)
    print_line(f"{results.study.papers}\n")
    for result in results.tables():
        print_line(result.title)
        print_line(make_result_table(result))
        print_line("")
    verdicts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    verdicts.add_column(width=14)
    for claim in results.study.claims:
        verdict, reason = results.verdict(claim)
        verdicts.add_row(Text(verdict), Text(f"{claim.text}\n{reason}\n"))
    print_line(verdicts)


def make_result_table(result: ResultTable) -> Table:
    """Build the terminal's table of some results; wide texts are wrapped."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(result.columns):
        is_text = index < result.text_columns
        text = Text(printable(heading, one_line=True))
        table.add_column(text, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in result.rows:
        table.add_row(*(Text(printable(cell, one_line=True)) for cell in row))
    return table

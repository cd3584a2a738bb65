"""Numbers in messages: nouns agree with their counts, and no positive speed is shown as zero."""

import ast
import re

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from common.text import format_speed, pluralize

NOUNS = (
    "byte|character|checkpoint|dimension|document|file|head|item|job|layer|line|n-gram|parameter|"
    "prediction|process|row|run|sample|seed|setting|snapshot|step|tensor|thread|token|wavelength"
)
ADJECTIVE = r"(?!(?:has|have|must|its|with|of|no)\b)[a-z/]+"
COUNTED = re.compile(rf" (?:{ADJECTIVE} ){{0,2}}(?:{NOUNS})e?s\b")
IN_JAVASCRIPT = re.compile(rf"\$\{{([^{{}}]*)\}}{COUNTED.pattern}")
# Counts that are above 1 wherever they are printed.
ALWAYS_MANY = {
    "n_head",
    "n_group",
    "n_files",
    "n_wavelengths",
    "len(tokens)",
    "runCount",
    "total",
    "dimensions",
    "end",
    "capacity",
    "cache.capacity",
    "batch_size * cache.nbytes",
    "status.st_size",
    "needed",
    "memory_text",
    "processes",
    "step_tokens",
    "self.characters",
    "max_bytes",
    "scored_heads",
    "formatCount(data.maxCurvePoints)",
    "formatCount(pointCount)",
    "formatCount(tokens.length)",
    "formatCount(T)",
    "steps.length",
    "vocab_size",
    "length",
    "len(steps)",
    "MIN_SEEDS",
    "PROFILE_WARM_UP_STEPS",
    "MAX_BODY_BYTES",
    "format_magnitude(model.num_parameters(), None)",
    "window",
    "ceil(times ** 2)",
}


def counts_beside_plurals():
    """Yield the place and the source of every value in a message that a plural noun follows."""
    folders = ("tests", "benchmarks", "docs", "runs", ".ci")
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] in folders or name.parts[:2] == ("data", "cache"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                for value, text in zip(node.values, node.values[1:]):
                    is_text = isinstance(text, ast.Constant) and COUNTED.match(text.value)
                    if is_text and isinstance(value, ast.FormattedValue):
                        is_decimal = value.format_spec and "." in ast.unparse(value.format_spec)
                        if not is_decimal:
                            yield f"{name}:{value.lineno}", ast.unparse(value.value)
    for path in sorted((ROOT / "glass" / "page" / "web").glob("*.js")):
        for match in IN_JAVASCRIPT.finditer(path.read_text(encoding="utf-8")):
            yield path.name, match[1]


def test_every_message_that_counts_uses_the_helper():
    found = {place: value for place, value in counts_beside_plurals() if value not in ALWAYS_MANY}
    assert found == {}


@pytest.mark.parametrize("noun", ["step", "key/value head", "process"])
def test_only_one_is_singular(noun):
    assert pluralize(1, noun) == f"1 {noun}"
    assert {pluralize(n, noun)[-1] for n in (0, 2, 1001)} == {"s"}
    assert pluralize(1001, noun).startswith("1,001 ")


@given(st.floats(1e-9, 1e9))
def test_a_speed_has_two_significant_digits(speed):
    assert float(format_speed(speed).replace(",", "")) == pytest.approx(speed, rel=0.05)

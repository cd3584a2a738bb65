"""Format numbers and text for the terminal."""

from collections.abc import Iterable
from math import exp, floor, isfinite, log10
from unicodedata import category

# Control and format characters, which can change what a terminal shows.
HIDDEN_CATEGORIES = ("Cc", "Cf")
ALLOWED = "\t\n\u200c\u200d"  # the last two join letters, or the parts of an emoji
REPLACEMENT = "\ufffd"
VISIBLE_SPACES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "·"})  # for labels
DEFAULT_DECIMALS = 2  # of a value without an error
ROUNDING_SHARE = 1e-7  # of a value: the standard error of values that are equal in float32


def format_with_error(value: float, error: float | None) -> str:
    """Format a value with the decimals that its standard error leaves: 1.39 ± 0.06."""
    if error is None or not isfinite(error) or error <= ROUNDING_SHARE * abs(value):
        return f"{_without_negative_zero(value, DEFAULT_DECIMALS):,.{DEFAULT_DECIMALS}f}"
    rounded_error = float(f"{error:.0e}")
    decimals = max(0, -floor(log10(rounded_error)))
    return f"{_without_negative_zero(value, decimals):,.{decimals}f} ± {error:,.{decimals}f}"


def format_fixed(value: float, error: float | None, decimals: int) -> str:
    """Format a value and its standard error with a fixed number of decimals."""
    suffix = "" if error is None else f" ± {error:,.{decimals}f}"
    return f"{value:,.{decimals}f}{suffix}"


def format_magnitude(value: float, error: float | None, unit: str = "") -> str:
    """Format a number with a unit prefix: 12 k, 3.4 M, 124 M, 1.7 ± 0.3 M."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            if error is not None:
                return f"{format_with_error(value / size, error / size)}{prefix}{unit}"
            decimals = 1 if value < 10 * size else 0
            return f"{value / size:.{decimals}f}{prefix}{unit}"
    return f"{format_fixed(value, error, 0)} {unit}".strip()


def _without_negative_zero(value: float, decimals: int) -> float:
    return round(value, decimals) + 0.0


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,400 steps, 2 processes."""
    suffix = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else suffix}"


def join_words(words: Iterable[object], conjunction: str = "and") -> str:
    """Return the words as an enumeration: a, b and c."""
    *first, last = map(str, words)
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def format_loss(nats: float, bits_per_byte: float | None) -> str:
    """Format a mean loss with its perplexity, and the bits per byte unless they are unknown."""
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
    return f"{nats:.4f} nats per token ({format_perplexity(nats)}){bits}"


def format_perplexity(nats: float) -> str:
    """Format e to the power of a mean loss per token; above 700 nats it would be no float."""
    return f"perplexity {exp(min(nats, 700)):.5g}"


def format_speed(speed: float) -> str:
    """Format a speed or duration, with two significant digits at least: 2,400, 12, 0.31."""
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def format_minutes(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if it has any: 02:10, 1:02:10."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 cannot encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def printable(text: str, one_line: bool = False) -> str:
    """Replace control characters by U+FFFD; with `one_line` also tabs, line ends and the like."""

    def is_shown(char: str) -> bool:
        is_allowed = char in ALLOWED or category(char) not in HIDDEN_CATEGORIES
        return char.isprintable() or (is_allowed and not one_line)

    return "".join(char if is_shown(char) else REPLACEMENT for char in text)

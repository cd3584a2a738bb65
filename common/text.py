"""Format numbers and text for the terminal."""

from math import floor, log10

# Control characters → signs that show them.
SIGNS = {c: 0x2400 + c for c in range(32)} | {0x7F: 0x2421}
SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def format_emergence(step: int, snapshots: list[int]) -> str:
    """When a head was born of which the snapshot of `step` is the first to tell, in words."""
    before = max((s for s in snapshots if s < step), default=step)
    return f"between steps {before:,} and {step:,}" if step - before > 1 else f"at step {step:,}"


def format_with_error(value: float, error: float | None) -> str:
    """A value and its standard error, to the digit that the error leaves: 1.39 ± 0.06."""
    digits = max(0, -floor(log10(float(f"{error:.0e}")))) if error else 2
    shown = f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.00
    return f"{shown} ± {error:.{digits}f}" if error else shown


def printable(text: str, one_line: bool = False) -> str:
    """The text with signs for control characters, which a terminal would obey; tabs and line ends
    stay, except in one line, where all that has no shape is replaced."""
    if not one_line:
        return text.translate({c: sign for c, sign in SIGNS.items() if chr(c) not in "\t\n"})
    return "".join(c if c.isprintable() else "\ufffd" for c in text.translate(SIGNS))

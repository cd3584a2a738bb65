"""What the predictions of a text needed, and the cards of its tokens → compressed bytes for the
page."""

import zlib
from dataclasses import dataclass

import numpy as np

BUDGET = 6_000_000  # bytes of base64 of a page that these take at most
FLOATS = ("knockout", "lens", "direct", "predicted")  # after the lower triangle of need
IDS = ("predicted_ids", "writes_ids")


@dataclass(frozen=True)
class Explained:
    """Of one probe at one step."""

    floats: bytes  # float16, the low bytes of all numbers and then the high ones
    ids: bytes  # of tokens, little-endian int32
    words: dict[int, str]  # those tokens as text
    needed: float  # the largest need, either way

    @property
    def size(self) -> int:
        return (len(self.floats) + len(self.ids)) * 4 // 3 + 200


def pack_explained(held, name: str) -> Explained | None:
    """Of what a snapshot holds of a probe, text or repeat; None where it lacks that."""
    prefix = "" if name == "text" else f"{name}_"
    if f"{prefix}need" not in held:
        return None
    need = held[f"{prefix}need"]
    numbers = [need[np.tri(len(need), dtype=bool)], *(held[prefix + key] for key in FLOATS)]
    with np.errstate(over="ignore"):  # what is too large for float16 shows as unknown
        halves = np.concatenate([part.ravel() for part in numbers]).astype("<f2")
    ids = np.concatenate([held[prefix + key].ravel() for key in IDS]).astype("<i4")
    words = dict(zip(held[f"{prefix}words_ids"].tolist(), map(str, held[f"{prefix}words"])))
    return Explained(zlib.compress(halves.view(np.uint8).reshape(-1, 2).T.tobytes()),
                     zlib.compress(ids.tobytes()), words,
                     float(np.nanmax(np.abs(np.where(np.isfinite(need), need, 0)), initial=1e-3)))


def newest_that_fit(found: dict[int, dict[str, Explained]]) -> dict[int, dict[str, Explained]]:
    """Of each step's what fits into BUDGET, that of the newest first."""
    kept, room = {}, BUDGET
    for step, probes in sorted(found.items(), reverse=True):
        room -= sum(one.size for one in probes.values())
        kept[step] = probes if room >= 0 else {}
    return kept

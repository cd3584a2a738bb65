"""The note in a sweep job's folder (job.json): its settings, and why its last attempt failed."""

import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import atomic_write, read_json_object

JOB = "job.json"
JOB_LOCK = ".job.lock"  # held while the job runs


@dataclass(frozen=True)
class JobNote:
    """The note of a sweep in the folder of one of its jobs."""

    overrides: dict[str, str]  # every setting that was typed, by its key
    swept: list[str]  # keys of the overrides that the sweep varies
    failure: str = ""  # why the last attempt failed; "" if it did not

    @property
    def settings(self) -> dict[str, str]:
        """The overrides that the sweep varies."""
        return {key: self.overrides[key] for key in self.swept}


def read_job(run_dir: Path) -> JobNote:
    """Read the note of a job."""
    path = run_dir / JOB
    try:
        content = read_json_object(path)
        overrides, swept, failure = content["overrides"], content["swept"], content["failed"]
        if not all(isinstance(text, str) for text in [*overrides.values(), *swept, failure]):
            raise TypeError("a setting is not a string")
        if not set(swept) <= overrides.keys():
            raise ValueError("a swept setting is missing from the overrides")
        return JobNote(overrides, swept, failure)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{path} cannot be read ({e}): repair it, or remove it") from None


def write_job(run_dir: Path, note: JobNote) -> None:
    """Write the note of a job."""
    content = {"overrides": note.overrides, "swept": note.swept, "failed": note.failure}
    with atomic_write(run_dir / JOB) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

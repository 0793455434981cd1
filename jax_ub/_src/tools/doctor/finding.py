"""Defines a finding, the result of one check of the doctor."""

import dataclasses
import enum


class State(enum.Enum):
    """Severity of a doctor's finding: fine, a note, a warning or a fault.

    The doctor's exit status is 1 only if there is a fault.
    """

    FINE = "ok"
    NOTE = "--"
    WARNING = "warn"
    FAULT = "FAULT"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check: what was checked, its severity and an explanation.

    The doctor prints each finding as one line.
    """

    name: str
    state: State
    text: str

    def as_json(self) -> dict[str, str]:
        """Returns the name, the state in lower case and the text as JSON types."""
        return {"name": self.name, "state": self.state.name.lower(), "text": self.text}

    @classmethod
    def from_json(cls, found: dict[str, str]) -> "Finding":
        """Restores a finding from the output of `as_json`."""
        return cls(found["name"], State[found["state"].upper()], found["text"])

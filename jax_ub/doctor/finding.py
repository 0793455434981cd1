"""The result of one check of the doctor."""

import dataclasses
import enum


class State(enum.Enum):
    """Severity of a finding; the doctor's exit status is 1 only for a fault."""

    FINE = "ok"
    NOTE = "--"
    WARNING = "warn"
    FAULT = "FAULT"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    text: str

    def as_json(self) -> dict[str, str]:
        """Returns the finding as JSON types."""
        return {"name": self.name, "state": self.state.name.lower(), "text": self.text}

    @classmethod
    def from_json(cls, found: dict[str, str]) -> "Finding":
        """Restores a finding from the result of `as_json`."""
        return cls(found["name"], State[found["state"].upper()], found["text"])

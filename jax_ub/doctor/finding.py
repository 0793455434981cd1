"""What the doctor says of one thing."""

import dataclasses
import enum


class State(enum.Enum):
    """How a finding is marked; only a fault makes the doctor fail."""

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
        """The same in JSON's types."""
        return {"name": self.name, "state": self.state.name.lower(), "text": self.text}

    @classmethod
    def from_json(cls, found: dict[str, str]) -> "Finding":
        """What `as_json` was made of."""
        return cls(found["name"], State[found["state"].upper()], found["text"])

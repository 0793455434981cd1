"""Finds the source lines of instructions of HLO text."""

import pathlib
import re

_FRAME = re.compile(r"stack_frame_id=(\d+)")
# Patterns of the rows in the tables of source lines at the top of HLO text, by table.
_TABLES = {
    "FileNames": re.compile(r'(\d+) "(.*)"'),
    "FileLocations": re.compile(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"),
    "StackFrames": re.compile(
        r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    ),
}
# Parts of the paths of libraries, whose frames are not the user's.
_LIBRARIES = (
    *("/site-packages/jax", "/site-packages/flax/"),
    f"{pathlib.Path(__file__).parents[3]}/",
)


class SourceLines:
    """Finds source lines of the user in the tables at the beginning of HLO text."""

    def __init__(self, text: str):
        # The columns of each row, by table and id.
        self._rows: dict[str, dict[int, tuple[str, ...]]] = {}
        for name, pattern in _TABLES.items():
            table = text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
            self._rows[name] = {int(row[0]): row[1:] for row in pattern.findall(table)}
        frames = self._rows["StackFrames"]
        # XLA may print the ids of parents plus 1. Frame 1 has no parent, which is id 0,
        # so the ids are too high by 1 if its parent is printed as 1.
        self._offset = 1 if frames.get(1, ("", ""))[1] == "1" else 0

    def of(self, text: str) -> str:
        """Returns an instruction's source line, such as "train.py:12", from its text.

        The result is "" if the line is unknown.
        """
        found = _FRAME.search(text)
        frame = int(found[1]) if found else 0
        lines = []
        while frame in self._rows["StackFrames"]:
            location, parent = self._rows["StackFrames"][frame]
            file, line = self._rows["FileLocations"].get(int(location), ("0", ""))
            (path,) = self._rows["FileNames"].get(int(file), ("",))
            lines.append(f"{path}:{line}" if path else "")
            # A frame's caller has a lower id. `min` ends the loop even if it has not.
            frame = min(int(parent or 0) - self._offset, frame - 1)
        own = (line for line in lines if not any(one in line for one in _LIBRARIES))
        return next(own, lines[0] if lines else "")

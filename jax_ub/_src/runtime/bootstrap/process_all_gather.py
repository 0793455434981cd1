"""All-gathers one value per process, or raises on every process.

The error names the processes that are missing. The process with the lowest index is the
collector. Messages of a dead job or of an abandoned attempt are ignored: the collector
and every member draw a random number (a nonce) for each attempt. The collector accepts
only messages that repeat its number, and writes its answer to a key with the member's
number.

    collector                        member 1
    "collector": [number c, ...]  ->  reads c
    reads "1" if it repeats c     <-  "1": {number n, repeats c, values}
    "answer.n": all values        ->  returns the values
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_ub._src.errors import CommunicatorError, TimeoutError, UbError
from jax_ub._src.runtime.bootstrap.store import KeyValueStore

# The longest pause between two polls. With more than 50 other processes it is
# _PAUSE_S_PER_PROCESS times their number, since all processes poll the same service.
_LONGEST_PAUSE_S = 0.05
_PAUSE_S_PER_PROCESS = 0.001
# How long an interrupted process waits for others, to send them the failure.
TELL_S = 2.0

Values = dict[int, Any]  # JSON values, by process index


class ProcessAllGather:
    """One attempt of all processes to exchange values, in one or more rounds.

    Use it as a context manager: leaving the block reports an error to the others.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        processes: Sequence[int],
        timeout_s: float,
        lost: Callable[[int], str | None] = lambda process: None,
    ):
        """Starts an attempt and draws its random number.

        Args:
            store: key-value store that all processes share.
            process: the index of this process.
            processes: the indices of all processes.
            timeout_s: the timeout of each round, in seconds.
            lost: returns how a process has died, or None if that is not known.

        Attributes:
            has_ended: whether the `with` block has ended, so that the other processes
                have been sent the outcome.
        """
        self.has_ended = False
        self._store = store
        self._lost = lost
        self._process = process
        self._others = sorted(set(processes) - {process})
        self._collector = min(processes)
        self._timeout_s = timeout_s
        self._number = f"{process}-{secrets.token_hex(8)}"
        self._rounds: list[Any] = []
        self._numbers: dict[int, str] = {}  # collector: known numbers of the members
        self._answers: dict[
            int, list
        ] = {}  # collector: one answer per round, by member
        self._repeats = ""  # member: the collector's number
        self._is_bound = False  # member: an answer has confirmed the collector's number
        self._is_told = False  # the known processes have been sent the failure
        self._failed: Any = None  # collector: the failure that it has sent
        self._left: set[int] = set()  # processes that have ended their attempt

    def __enter__(self) -> "ProcessAllGather":
        """Returns the attempt itself."""
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Deletes this process's messages; sends an error to the other processes."""
        failed = {}
        if error is not None and not self._is_told:
            failed = self._failure(error)
        if self._process == self._collector:
            if error is not None:
                self._tell_all(failed, error)
            self.has_ended = True
            self._store.erase("collector")
            return
        if failed and not self._repeats and not isinstance(error, Exception):
            self._look_for_collector()
        self.has_ended = True
        if failed and self._repeats:
            self._write_own(failed)
        else:
            self._store.erase(str(self._process))
        self._store.erase(f"answer.{self._number}")

    def _tell_all(self, failed, error):
        """Sends the collector's failure to all members.

        Waits up to `TELL_S` for members that have not arrived yet.
        """
        known = set() if failed else set(self._numbers)
        end_s = time.monotonic() + TELL_S
        if not isinstance(error, TimeoutError):
            self._store.write("collector", json.dumps([self._number, self._others]))
            while self._meet_more() and time.monotonic() < end_s:
                time.sleep(_LONGEST_PAUSE_S)
        self._answer(failed or self._failed, set(self._numbers) - known)

    def _meet_more(self):
        for other in self._others:
            note = _read(self._store, str(other))
            if note is not None and note["repeats"] == self._number:
                if "failed" in note:
                    self._left.add(other)
                elif other not in self._left:
                    self._numbers.setdefault(other, note["number"])
        return len(self._left | set(self._numbers)) < len(self._others)

    def _look_for_collector(self):
        end_s = time.monotonic() + TELL_S
        while not self._repeats and time.monotonic() < end_s:
            self._repeat(_read(self._store, "collector"))
            time.sleep(_LONGEST_PAUSE_S)

    def _failure(self, error):
        # The text of a jax_ub error is meaningful in any process. The `repr` of another
        # exception adds its type.
        is_own = isinstance(error, UbError)
        why = str(error).removeprefix("initialize_ub: ") if is_own else repr(error)
        text = f"initialize_ub: process {self._process} failed: {why}"
        return {"failed": text, "is_timeout": isinstance(error, TimeoutError)}

    def gather(self, value: Any, timeout_s: float | None = None) -> Values:
        """All-gathers one JSON value per process.

        Args:
            value: the value of this process.
            timeout_s: how long to wait for the other processes, in seconds. None means
                the timeout of the attempt.

        Returns:
            The values by process index, the same on every process.

        Raises:
            TimeoutError: if processes did not arrive before the deadline. Names them.
            CommunicatorError: if another process failed.
        """
        self._rounds.append(value)
        if not self._others:
            return {self._process: value}
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._process == self._collector:
            return self._run_coordinator(value, timeout_s)
        return self._run_member(timeout_s)

    def _run_coordinator(self, value, timeout_s):
        found = {self._process: value}
        pause = _Pause(timeout_s, len(self._others))
        announced = None
        while True:
            waiting = [other for other in self._others if other not in found]
            if waiting != announced:
                self._store.write("collector", json.dumps([self._number, waiting]))
                announced = waiting
            if not waiting:
                break
            lost = {other: self._lost(other) for other in waiting}
            # Reads all members, also those that arrived: they may have failed since.
            for other in self._others:
                values = self._values_of(other)
                if len(values) >= len(self._rounds):
                    found[other] = values[len(self._rounds) - 1]
            for other, how in lost.items():
                if how is not None and other not in found:
                    self._left.add(other)
                    self._fail(f"initialize_ub: process {other} {how}.")
            if waiting[-1] not in found and pause.is_over():
                missing = [other for other in waiting if other not in found]
                self._fail(_missing_text(missing, timeout_s), TimeoutError)
            pause.take()
        self._answer({"values": sorted(found.items())}, self._numbers)
        return found

    def _values_of(self, other):
        note = _read(self._store, str(other))
        if note is None or note["repeats"] != self._number:
            return []
        if self._numbers.setdefault(other, note["number"]) != note["number"]:
            # Also sends the failure to the new attempt of that process.
            self._numbers[other], self._answers[other] = note["number"], []
            self._fail(f"initialize_ub: process {other} gave up and began again.")
        if "failed" in note:
            del self._numbers[other]
            self._left.add(other)
            self._fail(note["failed"], _kind_of(note))
        return note["values"]

    def _fail(self, text, kind=CommunicatorError):
        self._failed = {"failed": text, "is_timeout": kind is TimeoutError}
        self._answer(self._failed, self._numbers)
        self._is_told = True
        raise kind(text)

    def _answer(self, answer, others):
        for other in others:
            number = self._numbers[other]
            answers = self._answers.setdefault(other, [])
            answers.append(answer)
            self._store.write(f"answer.{number}", json.dumps(answers))

    def _run_member(self, timeout_s):
        self._write_own()
        pause = _Pause(timeout_s, len(self._others))
        while True:
            how = self._lost(self._collector)
            # Must be read before the answer. A collector that restarts its attempt
            # first answers with the failure and then writes a new number. So a member
            # that sees the new number also sees the failure, and does not send the
            # values of the old attempt to the new one.
            collector = _read(self._store, "collector")
            answers = _read(self._store, f"answer.{self._number}") or []
            if len(answers) >= len(self._rounds):
                break
            if how is not None:
                raise CommunicatorError(
                    f"initialize_ub: process {self._collector} {how}."
                )
            waiting = self._repeat(collector)
            if pause.is_over():
                text = _missing_text(self._missing(waiting), timeout_s)
                raise TimeoutError(text)
            pause.take()
        self._is_bound = True
        answer = answers[-1]
        if "failed" in answer:
            self._is_told = True
            raise _kind_of(answer)(answer["failed"])
        return {int(process): value for process, value in answer["values"]}

    def _repeat(self, note):
        """Writes the collector's number into this process's message.

        Returns:
            The processes for which the collector is waiting.
        """
        if note is None:
            return []
        number, waiting = note
        if number != self._repeats and not self._is_bound:
            self._repeats = number
            self._write_own()
        return waiting

    def _missing(self, waiting):
        others = [other for other in waiting if other != self._process]
        # If the collector waits for no other process, the collector itself is missing.
        return others or [self._collector]

    def _write_own(self, failed=None):
        note = {
            "number": self._number,
            "repeats": self._repeats,
            "values": self._rounds,
            **(failed or {}),
        }
        self._store.write(str(self._process), json.dumps(note))


class _Pause:
    """Pauses between polls that double in length, until a deadline."""

    def __init__(self, timeout_s, num_others):
        self._end_s = time.monotonic() + timeout_s
        self._next_s = _PAUSE_S_PER_PROCESS
        self._longest_s = max(_LONGEST_PAUSE_S, _PAUSE_S_PER_PROCESS * num_others)

    def is_over(self):
        return time.monotonic() >= self._end_s

    def take(self):
        left_s = max(0.0, self._end_s - time.monotonic())
        time.sleep(min(self._next_s, left_s))
        self._next_s = min(2 * self._next_s, self._longest_s)


def _read(store, key):
    text = store.read(key)
    return None if text is None else json.loads(text)


def _kind_of(failed):
    return TimeoutError if failed["is_timeout"] else CommunicatorError


def _missing_text(missing, timeout_s):
    who = f"process {missing[0]}" if len(missing) == 1 else f"processes {missing}"
    return (
        f"initialize_ub: {who} did not take part within {timeout_s:g} s. Every process "
        "of the mesh must call it, with that mesh; JAX_UB_TIMEOUT_S is the time they "
        "have."
    )

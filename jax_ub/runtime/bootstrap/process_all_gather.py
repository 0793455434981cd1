"""How processes agree: all values reach all, or everyone learns who is missing.

The process with the lowest number collects. A note of a dead job, or of an attempt that
was given up, is never taken for an answer: the collector accepts only notes that repeat
the number it drew for this attempt, and answers under the number that the other drew.

    collector                        everyone else
    "collector": {number c, ...}  ->  reads c
    reads "1" if it repeats c     <-  "1": {number n, repeats c, values}
    "answer.n": all values        ->  goes on
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_ub.errors import CommunicatorError, TimeoutError, UbError
from jax_ub.runtime.bootstrap.store import KeyValueStore

# Polls get rarer up to this, and with the number of processes that ask one service.
_LONGEST_PAUSE_S = 0.05
_PAUSE_S_PER_PROCESS = 0.001
# How long a process that is interrupted looks for others that it can tell.
TELL_S = 2.0

Values = dict[int, Any]  # of JSON's types, by process


class ProcessAllGather:
    """One attempt to agree, in as many rounds as it takes; used in a `with` block."""

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        processes: Sequence[int],
        timeout_s: float,
        lost: Callable[[int], str | None] = lambda process: None,
    ):
        """Begins.

        Args:
            store: what the processes share.
            process: the own number.
            processes: the numbers of all that take part.
            timeout_s: how long a round may last.
            lost: how a process has ended, as far as that is known, or None.

        Attributes:
            has_ended: whether its block was left: all have been told how.
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
        self._numbers: dict[int, str] = {}  # of the others, as far as they answered
        self._answers: dict[int, list] = {}
        self._repeats = ""
        self._is_bound = False  # the collector has answered: it is a living one
        self._is_told = False  # those that are known know that the attempt failed
        self._failed: Any = None  # and why, as the collector has told it
        self._left: set[int] = set()  # of the others, those that do not listen any more

    def __enter__(self) -> "ProcessAllGather":
        """Begins the block."""
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Takes the own notes away; if the block failed, the others learn it."""
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
        """The collector fails: those that it has not heard of may be on their way."""
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
        # Own errors are texts for the user of any process; others say what they are.
        is_own = isinstance(error, UbError)
        why = str(error).removeprefix("initialize_ub: ") if is_own else repr(error)
        text = f"initialize_ub: process {self._process} failed: {why}"
        return {"failed": text, "is_timeout": isinstance(error, TimeoutError)}

    def gather(self, value: Any, timeout_s: float | None = None) -> Values:
        """Exchanges one value of JSON's types.

        Args:
            value: the own one.
            timeout_s: how long the others may take to come; None is as of any round.

        Returns:
            The values by process, on every process the same.

        Raises:
            TimeoutError: names the processes that were missing at the deadline.
            CommunicatorError: if another process gave up.
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
            # Those that came are read again: they may have given up since.
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
            # The new attempt is to hear of it too.
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
            # Before the answer: a collector that began again has answered by then, and
            # what was written here is not for its new attempt.
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
        """Repeats the number that the collector drew; returns whom it waits for."""
        if note is None:
            return []
        number, waiting = note
        if number != self._repeats and not self._is_bound:
            self._repeats = number
            self._write_own()
        return waiting

    def _missing(self, waiting):
        others = [other for other in waiting if other != self._process]
        # If the collector waits for nobody else, it is itself the one that is missing.
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
    """Longer and longer pauses until a deadline."""

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

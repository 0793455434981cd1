"""All-gathers one value per process, or raises on every process.

The error names the processes that are missing. The process with the lowest index is the
coordinator, and the others are members. Messages of a dead job or of an abandoned
attempt are ignored: the coordinator and every member draw a random number (a nonce) for
each attempt. The coordinator accepts only messages that repeat its number, and writes
its answer to a key with the member's number.

    coordinator                          member 1
    "coordinator": [number c, ...]  ->  reads c
    reads "1" if it repeats c       <-  "1": {number n, repeats c, values}
    "answer.n": all values          ->  returns the values
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax_ub._src.errors import CommunicatorError, TimeoutError, UbError

# The pause between two polls, in seconds, grows from _PAUSE_S_PER_PROCESS to
# _LONGEST_PAUSE_S, or to n * _PAUSE_S_PER_PROCESS if that is longer. Here n is the
# number of other processes, which all poll the same service.
_LONGEST_PAUSE_S = 0.05
_PAUSE_S_PER_PROCESS = 0.001
# Seconds for which a process that has failed or was interrupted waits for late
# processes, in order to send the failure to them.
NOTIFY_S = 2.0

Values = dict[int, Any]  # JSON values, by process index


class KeyValueStore(Protocol):
    """A key-value store of texts that all processes can access."""

    def write(self, key: str, text: str) -> None:
        """Stores a text under a key. Replaces an earlier text."""

    def read(self, key: str) -> str | None:
        """Returns the text under a key, or None."""

    def erase(self, key: str) -> None:
        """Deletes the text under a key, if there is one."""


class ProcessAllGather:
    """All-gathers JSON values over processes through a key-value store.

    Used as a context manager; each call in the block is one all-gather. If an error
    ends the block, the other processes receive it.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        processes: Sequence[int],
        timeout_s: float,
        lost: Callable[[int], str | None] = lambda process: None,
    ):
        """Starts an attempt to all-gather, identified by a random number.

        Messages of other attempts contain other numbers, and are ignored.

        Args:
            store: key-value store that all processes share.
            process: the index of this process.
            processes: the indices of all processes.
            timeout_s: the timeout of each round, in seconds.
            lost: a function that returns how a process, given by its index, has died;
                None if it has not, or if that is not known.
        """
        self._store = store
        self._lost = lost
        self._process = process
        self._others = sorted(set(processes) - {process})
        self._coordinator = min(processes)
        self._timeout_s = timeout_s
        self._number = f"{process}-{secrets.token_hex(8)}"
        # For each round of gathering: the value of this process, and the text of its
        # error or None.
        self._rounds: list[tuple[Any, str | None]] = []
        # The message that reports a failure. It is empty until a failure is found or
        # received.
        self._failure: dict[str, Any] = {}
        # Whether a round has ended with an error that all processes raise.
        self._has_failed_everywhere = False
        # Only the coordinator uses these dictionaries, whose keys are process indices.
        # `_numbers` has the random number of each process's attempt. `_answers` has the
        # answers that were sent to each process, one per round.
        self._numbers: dict[int, str] = {}
        self._answers: dict[int, list] = {}
        self._ended: set[int] = set()  # processes that have ended their attempt
        # Only members (all processes except for the coordinator) use this variable: the
        # random number of the coordinator's attempt, which their messages to the
        # coordinator must contain.
        self._coordinator_number = ""
        # Whether the coordinator has answered this member. From then on, messages with
        # a different coordinator number are from another attempt, and are ignored.
        self._is_confirmed = False

    def __enter__(self) -> "ProcessAllGather":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Deletes this process's messages; sends an error to the other processes."""
        if self._has_failed_everywhere:
            error = None
        is_new = error is not None and not self._failure
        if is_new:
            self._failure = self._describe(error)
        if self._process == self._coordinator:
            if error is not None:
                self._send_to_members(error)
            self._store.erase("coordinator")
            return
        is_interrupted = is_new and not isinstance(error, Exception)
        if is_interrupted and not self._coordinator_number:
            self._wait_for_coordinator()
        if is_new and self._coordinator_number:
            self._write_own(self._failure)
        else:
            self._store.erase(str(self._process))
        self._store.erase(f"answer.{self._number}")

    def _send_to_members(self, error):
        """Sends the failure to all other processes, including late ones.

        Waits up to `NOTIFY_S` for processes that have not arrived yet.
        """
        known = set(self._numbers)
        self._answer(self._failure, known)
        if not isinstance(error, TimeoutError):
            self._announce(self._others)
            for is_over in self._polls(NOTIFY_S):
                if self._has_seen_all() or is_over:
                    break
        self._answer(self._failure, set(self._numbers) - known)

    def _has_seen_all(self):
        for other in self._others:
            message = _read(self._store, str(other))
            if message is not None and message["repeats"] == self._number:
                if "failed" in message:
                    self._ended.add(other)
                elif other not in self._ended:
                    self._numbers.setdefault(other, message["number"])
        return len(self._ended | set(self._numbers)) == len(self._others)

    def _wait_for_coordinator(self):
        for is_over in self._polls(NOTIFY_S):
            self._repeat(_read(self._store, "coordinator"))
            if self._coordinator_number or is_over:
                break

    def _describe(self, error):
        # Errors of jax_ub have a text that is clear in any process. For other
        # exceptions, the `repr` is sent, because it includes the type.
        is_own = isinstance(error, UbError)
        reason = str(error).removeprefix("initialize_ub: ") if is_own else repr(error)
        text = f"initialize_ub: process {self._process} failed: {reason}"
        return {"failed": text, "is_timeout": isinstance(error, TimeoutError)}

    def gather(
        self,
        value: Any,
        error: Exception | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Values:
        """Returns the values of all processes, by process index.

        Args:
            value: the value of this process.
            error: why this process has failed, or None. The round ends before the error
                is raised, so that it is raised in all processes.
            timeout_s: how long to wait for the other processes, in seconds. None means
                the timeout of the attempt.

        Returns:
            The values by process index, the same on every process.

        Raises:
            TimeoutError: if processes did not arrive before the deadline. Names them.
            CommunicatorError: if another process failed. If `error` is given, that is
                raised.
        """
        failed = None if error is None else self._describe(error)["failed"]
        self._rounds.append((value, failed))
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        is_coordinator = self._process == self._coordinator
        run = self._run_coordinator if is_coordinator else self._run_member
        try:
            found = run(timeout_s)
        except CommunicatorError as failure:
            if error is None:
                raise
            # The error of this process explains the failure better than the received
            # one.
            raise error from failure
        texts = [text for _, (_, text) in sorted(found.items()) if text is not None]
        if texts:
            self._has_failed_everywhere = True
            raise error or CommunicatorError(texts[0])
        return {process: value for process, (value, _) in found.items()}

    def _run_coordinator(self, timeout_s):
        found = {self._process: self._rounds[-1]}
        announced = None
        for is_over in self._polls(timeout_s):
            waiting = [other for other in self._others if other not in found]
            if waiting != announced:
                self._announce(waiting)
                announced = waiting
            if not waiting:
                break
            lost = {other: self._lost(other) for other in waiting}
            # The messages of processes that have already arrived are read again,
            # because these processes may have failed in the meantime.
            for other in self._others:
                values = self._values_of(other)
                if len(values) >= len(self._rounds):
                    found[other] = values[len(self._rounds) - 1]
            missing = [other for other in waiting if other not in found]
            for other in missing:
                if lost[other] is not None:
                    self._ended.add(other)
                    self._fail(f"initialize_ub: process {other} {lost[other]}.")
            if missing and is_over:
                self._fail(_missing_text(missing, timeout_s), TimeoutError)
        self._answer({"values": sorted(found.items())}, self._numbers)
        return found

    def _announce(self, waiting):
        self._store.write("coordinator", json.dumps([self._number, waiting]))

    def _values_of(self, other):
        message = _read(self._store, str(other))
        if message is None or message["repeats"] != self._number:
            return []
        if self._numbers.setdefault(other, message["number"]) != message["number"]:
            # The process has restarted and begun another attempt, which has another
            # number. The answer to the new attempt reports the failure, too.
            self._numbers[other], self._answers[other] = message["number"], []
            self._fail(f"initialize_ub: process {other} failed and started again.")
        if "failed" in message:
            del self._numbers[other]
            self._ended.add(other)
            self._fail(message["failed"], _kind_of(message))
        return message["values"]

    def _fail(self, text, kind=CommunicatorError):
        self._failure = {"failed": text, "is_timeout": kind is TimeoutError}
        raise kind(text)

    def _answer(self, answer, others):
        for other in others:
            answers = self._answers.setdefault(other, [])
            answers.append(answer)
            self._store.write(f"answer.{self._numbers[other]}", json.dumps(answers))

    def _run_member(self, timeout_s):
        self._write_own()
        for is_over in self._polls(timeout_s):
            how = self._lost(self._coordinator)
            # The coordinator's message must be read before the answer. If the
            # coordinator restarts, it first answers with the failure, and then writes a
            # new number. So a member that reads the new number also reads the failure,
            # and sends no values of the old attempt to the new attempt.
            coordinator = _read(self._store, "coordinator")
            answers = _read(self._store, f"answer.{self._number}") or []
            if len(answers) >= len(self._rounds):
                break
            if how is not None:
                raise CommunicatorError(
                    f"initialize_ub: process {self._coordinator} {how}."
                )
            waiting = self._repeat(coordinator)
            if is_over:
                # If the coordinator waits for no other process, or has sent no message,
                # the missing process is the coordinator.
                missing = [other for other in waiting if other != self._process]
                missing = missing or [self._coordinator]
                raise TimeoutError(_missing_text(missing, timeout_s))
        self._is_confirmed = True
        answer = answers[-1]
        if "failed" in answer:
            self._failure = answer
            raise _kind_of(answer)(answer["failed"])
        return {int(process): value for process, value in answer["values"]}

    def _polls(self, timeout_s):
        """Yields for each poll whether the deadline has passed; pauses in between."""
        end_s = time.monotonic() + timeout_s
        pause_s = _PAUSE_S_PER_PROCESS
        while True:
            left_s = end_s - time.monotonic()
            yield left_s <= 0
            # The last pause ends at the deadline. The caller then polls once more, so
            # that it finds a value that arrived just before the deadline.
            time.sleep(max(0.0, min(pause_s, left_s)))
            longest_s = _PAUSE_S_PER_PROCESS * len(self._others)
            pause_s = min(2 * pause_s, max(_LONGEST_PAUSE_S, longest_s))

    def _repeat(self, message):
        """Writes the coordinator's random number to the store, as acknowledgment.

        The coordinator ignores messages without the number.

        Returns:
            The processes for which the coordinator is waiting.
        """
        if message is None:
            return []
        number, waiting = message
        if number != self._coordinator_number and not self._is_confirmed:
            self._coordinator_number = number
            self._write_own()
        return waiting

    def _write_own(self, failure=None):
        message = {
            "number": self._number,
            "repeats": self._coordinator_number,
            "values": self._rounds,
            **(failure or {}),
        }
        self._store.write(str(self._process), json.dumps(message))


def _read(store, key):
    text = store.read(key)
    return None if text is None else json.loads(text)


def _kind_of(failure):
    return TimeoutError if failure["is_timeout"] else CommunicatorError


def _missing_text(missing, timeout_s):
    who = f"process {missing[0]}" if len(missing) == 1 else f"processes {missing}"
    return (
        f"initialize_ub: {who} did not take part within {timeout_s:g} s. Call it in "
        "every process of the mesh, with the same mesh, and for several axes from one "
        "thread, in the same order. JAX_UB_TIMEOUT_S sets the timeout."
    )

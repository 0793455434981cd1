"""All-gathers between threads, which stand for processes, over a dictionary."""

import json
import random
import threading
import time

import pytest

import jax_ub as ub
from jax_ub._src.runtime import process_all_gather
from jax_ub._src.runtime.process_all_gather import ProcessAllGather

TIMEOUT_S = 20.0


class MemoryStore(dict):
    """A key-value store in memory, for threads of one process."""

    write = dict.__setitem__
    read = dict.get

    def erase(self, key):
        self.pop(key, None)


class Behind:
    """A store that hides answers until the coordinator's second attempt."""

    def __init__(self, store):
        self._store = store
        self._coordinators = set()
        self.write, self.erase = store.write, store.erase

    def read(self, key):
        if key.startswith("answer") and len(self._coordinators) < 2:
            return None
        message = self._store.read(key)
        if key == "coordinator" and len(self._coordinators) == 1:
            while message is None or json.loads(message)[0] in self._coordinators:
                time.sleep(0.001)  # forever if there is none; together() has a timeout
                message = self._store.read(key)
        if key == "coordinator" and message is not None:
            self._coordinators.add(json.loads(message)[0])
        return message


def together(*functions):
    """Runs functions concurrently; returns their results or exceptions."""
    results = [None] * len(functions)

    def run(index, function):
        try:
            results[index] = function()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=one, daemon=True)
        for one in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Clock:
    """A fake clock that stands still until a test advances it."""

    def __init__(self):
        self.now_s = 0.0
        self.sleep = time.sleep

    def monotonic(self):
        return self.now_s

    def pass_when(self, condition, seconds):
        """Advances the clock by `seconds` as soon as the condition is met."""
        while not condition():
            time.sleep(0.001)  # for ever, if it is not: together() gives up
        self.now_s += seconds

    def pass_when_coordinator_waits_for(self, store, processes, seconds):
        """Returns a function that advances the clock once exactly these are awaited."""
        return lambda: self.pass_when(lambda: waited_for(store) == processes, seconds)


def waited_for(store):
    """Returns the processes that the coordinator waits for, None before any."""
    message = store.read("coordinator")
    return message and json.loads(message)[1]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(process_all_gather, "time", clock)
    return clock


def member(store, process, processes, values, *, timeout_s=TIMEOUT_S, after_s=0.0):
    """Returns a function that gathers each value in a round, in one process."""

    def run():
        time.sleep(after_s)
        with ProcessAllGather(store, process, processes, timeout_s) as all_gather:
            return [all_gather.gather(value) for value in values]

    return run


@pytest.mark.parametrize("processes", [(0, 1), (3, 1, 7), tuple(range(12))])
def test_all_processes_get_all_values_in_every_round(processes):
    store = MemoryStore()
    found = together(
        *(member(store, p, processes, [f"a{p}", {"b": p}]) for p in processes)
    )
    first = {p: f"a{p}" for p in sorted(processes)}
    second = {p: {"b": p} for p in sorted(processes)}
    assert found == [[first, second]] * len(processes)


def test_a_slow_process_reads_its_answer_and_joins_the_next_attempt():
    store = MemoryStore()

    def twice(store, process):
        values = [f"a{process}"], [f"b{process}"]
        return [member(store, process, (0, 1), each)() for each in values]

    found = together(lambda: twice(store, 0), lambda: twice(Behind(store), 1))
    assert found == [[[{0: "a0", 1: "a1"}], [{0: "b0", 1: "b1"}]]] * 2
    assert not store


def test_no_message_is_left_in_the_store():
    store = MemoryStore()
    for _ in range(3):
        together(*(member(store, p, (0, 1, 2), ["x"]) for p in range(3)))
    assert not store


def test_one_process_gathers_its_own_value():
    assert member(MemoryStore(), 4, (4,), ["x"])() == [{4: "x"}]


def test_late_processes_are_waited_for():
    store = MemoryStore()
    found = together(
        member(store, 0, (0, 1, 2), ["a"]),
        member(store, 1, (0, 1, 2), ["b"], after_s=0.2),
        member(store, 2, (0, 1, 2), ["c"], after_s=0.4),
    )
    assert found == [[{0: "a", 1: "b", 2: "c"}]] * 3
    store = MemoryStore()
    found = together(
        member(store, 0, (0, 1), ["a"], after_s=0.3), member(store, 1, (0, 1), ["b"])
    )
    assert found == [[{0: "a", 1: "b"}]] * 2


def test_missing_processes_are_named_on_all_others(clock):
    store = MemoryStore()
    *found, _ = together(
        member(store, 0, (0, 1, 2, 3), ["a"], timeout_s=0.3),
        member(store, 2, (0, 1, 2, 3), ["c"], timeout_s=5),
        clock.pass_when_coordinator_waits_for(store, [1, 3], 1.0),
    )
    for error in found:
        assert isinstance(error, ub.errors.TimeoutError)
        assert "processes [1, 3] did not take part within 0.3 s" in str(error)


def test_a_missing_coordinator_is_named():
    error = together(member(MemoryStore(), 1, (0, 1), ["a"], timeout_s=0.2))[0]
    assert isinstance(error, ub.errors.TimeoutError)
    assert "process 0 did not take part within 0.2 s" in str(error)
    assert "for several axes from one thread, in the same order." in str(error)


def test_a_process_with_a_shorter_timeout_names_the_missing_process(clock):
    store = MemoryStore()
    *found, _ = together(
        member(store, 0, (0, 1, 2), ["a"], timeout_s=3),
        member(store, 1, (0, 1, 2), ["b"], timeout_s=0.5),
        clock.pass_when_coordinator_waits_for(store, [2], 1.0),
    )
    text = "process 2 did not take part within 0.5 s"
    assert str(found[1]).startswith(f"initialize_ub: {text}")
    assert str(found[0]).startswith(f"initialize_ub: process 1 failed: {text}")
    assert all(isinstance(error, ub.errors.TimeoutError) for error in found)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_between_rounds_is_named_on_all_others(failing):
    store = MemoryStore()

    def run(process):
        with ProcessAllGather(store, process, (0, 1, 2), TIMEOUT_S) as all_gather:
            all_gather.gather("ready")
            if process == failing:
                raise OSError("no descriptor left")
            all_gather.gather("done")

    found = together(*(lambda p=p: run(p) for p in range(3)))
    assert isinstance(found[failing], OSError)
    for process in {0, 1, 2} - {failing}:
        assert isinstance(found[process], ub.errors.CommunicatorError)
        assert f"process {failing} failed" in str(found[process])
        assert "no descriptor left" in str(found[process])


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {1, 2}])
def test_the_error_of_a_round_is_raised_in_all_processes(failing):
    store = MemoryStore()
    errors = {p: OSError(f"no descriptor left in {p}") for p in failing}

    def run(process):
        with ProcessAllGather(store, process, (0, 1, 2), TIMEOUT_S) as all_gather:
            all_gather.gather("ready")
            all_gather.gather("done", errors.get(process))

    found = together(*(lambda p=p: run(p) for p in range(3)))
    first = min(failing)
    text = f"initialize_ub: process {first} failed: {errors[first]!r}"
    for process in range(3):
        if process in failing:
            assert found[process] is errors[process]
        else:
            assert isinstance(found[process], ub.errors.CommunicatorError)
            assert str(found[process]) == text
    assert not store


@pytest.mark.parametrize("process", [0, 1])
def test_the_own_error_takes_precedence_over_missing_processes(process, monkeypatch):
    monkeypatch.setattr(process_all_gather, "NOTIFY_S", 0.2)
    error = ub.errors.ConfigurationError("the own refusal")

    def run():
        with ProcessAllGather(MemoryStore(), process, (0, 1), 0.2) as all_gather:
            all_gather.gather("ready", error)

    assert together(run) == [error]


@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize("begins_first", [True, False])
def test_an_interrupt_before_any_message_is_reported(interrupted, begins_first):
    store = MemoryStore()

    def run(process):
        if (process == interrupted) != begins_first:
            time.sleep(0.2)
        try:
            with ProcessAllGather(store, process, (0, 1, 2), TIMEOUT_S) as all_gather:
                if process == interrupted:
                    raise KeyboardInterrupt
                all_gather.gather("ready")
        except KeyboardInterrupt as interrupt:
            return interrupt

    found = together(*(lambda p=p: run(p) for p in range(3)))
    assert isinstance(found[interrupted], KeyboardInterrupt)
    for process in {0, 1, 2} - {interrupted}:
        text = f"process {interrupted} failed: KeyboardInterrupt()"
        assert text in str(found[process]), found
    found = together(*(member(store, p, (0, 1, 2), [p]) for p in range(3)))
    assert found == [[{0: 0, 1: 1, 2: 2}]] * 3


def test_a_process_that_arrives_after_a_failure_learns_of_it():
    store = MemoryStore()

    def fails():
        with ProcessAllGather(store, 2, (0, 1, 2), TIMEOUT_S) as all_gather:
            while not all_gather._coordinator_number:
                all_gather._repeat(process_all_gather._read(store, "coordinator"))
            raise OSError("no descriptor left")

    found = together(
        member(store, 0, (0, 1, 2), ["a"]),
        member(store, 1, (0, 1, 2), ["b"], after_s=0.5),
        fails,
    )
    for error in found[:2]:
        assert "process 2 failed: OSError('no descriptor left')" in str(error), found


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_has_died_is_not_waited_for(dead):
    def run(process):
        lost = {dead: "(pid 7) died"}.get
        with ProcessAllGather(
            MemoryStore(), process, (0, 1), TIMEOUT_S, lost
        ) as all_gather:
            all_gather.gather("ready")

    (found,) = together(lambda: run(1 - dead))
    assert isinstance(found, ub.errors.CommunicatorError)
    assert not isinstance(found, ub.errors.TimeoutError)
    assert str(found) == f"initialize_ub: process {dead} (pid 7) died."


def test_the_value_of_a_process_that_died_afterwards_counts():
    store = MemoryStore()

    def run(process, lost=lambda process: None):
        with ProcessAllGather(store, process, (0, 1), TIMEOUT_S, lost) as all_gather:
            return all_gather.gather(process)

    def is_lost(process):
        # A process has arrived once its message repeats the number of the coordinator's
        # attempt.
        message = store.read("1")
        return "died" if message and json.loads(message)["repeats"] else None

    found = together(lambda: run(0, is_lost), lambda: run(1))
    assert found == [{0: 0, 1: 1}] * 2


def test_messages_of_a_dead_job_are_ignored():
    class Kept(MemoryStore):
        """A store of a killed job, which erases no keys."""

        def erase(self, key):
            pass

    dead = Kept()
    together(*(member(dead, p, (0, 1), ["old", "old"]) for p in range(2)))
    assert dead
    store = MemoryStore(dead)
    error = together(member(store, 1, (0, 1), ["new"], timeout_s=0.2))[0]
    assert isinstance(error, ub.errors.TimeoutError)
    store = MemoryStore(dead)
    error = together(member(store, 0, (0, 1), ["new"], timeout_s=0.2))[0]
    assert "process 1 did not take part" in str(error)
    store = MemoryStore(dead)
    found = together(
        member(store, 0, (0, 1), ["new"], after_s=0.1), member(store, 1, (0, 1), ["n"])
    )
    assert found == [[{0: "new", 1: "n"}]] * 2


def test_a_failed_attempt_does_not_affect_the_next():
    store = MemoryStore()
    for missing in (0, 1, 2):
        there = [p for p in range(3) if p != missing]
        errors = together(
            *(member(store, p, (0, 1, 2), ["x"], timeout_s=0.2) for p in there)
        )
        assert all(isinstance(error, ub.errors.CommunicatorError) for error in errors)
        found = together(*(member(store, p, (0, 1, 2), [p]) for p in range(3)))
        assert found == [[{0: 0, 1: 1, 2: 2}]] * 3


def test_a_second_attempt_of_a_process_is_not_mistaken_for_its_first():
    store = MemoryStore()

    def coordinator():
        with ProcessAllGather(store, 0, (0, 1, 2), TIMEOUT_S) as all_gather:
            all_gather.gather("first")
            return all_gather.gather("second")

    def impatient():
        with ProcessAllGather(store, 1, (0, 1, 2), TIMEOUT_S) as all_gather:
            all_gather.gather("first")
        time.sleep(0.2)
        with ProcessAllGather(store, 1, (0, 1, 2), TIMEOUT_S) as all_gather:
            return all_gather.gather("first")

    found = together(
        coordinator, impatient, member(store, 2, (0, 1, 2), ["first", "second"])
    )
    assert "process 1 failed and started again" in str(found[0])
    assert "process 1 failed and started again" in str(found[2])
    assert isinstance(found[1], ub.errors.CommunicatorError)


@pytest.mark.parametrize("late", [0, 1])
def test_a_round_may_have_a_longer_timeout(late, clock):
    store = MemoryStore()

    def other_is_in_the_second_round():
        if late == 0:
            return len(json.loads(store.read("1"))["values"]) == 2
        return waited_for(store) == [1]

    def run(process):
        with ProcessAllGather(store, process, (0, 1), 0.3) as all_gather:
            all_gather.gather("connect")
            if process == late:
                clock.pass_when(other_is_in_the_second_round, 0.6)
            return all_gather.gather("done", timeout_s=6)

    found = together(*(lambda p=p: run(p) for p in range(2)))
    assert found == [{0: "done", 1: "done"}] * 2


def test_several_attempts_at_once_do_not_mix():
    stores = [MemoryStore(), MemoryStore()]
    found = together(
        *(member(stores[i], p, (0, 1), [f"{i}{p}"]) for i in range(2) for p in range(2))
    )
    expected = [[{0: f"{i}0", 1: f"{i}1"}] for i in range(2) for _ in range(2)]
    assert found == expected


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_and_values_always_agree(seed):
    draw = random.Random(seed)
    store, processes = MemoryStore(), draw.sample(range(20), draw.randint(2, 6))
    rounds = draw.randint(1, 4)
    members = [
        member(
            store,
            p,
            processes,
            [[p, r] for r in range(rounds)],
            after_s=draw.random() / 5,
        )
        for p in processes
    ]
    expected = [{p: [p, r] for p in sorted(processes)} for r in range(rounds)]
    assert together(*members) == [expected] * len(processes)
    assert not store

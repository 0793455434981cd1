import errno
import os
import sys
import types

import jax
import pytest

import jax_ub as ub
from jax_ub._src.runtime.bootstrap import mpi
from jax_ub._src.runtime.bootstrap import store as bootstrap_board
from jax_ub._src.runtime.bootstrap.directory import Directory
from jax_ub._src.runtime.bootstrap.mpi import Mpi
from jax_ub._src.runtime.bootstrap.process_all_gather import ProcessAllGather
from jax_ub._src.runtime.bootstrap.store import check_backend, open_board


@pytest.mark.parametrize("backend", ["nccl", "gloo", "jx", 7])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises(
        ub.errors.UnknownNameError, match="Known: 'jax', 'mpi', 'file'.*nccl"
    ):
        ub.initialize_ub((8, 8), 1, bootstrap_backend=backend)
    assert not ub.is_ub_initialized()


def test_files_need_a_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_UB_BOOTSTRAP_DIR", raising=False)
    with pytest.raises(ub.errors.ConfigurationError, match="needs a directory"):
        check_backend("file")
    check_backend("file:/shared")
    monkeypatch.setenv("JAX_UB_BOOTSTRAP_DIR", str(tmp_path))
    check_backend("file")
    assert isinstance(open_board("file", "scope"), Directory)


def test_a_missing_mpi4py_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ub.errors.ConfigurationError, match="pip install mpi4py"):
        ub.initialize_ub((8, 8), 1, bootstrap_backend="mpi")


def test_without_jax_distributed_there_is_no_job():
    with pytest.raises(
        ub.errors.CommunicatorError, match=r"Call jax.distributed.initialize\(\) first"
    ):
        open_board(None, "scope")


@pytest.mark.parametrize("backend", [None, "jax", "file:/nowhere"])
def test_one_process_needs_no_board(backend):
    ub.initialize_ub((8, 8), 1, bootstrap_backend=backend)


def test_notes_of_one_scope_are_not_seen_by_another(tmp_path):
    one, other = (Directory(str(tmp_path), f"axis/{name}") for name in "ab")
    one.write("1", "text\n")
    assert one.read("1") == "text\n"
    assert other.read("1") is None
    one.write("1", "new")
    assert one.read("1") == "new"
    other.erase("1")
    one.erase("1")
    one.erase("1")
    assert one.read("1") is None
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ub.errors.CommunicatorError, match=rf"{file}.*: File exists"):
        open_board(f"file:{file}", "scope")


def test_a_directory_that_takes_no_notes_is_named():
    with pytest.raises(ub.errors.CommunicatorError, match="'/proc', cannot be used"):
        open_board("file:/proc", "scope")


def test_a_note_that_cannot_be_left_leaves_no_draft(tmp_path, monkeypatch):
    store = Directory(str(tmp_path), "scope")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(ub.errors.CommunicatorError, match="No space left"):
            store.write("1", "text")
    assert not list(tmp_path.iterdir())


def test_a_note_that_may_not_be_read_is_an_error_that_names_the_directory(tmp_path):
    store = Directory(str(tmp_path), "scope")
    store.write("1", "text")
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()  # root may read everything else
    with pytest.raises(ub.errors.CommunicatorError, match=f"{tmp_path}.*directory"):
        store.read("1")


def test_jobs_that_share_a_directory_do_not_meet(tmp_path, monkeypatch):
    boards = []
    for name in ("one", "other"):
        monkeypatch.setattr(bootstrap_board, "job", lambda name=name: name)
        boards.append(open_board(f"file:{tmp_path}", "scope"))
    for store in boards:
        store.write("collector", "text")
        boards[0].erase("collector")
    assert [store.read("collector") for store in boards] == [None, "text"]


def test_notes_are_private(tmp_path):
    Directory(str(tmp_path), "scope").write("1", "text")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


class World:
    """One rank's end of an MPI in memory: what mpi4py's COMM_WORLD does, as used."""

    def __init__(self, rank, boxes):
        self._rank, self._boxes = rank, boxes

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return len(self._boxes)

    def isend(self, note, dest, tag):
        self._boxes[dest].append((tag, note))
        return types.SimpleNamespace(test=lambda: (True, None))

    def iprobe(self, tag):
        return any(one[0] == tag for one in self._boxes[self._rank])

    def recv(self, tag):
        device_groups = next(
            i for i, one in enumerate(self._boxes[self._rank]) if one[0] == tag
        )
        return self._boxes[self._rank].pop(device_groups)[1]


def mpi_boards(monkeypatch, count, scope="scope"):
    boxes = [[] for _ in range(count)]
    boards = []
    for rank in range(count):
        mailbox = mpi.Mailbox(World(rank, boxes))
        monkeypatch.setattr(mpi, "mailbox", lambda mailbox=mailbox: mailbox)
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        boards.append(Mpi(scope))
    return boards


def test_processes_agree_through_mpi(monkeypatch):
    import threading

    boards = mpi_boards(monkeypatch, 3)
    found = [None] * 3

    def run(rank):
        with ProcessAllGather(boards[rank], rank, (0, 1, 2), 20) as agreement:
            found[rank] = [agreement.gather(rank), agreement.gather("x")]

    for _ in range(2):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [[{0: 0, 1: 1, 2: 2}, dict.fromkeys(range(3), "x")]] * 3
        found = [None] * 3


def test_notes_of_a_later_board_are_kept_for_it(monkeypatch):
    """Process 0 may begin anew while the others still hear how the first try ended."""
    one, two = mpi_boards(monkeypatch, 2)
    one.write("1", "of the next attempt")
    one._scope = "other"
    one.write("1", "of another group")
    assert two.read("2") is None
    again = Mpi("scope")  # of the last rank
    assert again.read("1") == "of the next attempt"
    again._scope = "other"
    assert again.read("1") == "of another group"
    one.erase("1")
    assert again.read("1") is None


def test_a_long_note_leaves_while_its_readers_look(monkeypatch):
    boxes = [[], []]
    world = World(0, boxes)
    looks = iter([False, False, True])

    def isend(note, dest, tag):
        return types.SimpleNamespace(test=lambda: (next(looks), None))

    world.isend = isend
    monkeypatch.setattr(mpi, "_LONGEST_SEND_S", 60)
    mpi.Mailbox(world).put(("scope", "1"), "text")
    assert list(looks) == []


def test_ranks_of_mpi_must_be_the_processes_of_jax(monkeypatch):
    monkeypatch.setattr(mpi, "mailbox", lambda: mpi.Mailbox(World(1, [[], []])))
    with pytest.raises(
        ub.errors.CommunicatorError, match="rank 1 of 2 in MPI, but process 0 of 1"
    ):
        open_board("mpi", "scope")

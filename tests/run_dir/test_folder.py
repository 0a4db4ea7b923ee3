"""The run folder: unique under concurrent starts, an atomic `latest`, one owner, and files that are old or new."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runner.core import file_lock
from runner.core.errors import EnvironmentProblem, StorageError
from runner.run_dir.folder import (
    RunFolder,
    claim_folder,
    create_run_folder,
    display_path,
    find_run,
    find_trained_run,
    hold_lock,
    is_locked,
    point_latest,
    run_argument,
    write_atomic,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


def start(outputs: str, count: int) -> list[str]:
    found = []
    for _ in range(count):
        folder = create_run_folder("toy", Path(outputs))
        point_latest(folder, Path(outputs))
        found.append(str(folder.root))
    return found


def test_concurrent_starts_get_folders_of_their_own_and_latest_is_whole(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        made = pool.starmap(start, [(str(tmp_path), 40)] * 3)
    roots = [root for each in made for root in each]
    assert len(set(roots)) == 120 and all(Path(root).is_dir() for root in roots)
    assert str((tmp_path / "latest").resolve()) in roots
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_latest_exists_at_every_moment(tmp_path: Path) -> None:
    point_latest(create_run_folder("first", tmp_path), tmp_path)
    missing, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            if not (tmp_path / "latest").is_dir():
                missing.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(200):
        point_latest(create_run_folder("next", tmp_path), tmp_path)
    stop.set()
    looking.join()
    assert missing == []


def test_a_drawn_name_that_is_taken_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("runner.run_dir.folder.secrets.token_hex", lambda n: next(drawn))
    first, second = create_run_folder("toy", tmp_path), create_run_folder("toy", tmp_path)
    assert first.root.name.endswith("-toy-aaaa") and second.root.name.endswith("-toy-bbbb")


@pytest.mark.parametrize("kind", ["a file", "a dangling link", "a file for the day"])
def test_outputs_that_is_no_folder_is_a_storage_error_and_no_endless_loop(tmp_path: Path, kind: str) -> None:
    outputs = tmp_path / "outputs"
    if kind == "a file":
        outputs.write_text("")
    elif kind == "a dangling link":
        outputs.symlink_to(tmp_path / "nowhere" / "at" / "all")
    else:
        day = create_run_folder("toy", outputs).root.parent
        (day / day.name).write_text("")
        outputs = day
    with pytest.raises(StorageError, match="cannot create the run folder"):
        create_run_folder("toy", outputs)


def test_latest_works_where_outputs_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk/deep").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/outputs").symlink_to(tmp_path / "disk/deep")
    monkeypatch.chdir(tmp_path / "home")
    folder = create_run_folder("toy")
    write_atomic(folder.spec, "name: toy\n")
    point_latest(folder)
    assert find_run("latest").root == folder.root.resolve()
    elsewhere = RunFolder(tmp_path / "other")
    elsewhere.root.mkdir()
    write_atomic(elsewhere.spec, "name: toy\n")
    point_latest(elsewhere)
    assert find_run("latest").root == elsewhere.root


def test_a_folder_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/mine").write_text("mine")
    with pytest.raises(StorageError, match="does another file exist there"):
        point_latest(create_run_folder("toy", tmp_path), tmp_path)
    assert (tmp_path / "latest/mine").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("where", ["latest", "nothing/there", "a\0b", "x" * 5000])
def test_what_is_no_run_is_an_environment_problem(tmp_path: Path, where: str) -> None:
    with pytest.raises(EnvironmentProblem):
        find_run(where, tmp_path)


def test_the_newest_run_with_a_checkpoint_stands_in_for_one_without(tmp_path: Path) -> None:
    names = ("2026-01-01/235959-a-1", "2026-01-02/000001-b-2", "2026-01-02/000002-c-3")
    first, second, failed = (RunFolder((tmp_path / name).resolve()) for name in names)
    for run in (first, second, failed):
        run.root.mkdir(parents=True)
        run.spec.touch()
    point_latest(failed, tmp_path)
    assert find_trained_run("latest", tmp_path) == (failed, None)
    for run in (first, second):
        (run.checkpoints / "step-00000002").mkdir(parents=True)
        (run.checkpoints / "step-00000002" / "MANIFEST.json").touch()
    assert find_trained_run("latest", tmp_path) == (second, failed)
    assert find_trained_run(str(failed.root), tmp_path) == (failed, None)
    point_latest(first, tmp_path)
    assert find_trained_run("latest", tmp_path) == (first, None)


def test_an_export_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "spec.yaml").touch()
    with pytest.raises(EnvironmentProblem, match=f"it is an export of the run {tmp_path}"):
        find_run(str(tmp_path / "export"))


def test_a_run_is_found_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run_folder("toy", tmp_path)
    write_atomic(folder.spec, "name: toy\n")
    monkeypatch.chdir(tmp_path)
    assert find_run(str(folder.root.relative_to(tmp_path))).root == folder.root
    assert display_path(folder.root) == str(folder.root.relative_to(tmp_path))
    assert display_path(Path("/elsewhere")) == "/elsewhere"


HOLDER = """
import sys
from pathlib import Path
from runner.run_dir.folder import RunFolder, hold_lock
hold_lock(RunFolder(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_owns_a_run_and_kill_9_frees_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for _ in range(2):  # a refused attempt leaves the owner's number in place
            with pytest.raises(EnvironmentProblem, match=f"process {holder.pid} is running"):
                hold_lock(RunFolder(tmp_path))
        holder.kill()
    lock = hold_lock(RunFolder(tmp_path))
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    lock.release()


def test_a_folder_that_is_gone_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write in"):
        hold_lock(RunFolder(tmp_path / "gone"))


def test_a_reader_sees_the_old_text_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = ["a" * 50_000, "b" * 70_000]
    write_atomic(path, texts[0])
    torn, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            if path.read_text() not in texts:
                torn.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(100):
        write_atomic(path, texts[turn % 2])
    stop.set()
    reader.join()
    assert torn == [] and [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_two_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path, failures = tmp_path / "status.json", []

    def write(text: str) -> None:
        try:
            for _ in range(50):
                write_atomic(path, text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and path.read_text() in ("a" * 1000, "b" * 1000)


LIMITED = """
import resource, sys
from pathlib import Path
from runner.core.errors import StorageError
from runner.run_dir.folder import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomic(Path(sys.argv[1]), "x" * 5000)
except StorageError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomic(path, "old")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "cannot write" in done.stdout and "file is larger than" in done.stdout
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(StorageError, match="No such file"):
        write_atomic(tmp_path / "gone/x", "y")


def test_json_keeps_line_ends_odd_names_and_other_types_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"text": "a\r\nb", "name": os.fsdecode(b"caf\xe9"), "path": Path("p"), "wort": "größer"})
    assert json.loads(path.read_text()) == {"text": "a\r\nb", "name": "caf\udce9", "path": "p", "wort": "größer"}
    assert "größer" in path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert "größer" in path.read_text()


def test_a_folder_of_the_users_choice_holds_one_run(workdir: Path) -> None:
    claimed = claim_folder(Path("here/run"))
    assert claimed.root == workdir / "here" / "run" and claimed.root.is_dir()
    assert claim_folder(Path("here/run")) == claimed  # one that died before it had a spec
    claimed.spec.touch()
    with pytest.raises(EnvironmentProblem, match="continue it: run resume here/run"):
        claim_folder(Path("here/run"))
    with pytest.raises(EnvironmentProblem, match=r"f\udcff is no UTF-8 text"):
        claim_folder(Path(os.fsdecode(b"f\xff")))
    (workdir / "papers").mkdir()
    (workdir / "papers" / "thesis.tex").write_text("mine")
    with pytest.raises(
        EnvironmentProblem, match=r"papers is not empty \(thesis\.tex\), but a run needs its own folder"
    ):
        claim_folder(Path("papers"))
    assert [path.name for path in (workdir / "papers").iterdir()] == ["thesis.tex"]
    (workdir / "file").touch()
    with pytest.raises(EnvironmentProblem, match="file is a file, but a run needs a folder"):
        claim_folder(Path("file"))
    with pytest.raises(StorageError, match="cannot create the run folder"):
        claim_folder(Path("file/run"))


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What `flock` says on a disk without locks; also in a process with this folder in PYTHONPATH."""
    lines = "import errno, fcntl, os\ndef flock(*_): raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(f"{lines}fcntl.flock = flock\n")

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(file_lock, "_said", set())
    return str(tmp_path / "site")


def test_a_disk_without_locks_gets_a_file_with_a_heartbeat(
    tmp_path: Path, without_locks: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    command, own = [sys.executable, "-c", HOLDER, str(folder.root)], {"PYTHONPATH": without_locks}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_locked(folder)
        with pytest.raises(EnvironmentProblem, match=f"process {holder.pid} is running"):
            hold_lock(folder)
        holder.kill()
    assert not is_locked(folder), "a process of this machine that has ended holds nothing"
    lock = hold_lock(folder)
    assert is_locked(folder) and caplog.text.count("has no locks (Function not implemented)") == 1
    lock.release()
    assert not is_locked(folder) and [path.name for path in folder.root.iterdir()] == [".lock"]


def test_the_heartbeat_of_another_machine_counts_for_a_minute(
    tmp_path: Path, without_locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, beat = RunFolder(tmp_path), tmp_path / ".lock.heartbeat"
    (tmp_path / ".lock").write_text("7")
    beat.write_text("elsewhere:boot:pid (7, 7)")
    with pytest.raises(EnvironmentProblem, match="process 7 is running this job"):
        hold_lock(folder)
    os.utime(beat, (time.time() - 61, time.time() - 61))
    monkeypatch.setattr(file_lock, "BEAT_S", 0.01)
    with hold_lock(folder):
        assert not beat.read_text().startswith("elsewhere")
        os.utime(beat, (1, 1))
        deadline = time.monotonic() + 100
        while beat.stat().st_mtime < 2:
            assert time.monotonic() < deadline, "nothing touches the file"


def test_a_disk_without_links_has_latest_in_a_text_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = create_run_folder("toy", tmp_path), create_run_folder("toy", tmp_path)
    write_atomic(first.spec, "name: toy\n")
    with monkeypatch.context() as disk:

        def refused(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        disk.setattr(Path, "symlink_to", refused)
        point_latest(first, tmp_path)
    assert not (tmp_path / "latest").exists() and "latest.txt names the newest run" in caplog.text
    assert run_argument(first, tmp_path) == "latest" and find_run("latest", tmp_path).root == first.root.resolve()
    point_latest(second, tmp_path)
    assert run_argument(second, tmp_path) == "latest" and not (tmp_path / "latest.txt").exists()

"""Row 11: a system call that fails, is interrupted or does less than it says."""

from pathlib import Path

import pytest

from store.slots import Slots
from tests.crash.tracing import Outcome, first_call, needs_strace, run_writer
from tests.slot_samples import expected_payload, key_of, served

pytestmark = needs_strace

WRITING = ["openat", "fallocate", "pwrite64", "fdatasync"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_writer(tmp_path_factory.mktemp("whole"), "one")


def fail(folder: Path, whole: Outcome, call: str, how: str) -> Outcome:
    """Run the writer with its first such call on a slot's file failing once."""
    first = first_call(whole, call)
    return run_writer(folder, "one", fault=f"{call}:{how}:when={first.nth}")


def published(folder: Path) -> Path:
    return Slots(folder / "store" / "slots").path(key_of(1))


@pytest.mark.parametrize("error", ["EIO", "EROFS", "EACCES"])
@pytest.mark.parametrize("call", WRITING)
def test_an_error_drops_the_file(tmp_path: Path, whole: Outcome, call: str, error: str):
    outcome = fail(tmp_path, whole, call, f"error={error}")
    assert outcome.output == "StoreFailed\n"
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_a_failed_sync_is_never_tried_again(tmp_path: Path, whole: Outcome):
    outcome = fail(tmp_path, whole, "fdatasync", "error=EIO")
    assert outcome.count("fdatasync") == 1
    assert outcome.count("rename") == 0
    assert outcome.count("unlink") == 1


def test_where_space_cannot_be_reserved_the_slot_is_written_all_the_same(
    tmp_path: Path, whole: Outcome
):
    assert fail(tmp_path, whole, "fallocate", "error=EOPNOTSUPP").output == "published\n"
    assert served(tmp_path / "store", 1)


@pytest.mark.parametrize("call", [*WRITING, "fsync"])
def test_an_interruption_is_no_error(tmp_path: Path, whole: Outcome, call: str):
    assert fail(tmp_path, whole, call, "error=EINTR").output == "published\n"
    assert served(tmp_path / "store", 1)


def test_a_failed_rename_leaves_only_what_is_swept(tmp_path: Path, whole: Outcome):
    assert fail(tmp_path, whole, "rename", "error=EIO").output == "StoreFailed\n"
    assert not published(tmp_path).exists()
    assert Slots(tmp_path / "store" / "slots").found() == {}
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_a_failed_directory_sync_is_not_acknowledged(tmp_path: Path, whole: Outcome):
    last = [call for call in whole.calls if call.name == "fsync"][-1]
    outcome = run_writer(tmp_path, "one", fault=f"fsync:error=EIO:when={last.nth}")
    assert outcome.output == "StoreFailed\n"
    assert outcome.count("fsync") == whole.count("fsync")
    assert served(tmp_path / "store", 1)


@pytest.mark.parametrize("num_bytes", [0, 1, 10])
def test_a_disk_that_lies_about_a_write_is_found_out(
    tmp_path: Path, whole: Outcome, num_bytes: int
):
    outcome = fail(tmp_path, whole, "pwrite64", f"retval={num_bytes}")
    path = published(tmp_path)
    if not num_bytes:
        assert outcome.output == "StoreFailed\n"
        assert not path.exists()
        return
    assert outcome.output == "published\n"
    payload = path.read_bytes()[-len(expected_payload(1)) :]
    assert payload[num_bytes:] == expected_payload(1)[num_bytes:]
    assert served(tmp_path / "store", 1) is None

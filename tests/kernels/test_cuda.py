"""What is compiled for a GPU, as far as a CPU can tell."""

from pathlib import Path

import pytest

from qerl.kernels.gpu.cuda import keep


def test_a_disk_that_takes_no_kernel_costs_only_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(b"code", tmp_path / "cache" / "a.cubin")
    assert [path.read_bytes() for path in (tmp_path / "cache").iterdir()] == [b"code"]
    (tmp_path / "file").touch()
    keep(b"code", tmp_path / "file" / "a.cubin")  # no folder can be made there
    assert "compiled at every start" in caplog.text
    (tmp_path / "cache" / "b.cubin").mkdir()  # nor a file here
    keep(b"code", tmp_path / "cache" / "b.cubin")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["a.cubin", "b.cubin"]

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.quant.safetensors_io import Reader, Spec, Writer, read_header


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.randn(4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    with Reader() as reader:
        for name, tensor in tensors.items():
            read = reader.read(header[name])
            assert torch.equal(read.view(torch.uint8), tensor.flatten().view(torch.uint8))
        assert torch.equal(reader.read(header["a"], 4, 6), tensors["a"].flatten()[4:10])


def test_the_library_reads_what_is_written_in_pieces(tmp_path: Path) -> None:
    a, b = torch.randn(6, 4), torch.randint(0, 9, (5,))
    writer = Writer(tmp_path / "x.safetensors", {"a": Spec(a.dtype, (6, 4)), "b": Spec(b.dtype, (5,))})
    writer.append("a", a[:2])
    writer.append("b", b)
    assert not (tmp_path / "x.safetensors").exists()
    writer.append("a", a[2:])
    writer.close()
    read = load_file(tmp_path / "x.safetensors")
    assert torch.equal(read["a"], a)
    assert torch.equal(read["b"], b)


def test_an_unfinished_tensor_does_not_pass_for_a_file(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.safetensors", {"a": Spec(torch.float32, (4,))})
    writer.append("a", torch.zeros(3))
    with pytest.raises(AssertionError, match="unfinished"):
        writer.close()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [0, 4, 20, -8])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.randn(8)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"cut\.safetensors is"):
        read_header(path)


def test_a_damaged_header_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"a": torch.randn(8)}, path)
    data = bytearray(path.read_bytes())
    data[9] = ord("!")
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"bad\.safetensors has a damaged"):
        read_header(path)

"""A checkpoint's dtypes are read from its headers; a file that cannot be trusted is an error and not a shorter list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4_fsdp import ContractError
from dsv4_fsdp.checkpoint_headers import fp32_names, header_dtypes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, as a sharded checkpoint has them."""
    save_file({"sinks": torch.ones(4), "weight": torch.ones(4, 4, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    save_file({"norm": torch.ones(2)}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_names_and_dtypes_come_from_every_file(folder: Path) -> None:
    """The metadata entry is no tensor."""
    assert header_dtypes(folder) == {"sinks": "F32", "weight": "BF16", "norm": "F32"}
    assert fp32_names(folder) == ["norm", "sinks"]


@pytest.mark.parametrize("num_bytes", [4, 40, -1], ids=["in the length", "in the header", "in the data"])
def test_a_file_that_is_cut_short_is_refused(folder: Path, num_bytes: int) -> None:
    """Wherever the cut is."""
    file = folder / "a.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ContractError, match=r"cut short.*\n.*\n.*\nwhere: .*a\.safetensors"):
        fp32_names(folder)


def test_noise_is_refused(folder: Path) -> None:
    """A header that is no JSON."""
    (folder / "a.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    with pytest.raises(ContractError, match="damaged"):
        fp32_names(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Rather than a checkpoint without fp32."""
    with pytest.raises(ContractError, match="no checkpoint found"):
        fp32_names(tmp_path)

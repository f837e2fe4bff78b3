"""What a safetensors checkpoint says about dtypes, from its headers alone: no weight is read.

The class list of a library version and the checkpoint may disagree on what is fp32; a list that lost an entry would
turn that tensor into bf16 on the next save. The contract is the union: pass :func:`fp32_names` as ``fp32_params``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from .errors import ContractError

__all__ = ["fp32_names", "header_dtypes"]


def header_dtypes(folder: str | Path) -> dict[str, str]:
    """The dtype of every tensor in the ``*.safetensors`` files of ``folder``, as safetensors names it (``"F32"``).

    Raises:
        ContractError: there is no such file, or one is truncated.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ContractError(
            f"no checkpoint found.\nexpected: *.safetensors files\ngot: none\nwhere: {folder}\n"
            "what to do: name the folder that holds the model's safetensors files."
        )
    dtypes: dict[str, str] = {}
    for file in files:
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            header = handle.read(length) if 0 <= length <= file.stat().st_size else b""
        if len(header) != length:
            raise ContractError(
                f"a checkpoint file is cut short.\nexpected: a header of {max(length, 8)} bytes\n"
                f"got: {file.stat().st_size} bytes in all\nwhere: {file}\nwhat to do: fetch the file again."
            )
        dtypes |= {name: entry["dtype"] for name, entry in json.loads(header).items() if name != "__metadata__"}
    return dtypes


def fp32_names(folder: str | Path) -> list[str]:
    """The names of the tensors that the checkpoint in ``folder`` stores in fp32, in the Transformers layout's names."""
    return sorted(name for name, dtype in header_dtypes(folder).items() if dtype == "F32")

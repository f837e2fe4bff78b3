"""What a safetensors checkpoint says about dtypes, from its headers alone: no weight is read.

The class list of a library version and the checkpoint may disagree on what is fp32; a list that lost an entry would
turn that tensor into bf16 on the next save. The contract is the union: pass :func:`fp32_names` as ``fp32_params``.
"""

from __future__ import annotations

from pathlib import Path

from .errors import ContractError
from .safetensors_headers import read_header

__all__ = ["fp32_names", "header_dtypes"]


def header_dtypes(folder: str | Path) -> dict[str, str]:
    """The dtype of every tensor in the ``*.safetensors`` files of ``folder``, as safetensors names it (``"F32"``).

    Raises:
        ContractError: there is no such file, or one is truncated or damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ContractError(
            f"no checkpoint found.\nexpected: *.safetensors files\ngot: none\nwhere: {folder}\n"
            "what to do: name the folder that holds the model's safetensors files."
        )
    dtypes: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        if header.problem is not None:
            kind, expected, found = header.problem
            state = "cut short" if kind == "truncated-file" else "damaged"
            raise ContractError(
                f"a checkpoint file is {state}.\nexpected: {expected}\ngot: {found}\nwhere: {file}\n"
                "what to do: fetch the file again."
            )
        dtypes |= {name: tensor.dtype for name, tensor in header.tensors.items()}
    return dtypes


def fp32_names(folder: str | Path) -> list[str]:
    """The names of the tensors that the checkpoint in ``folder`` stores in fp32, in the Transformers layout's names."""
    return sorted(name for name, dtype in header_dtypes(folder).items() if dtype == "F32")

"""Each mistake of a user: the whole message, pinned; the model as it was; and the right call works afterwards.

The messages are in ``golden/``, one file each. After a change of wording on purpose, write them again with

    UPDATE_GOLDEN=1 make test TESTARGS=tests/test_error_messages.py

and read the diff as a tired user would: what was checked, expected, got, where, what to do.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from cases_errors import MISTAKES, Outcome, make
from torch.distributed.device_mesh import init_device_mesh

from pool import RankFailure, run_ranks

GOLDEN = Path(__file__).parent / "golden"

ERRORS = dict.fromkeys(MISTAKES, "ShardingError") | {
    "contract_of_another_model": "ContractError",
    "fp32_params_match_some_names_in_a_unit": "ContractError",
    "fp32_params_is_a_contract": "ContractError",
    "fp32_params_is_one_string": "ContractError",
    "fp32_params_match_nothing_in_a_model": "ContractError",
    "fp32_params_match_nothing_in_a_unit": "ContractError",
    "islands_in_bf16": "ContractError",
    "islands_in_bf16_in_a_unit": "ContractError",
    "tied_pair_wants_two_dtypes": "ContractError",
    "torch_too_old": "UnsupportedTorch",
}


@functools.cache
def outcome_of(name: str) -> Outcome:
    """The last rank's; that the right call worked afterwards is asserted inside."""
    return run_ranks(MISTAKES[name].ranks, make, name)[-1]


@pytest.mark.parametrize("name", MISTAKES)
def test_message_is_the_pinned_one(name: str) -> None:
    """Word for word; this torch's version aside."""
    message = outcome_of(name).message.replace(torch.__version__, "<installed version>") + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(message)
    assert message == path.read_text()


@pytest.mark.parametrize("name", MISTAKES)
def test_error_is_ours_and_what_python_would_raise(name: str) -> None:
    """Caught as our base, and as ``ValueError`` (``RuntimeError`` for a wrong torch)."""
    outcome = outcome_of(name)
    assert outcome.error == ERRORS[name]
    assert "Dsv4FsdpError" in outcome.bases
    assert ("RuntimeError" if name == "torch_too_old" else "ValueError") in outcome.bases


@pytest.mark.parametrize("name", MISTAKES)
def test_message_says_what_was_expected_and_got_and_what_to_do(name: str) -> None:
    """In this order, the headline first and short enough for one line of a log."""
    headline, *rest = outcome_of(name).message.splitlines()
    assert len(headline) <= 120
    starts = [line.partition(":")[0].partition(",")[0] for line in rest if not line.startswith("  ")]
    assert [word for word in starts if word in ("expected", "got", "what to do")] == ["expected", "got", "what to do"]


@pytest.mark.parametrize("name", MISTAKES)
def test_error_leaves_the_model_as_it_was(name: str) -> None:
    """Same parameters, dtypes, classes and hooks: nothing sharded, tied, frozen or cast on the way to the error."""
    assert outcome_of(name).changed == []


def test_every_golden_file_belongs_to_a_mistake() -> None:
    """A renamed test leaves no stale file behind."""
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(MISTAKES)


def make_a_mesh_of_two() -> None:
    init_device_mesh("cpu", (2,))


def test_a_mesh_larger_than_the_world_fails_before_there_is_anything_to_shard() -> None:
    """torch's own error, from making the mesh; none of our functions is reached with such a mesh."""
    with pytest.raises(RankFailure, match=r"Mesh should not be bigger than default world size 1, but found 2 ranks"):
        run_ranks(1, make_a_mesh_of_two)

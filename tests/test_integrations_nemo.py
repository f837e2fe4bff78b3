"""NeMo AutoModel's own parallelizer on its own model, with ``install()`` and without."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
from cases_integrations import nemo_lockstep
from reference import assert_lockstep
from tiny_models import cpu_stand_ins, require_nemo

from dsv4_fsdp.errors import ShardingError
from dsv4_fsdp.integrations import UnsupportedLibrary, nemo

PARALLELIZATION = "nemo_automodel.components.models.deepseek_v4.parallelization"
FSDP = "nemo_automodel.components.models.deepseek_v4.fsdp"
UTILS = "nemo_automodel.components.distributed.parallelizer_utils"


@pytest.fixture(autouse=True)
def _nemo() -> None:
    require_nemo()


def _counts(results: list[Any]) -> dict[str, int]:
    counts = [dict(Counter(collective.kind for collective in r.steps[0].collectives)) for r in results]
    assert all(each == counts[0] for each in counts)
    return counts[0]


@pytest.mark.parametrize(
    ("driver", "nested", "grouped"),
    [
        ("fsdp2", {"all_gather": 92, "reduce_scatter": 54, "all_reduce": 4}, {"all_gather": 35, "reduce_scatter": 20}),
        ("moe", {"all_gather": 100, "reduce_scatter": 54, "all_reduce": 4}, {"all_gather": 40, "reduce_scatter": 20}),
    ],
)
def test_installed_grouped_units_need_about_a_third_of_the_collectives_of_one_step(
    run_ranks: Any, driver: str, nested: dict[str, int], grouped: dict[str, int]
) -> None:
    """Eight blocks, two ranks, through NeMo's drivers; nested units installed are what NeMo does by itself."""
    assert _counts(run_ranks(2, nemo_lockstep, driver, "stock", eight_blocks=True)) == nested
    assert _counts(run_ranks(2, nemo_lockstep, driver, "nested", eight_blocks=True)) == nested
    results = run_ranks(2, nemo_lockstep, driver, "grouped", eight_blocks=True)
    assert _counts(results) == grouped
    assert_lockstep(results)


@pytest.mark.parametrize("driver", ["fsdp2", "moe"])
def test_installed_it_follows_the_unsharded_model_with_short_and_long_sequences(run_ranks: Any, driver: str) -> None:
    """Bit-equal forward, which NeMo's own units do not reach; no alignment collective."""
    results = run_ranks(2, nemo_lockstep, driver, "grouped", eight_blocks=False)
    assert "all_reduce" not in _counts(results)
    assert_lockstep(results, zero_for_none="any")
    assert not all(all(r.bit_equal) for r in run_ranks(2, nemo_lockstep, driver, "stock", eight_blocks=False))


# --- The patch itself -------------------------------------------------------------------------------------------------


def _names() -> list[Any]:
    cpu_stand_ins()
    definition, parallelization, utils = (importlib.import_module(name) for name in (FSDP, PARALLELIZATION, UTILS))
    return [
        definition.fully_shard_deepseek_v4,
        parallelization.fully_shard_deepseek_v4,
        utils.fully_shard_by_dtype,
    ]


def test_install_binds_every_place_and_uninstall_puts_all_back() -> None:
    """Once or twice installed, with either kind of unit."""
    before = _names()
    assert len(set(map(id, before))) == 2
    try:
        nemo.install()
        assert [old is new for old, new in zip(before, _names(), strict=True)] == [False, False, False]
        nemo.install("nested")
        assert [old is new for old, new in zip(before, _names(), strict=True)] == [False, False, True]
    finally:
        nemo.uninstall()
    assert _names() == before
    nemo.uninstall()
    assert _names() == before


def test_the_context_puts_back_what_was_there_also_after_an_exception() -> None:
    """Stock outside, or another installation."""
    before = _names()
    with nemo.installed("nested"):
        nested = _names()
        with pytest.raises(KeyError), nemo.installed("grouped"):
            raise KeyError
        assert _names() == nested
    assert _names() == before


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (FSDP, "fully_shard_deepseek_v4", "fully_shard_deepseek_v4 is missing"),
        (PARALLELIZATION, "fully_shard_deepseek_v4", "is not the function of"),
        (PARALLELIZATION, "DeepseekV4ModelParallelizer", "DeepseekV4ModelParallelizer is missing"),
        (UTILS, "fully_shard_by_dtype", "fully_shard_by_dtype is missing"),
    ],
)
def test_unknown_internals_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, said: str
) -> None:
    """Nothing is patched, and the message says what differs and what to do."""
    _names()
    monkeypatch.setattr(importlib.import_module(module), name, None)
    before = _names()
    with pytest.raises(UnsupportedLibrary) as error:
        nemo.install()
    assert said in str(error.value)
    assert "expected: nemo-automodel 0.7.0" in str(error.value)
    assert _names() == before


def test_another_kind_of_unit_is_refused() -> None:
    """``"auto"`` too: NeMo's model always has its layout."""
    with pytest.raises(ShardingError, match="has no such kind"):
        nemo.install("auto")  # type: ignore[arg-type]

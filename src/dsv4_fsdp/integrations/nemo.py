"""NeMo AutoModel's DeepSeek-V4 through its own parallelizer, with our units. Tested with nemo-automodel 0.7.0.

::

    import dsv4_fsdp.integrations.nemo

    dsv4_fsdp.integrations.nemo.install()  # once, before the model is built and sharded

NeMo AutoModel shards DeepSeek-V4 by a function of its own, ``fully_shard_deepseek_v4``. Its nested units need one
all-gather per fp32 module; grouped units keep the same tensors in fp32 with one per dtype, and need no collective to
align short sequences. Meshes, expert parallelism, checkpointing, policies and the order of sharding stay NeMo's.

What is patched, in every module of ``nemo_automodel`` that holds the name, also in those that are imported later:

- ``fully_shard_deepseek_v4``, which the parallelizer calls for blocks, embedding, head and roots, becomes
  :func:`dsv4_fsdp.fsdp.fully_shard_deepseek_v4`;
- for grouped units ``fully_shard_by_dtype`` as well, which NeMo's MoE driver (expert parallelism) calls for each block:
  it would hand over a block's fp32 modules one by one. For DeepSeek-V4's parallelizer it now hands over the block; for
  any other it is NeMo's.

:func:`uninstall` puts them back; ``with installed(): ...`` does both.

Limits: DeepSeek-V4.1 shards through the same function and gets the same units, which is not tested. A head whose
precision NeMo is told by ``lm_head_precision`` is sharded by torch's own function, as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from dsv4_fsdp import fsdp
from dsv4_fsdp.errors import ShardingError

from . import TESTED_VERSIONS as _ALL_TESTED
from . import UnsupportedLibrary, mark_replacement, refuse_unknown_internals, signature_problem, unpatched

__all__ = ["TESTED_VERSIONS", "install", "installed", "uninstall"]

TESTED_VERSIONS = _ALL_TESTED["nemo-automodel"]

IslandUnits = Literal["nested", "grouped"]

_FUNCTION = "fully_shard_deepseek_v4"
_BY_DTYPE = "fully_shard_by_dtype"
_DEFINED_IN = {
    _FUNCTION: "nemo_automodel.components.models.deepseek_v4.fsdp",
    _BY_DTYPE: "nemo_automodel.components.distributed.parallelizer_utils",
}
_PARALLELIZATION = "nemo_automodel.components.models.deepseek_v4.parallelization"
_PARALLELIZER = "DeepseekV4ModelParallelizer"


def install(island_units: IslandUnits = "grouped") -> None:
    """Make NeMo AutoModel shard DeepSeek-V4 by :func:`dsv4_fsdp.fsdp.fully_shard_deepseek_v4`.

    Installing again with other ``island_units`` replaces what was installed.

    Args:
        island_units: ``"grouped"``: one unit per module, one parameter group per dtype, compressors tied. ``"nested"``:
            NeMo's own units, with our checks: what its function does, for a comparison or a step-by-step move.

    Raises:
        UnsupportedLibrary: nemo-automodel is missing or its internals are not those known here; nothing is patched.
        ShardingError: ``island_units`` is neither.
    """
    if island_units not in get_args(IslandUnits):
        raise ShardingError(
            "island_units has no such kind.\n"
            f"expected: {' or '.join(map(repr, get_args(IslandUnits)))}\ngot: {island_units!r}\n"
            'what to do: leave it out, or ask for "nested" to keep NeMo AutoModel\'s own units.'
        )
    originals, parallelizer = _known_internals()

    @functools.wraps(fsdp.fully_shard_deepseek_v4)
    def fully_shard_deepseek_v4(*args: Any, **kwargs: Any) -> Any:
        return fsdp.fully_shard_deepseek_v4(*args, **{"island_units": island_units, **kwargs})

    @functools.wraps(originals[_BY_DTYPE])
    def fully_shard_by_dtype(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(originals[_BY_DTYPE]).bind(*args, **kwargs).arguments
        if not isinstance(call.get("model_parallelizer"), parallelizer):
            return originals[_BY_DTYPE](*args, **kwargs)
        module = call["module"]
        options = {name: call[name] for name in _HANDED_ON if call.get(name) is not None}
        return call["model_parallelizer"]._fully_shard_module(module, **options)

    uninstall()
    _rebind(_FUNCTION, mark_replacement(fully_shard_deepseek_v4, originals[_FUNCTION]))
    if island_units == "grouped":
        _rebind(_BY_DTYPE, mark_replacement(fully_shard_by_dtype, originals[_BY_DTYPE]))


# What `fully_shard_by_dtype` passes to the function that shards. Not among them: the names of fp32 modules, by which it
# divides a block; a grouped unit knows its islands itself.
_HANDED_ON = ("mesh", "mp_policy", "offload_policy", "reshard_after_forward", "ignored_params")


def uninstall() -> None:
    """Put NeMo AutoModel's own functions back; does nothing if ours are not installed."""
    for name, found in _bound().items():
        _rebind(name, unpatched(found))


@contextmanager
def installed(island_units: IslandUnits = "grouped") -> Iterator[None]:
    """:func:`install` within the context; afterwards what was there before, on any exit."""
    before = _bound()
    install(island_units)
    try:
        yield
    finally:
        uninstall()
        for name, found in before.items():
            _rebind(name, found)


def _bound() -> dict[str, Any]:
    """What the names are bound to now, as far as NeMo AutoModel is imported."""
    modules = {name: sys.modules.get(module) for name, module in _DEFINED_IN.items()}
    return {name: getattr(module, name) for name, module in modules.items() if module is not None}


def _rebind(function: str, replacement: Callable[..., Any]) -> None:
    """Bind the name to ``replacement`` wherever in NeMo AutoModel it stands for the same original.

    Modules that are imported later take it from the defining module, which is among these.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "nemo_automodel" and module is not None:
            found = vars(module).get(function)
            if found is not None and unpatched(found) is unpatched(replacement):
                setattr(module, function, replacement)


def _known_internals() -> tuple[dict[str, Any], type]:
    """NeMo AutoModel's own functions and its parallelizer's class, if they are as this file needs them."""
    try:
        owners = {name: importlib.import_module(module) for name, module in _DEFINED_IN.items()}
        parallelization: Any = importlib.import_module(_PARALLELIZATION)
        version = importlib.import_module("nemo_automodel").__version__
    except ImportError as error:
        raise UnsupportedLibrary(
            f"cannot import NeMo AutoModel's DeepSeek-V4.\nexpected: nemo-automodel {', '.join(TESTED_VERSIONS)}\n"
            f"got: {error}\nwhat to do: install it, or shard with dsv4_fsdp.parallelize, which takes its models too."
        ) from error
    originals = {name: unpatched(getattr(owner, name, None)) for name, owner in owners.items()}
    parallelizer = getattr(parallelization, _PARALLELIZER, None)
    problems = [
        signature_problem(
            owners[_FUNCTION], _FUNCTION, ("module", "mesh", "mp_policy", "offload_policy", "fsdp_kwargs")
        ),
        signature_problem(
            owners[_BY_DTYPE],
            _BY_DTYPE,
            (
                "module",
                "mesh",
                "mp_policy",
                "offload_policy",
                "fp32_compute_module_names",
                "reshard_after_forward",
                "ignored_params",
                "model_parallelizer",
            ),
        ),
    ]
    if not isinstance(parallelizer, type):
        problems.append(f"{_PARALLELIZATION}.{_PARALLELIZER} is missing")
    else:
        problems.append(
            signature_problem(parallelizer, "_fully_shard_module", ("self", "module", "kwargs"), uses=(_FUNCTION,))
        )
    if unpatched(getattr(parallelization, _FUNCTION, None)) is not originals[_FUNCTION]:
        problems.append(f"{_PARALLELIZATION}.{_FUNCTION} is not the function of {_DEFINED_IN[_FUNCTION]}")
    refuse_unknown_internals("nemo-automodel", str(version), TESTED_VERSIONS, [p for p in problems if p])
    assert isinstance(parallelizer, type)
    return originals, parallelizer

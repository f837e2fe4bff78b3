"""The private torch names that the engine stands on are there, with the signatures and the behaviour it relies on."""

from __future__ import annotations

import ast
import importlib
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dsv4_fsdp
from dsv4_fsdp import UnsupportedTorch, torch_private
from pool import run_ranks

FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (f"{FULLY_SHARD}._fully_shard", "_init_param_group"),
        (f"{FULLY_SHARD}._fsdp_init", "_get_managed_modules"),
        (f"{FULLY_SHARD}._fsdp_init", "_get_managed_states"),
        (f"{FULLY_SHARD}._fsdp_state", "_get_module_fsdp_state"),
        (f"{FULLY_SHARD}._fsdp_param_group", "FSDPParamGroup"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointImpl"),
    ],
)
def test_private_name_is_there(module: str, name: str) -> None:
    """Each name, where the engine looks for it."""
    assert hasattr(importlib.import_module(module), name)


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_init_param_group_takes_what_the_engine_passes_on() -> None:
    """Positions matter: the engine replaces the second argument and the one at ``rest[5]``."""
    init_param_group = torch_private._fully_shard_module()._init_param_group
    names = list(parameters_of(init_param_group))
    assert tuple(names[:10]) == torch_private._INIT_PARAM_GROUP_PARAMETERS
    assert names[:2] == ["state", "params"]
    assert names[2:][5] == "mp_policy"
    assert names[9] == "reshard_after_forward"


def test_fully_shard_calls_init_param_group_through_its_module() -> None:
    """The one call site, by its module-level name and with nine positional arguments: what ``grouping_hook`` swaps."""
    source = inspect.getsource(torch_private._fully_shard_module())
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "_init_param_group"
    ]
    assert len(calls) == 1
    assert len(calls[0].args) == 9
    assert [keyword.arg for keyword in calls[0].keywords] == ["reshard_after_forward"]


def test_managed_helpers_take_modules_and_ignored_parameters() -> None:
    """The first two parameters of both; what comes after has defaults."""
    init = torch_private._init_module()
    for function in (init._get_managed_modules, init._get_managed_states):
        first, second, *rest = parameters_of(function).values()
        assert second.name == "ignored_params"
        assert first.default is inspect.Parameter.empty
        assert all(parameter.default is not inspect.Parameter.empty for parameter in rest)


def test_managed_parameters_are_in_fully_shards_order() -> None:
    """Children before their parent, ignored parameters left out, nothing changed."""
    inner = nn.Linear(2, 2)
    outer = nn.Module()
    outer.own = nn.Parameter(torch.rand(2))
    outer.inner = inner
    assert _same(torch_private.managed_parameters([outer], None), [inner.weight, inner.bias, outer.own])
    assert _same(torch_private.managed_parameters([outer], {inner.bias}), [inner.weight, outer.own])
    assert torch_private.fsdp_state(outer) is None


def _same(found: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    return [id(param) for param in found] == [id(param) for param in expected]


def test_grouping_hook_is_restored_on_any_exit() -> None:
    """Also after an exception, and one inside the other."""
    module = torch_private._fully_shard_module()
    original = module._init_param_group
    with pytest.raises(RuntimeError, match="inside"):
        _raise_inside(original)
    assert module._init_param_group is original


def _raise_inside(original: Any) -> None:
    module = torch_private._fully_shard_module()
    with torch_private.grouping_hook(lambda original, args, kwargs: None):
        outer = module._init_param_group
        assert outer is not original
        with torch_private.grouping_hook(lambda original, args, kwargs: None):
            assert module._init_param_group not in (outer, original)
        assert module._init_param_group is outer
        raise RuntimeError("inside")


def test_grouping_hook_holds_off_another_thread() -> None:
    """Two threads must not see each other's hook: the second waits until the first has left."""
    entered = threading.Event()

    def other() -> None:
        with torch_private.grouping_hook(lambda original, args, kwargs: None):
            entered.set()

    thread = threading.Thread(target=other, daemon=True)
    with torch_private.grouping_hook(lambda original, args, kwargs: None):
        thread.start()
        assert not entered.wait(0.1)
    thread.join(timeout=10)
    assert entered.is_set()


def test_native_override_is_what_torch_2_15_has() -> None:
    """Found by its field, and it must agree with the version where that is known."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert torch_private.has_native_override() is (version >= (2, 15))


def test_reduce_dtype_is_what_the_policy_says_or_what_torch_derives() -> None:
    """Said: that. Not said: the compute dtype, on torch >= 2.15 the storage dtype."""
    said = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    assert torch_private.reduce_dtype(said, torch.float32, torch.bfloat16) == torch.float16
    silent = MixedPrecisionPolicy(torch.bfloat16)
    derived = torch.float32 if torch_private.has_native_override() else torch.bfloat16
    assert torch_private.reduce_dtype(silent, torch.float32, torch.bfloat16) == derived


@pytest.mark.parametrize("found", ["missing", "other signature"])
def test_a_torch_without_parameter_groups_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by looking, not by the version; the message says what it found."""
    module = torch_private._fully_shard_module()
    if found == "missing":
        monkeypatch.delattr(module, "_init_param_group")
        expected = "has no `_init_param_group`"
    else:
        monkeypatch.setattr(module, "_init_param_group", lambda state, params: None)
        expected = r"has `_init_param_group\(state, params\)`"
    with pytest.raises(UnsupportedTorch, match=expected):
        torch_private.require_grouped_units()


def test_the_checked_versions_hold_the_installed_one() -> None:
    """A pin that moves past the checked versions must move the list as well."""
    assert torch.__version__.split("+")[0] in torch_private.CHECKED_TORCH_VERSIONS


# --- On a real unit ---------------------------------------------------------------------------------------------------


def live_unit() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    dsv4_fsdp.fully_shard([model[0], model[1]], mesh=mesh, fp32_params=_stored_in_fp32, mp_policy=_BF16)
    dsv4_fsdp.fully_shard(model, mesh=mesh)
    units = list(torch_private.parameter_groups(model))
    _, first = units[0]
    fsdp_param = first.fsdp_params[0]
    before = torch_private.unreduced_gradient(fsdp_param)
    return {
        "units": [name for name, _ in units],
        "states": [torch_private.fsdp_state(m) is torch_private.fsdp_state(model[0]) for m in (model[1], model)],
        "storages": [[str(p.sharded_param.dtype) for p in group.fsdp_params] for _, group in units],
        "padded": [tuple(fsdp_param.padded_sharded_param_size), tuple(first.fsdp_params[1].padded_sharded_param_size)],
        "gradient": before,
    }


_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _stored_in_fp32(fqn: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32


def test_a_live_unit_has_the_attributes_that_are_read() -> None:
    """A list unit comes once under its first module; its groups hold their sharded parameters, sizes padded."""
    for seen in run_ranks(2, live_unit):
        assert seen["units"] == ["0", "0"]
        assert seen["states"] == [True, False]
        assert seen["storages"] == [["torch.float32"] * 2, ["torch.bfloat16"] * 2]
        assert seen["padded"] == [(2, 4), (2,)]  # 3 rows on 2 ranks: 2 each, one of them padding
        assert seen["gradient"] is None


# --- Nobody else reaches into torch -----------------------------------------------------------------------------------


def test_no_other_module_of_the_package_imports_a_private_torch_name() -> None:
    """``torch_private`` is the one place; torch's checkpoint wrapper, which it publishes nowhere else, aside."""
    allowed = {"torch.distributed.algorithms._checkpoint.checkpoint_wrapper"}
    found = set()
    for path in Path(dsv4_fsdp.__file__).parent.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith("torch") and any(part.startswith("_") for part in name.split(".")):
                    if not any(name.startswith(prefix) for prefix in allowed):
                        found.add(f"{path.name}: {name}")
    assert not found

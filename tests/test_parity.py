"""The forward is bit-equal to the unsharded model and the gradients are right, for every way of using the engine."""

from __future__ import annotations

import math

import pytest
from cases_parity import LINES, five_adamw_steps, ignored_names, meta_parity, parity
from reference import assert_lockstep
from tiny_models import ModelKind, require_nemo

from pool import run_ranks

CASES = [
    pytest.param(name, kind, mesh, id=f"{name}-{kind}-{'x'.join(map(str, mesh))}")
    for name, line in LINES.items()
    for kind in line.kinds
    for mesh in line.meshes
]


@pytest.mark.parametrize(("line", "kind", "mesh"), CASES)
def test_forward_is_bit_equal_and_gradients_are_right(line: str, kind: ModelKind, mesh: tuple[int, ...]) -> None:
    """One step in lock-step with the unsharded model, each rank with a sequence of another length."""
    if kind == "nemo":
        require_nemo()
    results = run_ranks(math.prod(mesh), parity, line, kind, mesh)
    # The tie gives a compressor zeros where a single process leaves None because no rank had a window.
    assert_lockstep(
        results,
        grad_tol=LINES[line].grad_tol,
        zero_for_none="any",
        unsharded=ignored_names(kind) if line == "ignored_params" else (),
    )


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_model_sharded_on_meta_and_loaded_is_bit_equal(kind: ModelKind, mesh: tuple[int, ...]) -> None:
    """Meta-device construction, sharding, to_empty, load: the same model as one built on the CPU."""
    if kind == "nemo":
        require_nemo()
    assert_lockstep(run_ranks(math.prod(mesh), meta_parity, kind, mesh), zero_for_none="any")


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("kind", ["transformers", "nemo"])
def test_parameters_agree_after_five_adamw_steps(kind: ModelKind, mesh: tuple[int, ...]) -> None:
    """Five AdamW steps without putting the models back together."""
    if kind == "nemo":
        require_nemo()
    results = run_ranks(math.prod(mesh), five_adamw_steps, kind, mesh)
    # Adam's first steps move each element by about lr whatever its gradient's size, so an element whose gradient is
    # nothing but rounding may move the other way: 2 * lr * 5 steps apart at most, 1e-2 of a weight of size 1 and rarely
    # that. As a norm over a whole parameter 2e-2 covers it; a parameter that did not train is off by much more.
    assert_lockstep(results, grad_tol=math.inf, param_tol=2e-2, drift_tol=math.inf, zero_for_none="any")

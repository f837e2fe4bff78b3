"""One line each to make the tools that people already train with keep DeepSeek-V4's fp32 islands.

=====================================  =========================================================================
tool                                   line
=====================================  =========================================================================
transformers, ``distributed_config=``  ``with dsv4_fsdp.keep_fp32_islands():`` around ``from_pretrained``
accelerate (FSDP2), ``Trainer``        ``with dsv4_fsdp.keep_fp32_islands():`` around ``prepare`` or ``train()``
TRL's ``SFTTrainer``                   the same around ``train()``, and ``SFTConfig(router_aux_loss_coef=0.0)``
NeMo AutoModel                         ``dsv4_fsdp.integrations.nemo.install()``, once, before the model is built
torchtitan, plain scripts              ``from dsv4_fsdp import fully_shard`` in place of torch's
=====================================  =========================================================================

Each rebinds a name or two of the library for as long as it is asked to, looks first whether these names are what it
was written for (:class:`UnsupportedLibrary` if not), and changes none of the library's code. What exactly, and the
versions that were tested, is in the docstrings of the modules in this package. None of them is imported before use,
and neither is the library: the engine goes on to need torch only.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

from dsv4_fsdp.errors import Dsv4FsdpError

__all__ = ["TESTED_VERSIONS", "UnsupportedLibrary", "keep_fp32_islands"]

TESTED_VERSIONS = {
    "transformers": ("5.24.0",),
    "accelerate": ("1.15.0",),
    "trl": ("1.16.0",),
    "nemo-automodel": ("0.7.0",),
}
"""Package -> the versions that the tests ran with."""

Library = Literal["transformers", "accelerate"]


class UnsupportedLibrary(Dsv4FsdpError, RuntimeError):
    """A library that was to be patched is missing, or its internals are not those that the patch was written for."""


@contextmanager
def keep_fp32_islands(*libraries: Library, accelerate_upcast: bool = True) -> Iterator[None]:
    """While it is active, transformers and accelerate shard models in one grouped unit per block, islands in fp32.

    ::

        with keep_fp32_islands():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype="bfloat16", distributed_config=DistributedConfig(fsdp_size=8)
            )

        with keep_fp32_islands():
            model, optimizer = accelerator.prepare(model, optimizer)  # or trainer.train()

    Only the sharding must happen inside; train wherever you like. It is a decorator too. Islands compute and reduce in
    fp32 whatever the policy says, everything else as the library was told to. Compressors are tied and Lightning
    Indexers frozen (:mod:`dsv4_fsdp.alignment`), as :func:`dsv4_fsdp.parallelize` does. See
    :mod:`dsv4_fsdp.integrations.transformers` and :mod:`dsv4_fsdp.integrations.accelerate` for what is patched.

    The patch is of the process, not of a thread. It is undone on any exit, and may be nested.

    Args:
        libraries: which libraries to patch; default: those of the two that are installed.
        accelerate_upcast: accelerate stores every trainable parameter in fp32 before it shards (master weights) if
            mixed precision is on. ``False`` leaves the storage as loaded: bf16 weights, fp32 islands, half the memory.

    Raises:
        UnsupportedLibrary: on entry; a library is missing or has other internals than those known here.
        ContractError: an island is stored below fp32 when the library shards the model, or once it has loaded it.
        ValueError: an unknown library, or ``accelerate_upcast=False`` where accelerate is not patched.
    """
    if unknown := [name for name in libraries if name not in get_args(Library)]:
        raise ValueError(
            f"keep_fp32_islands does not know {unknown[0]!r}.\nexpected: any of {', '.join(get_args(Library))}\n"
            "what to do: leave the names out, or see dsv4_fsdp.integrations for other tools."
        )
    chosen = libraries or tuple(name for name in get_args(Library) if importlib.util.find_spec(name) is not None)
    if not chosen:
        raise UnsupportedLibrary(
            "keep_fp32_islands has nothing to patch.\nexpected: transformers or accelerate\ngot: neither is installed\n"
            'what to do: pip install "dsv4-fsdp[train]", or shard with dsv4_fsdp.parallelize.'
        )
    if not accelerate_upcast and "accelerate" not in chosen:
        raise ValueError(
            "accelerate_upcast=False has no effect.\nexpected: accelerate among the patched libraries\n"
            f"got: {', '.join(chosen)}\nwhat to do: leave it out; transformers itself stores weights as loaded."
        )
    with ExitStack() as stack:
        if "transformers" in chosen:
            from .transformers import native_sharding_patched

            stack.enter_context(native_sharding_patched())
        if "accelerate" in chosen:
            from .accelerate import prepare_patched

            stack.enter_context(prepare_patched(upcast=accelerate_upcast))
        yield


# --- What the integrations share --------------------------------------------------------------------------------------

_ORIGINAL = "_dsv4_fsdp_original"


@contextmanager
def rebound(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context ``module.name`` is ``make(original)``; afterwards it is what it was, on any exit.

    ``make`` gets the library's own function also where a context around this one has rebound the name already.
    """
    before = getattr(module, name)
    original = unpatched(before)
    setattr(module, name, mark_replacement(make(original), original))
    try:
        yield
    finally:
        setattr(module, name, before)


def mark_replacement(replacement: Any, original: Any) -> Any:
    """``replacement``, from which :func:`unpatched` finds ``original`` again."""
    setattr(replacement, _ORIGINAL, original)
    return replacement


def unpatched(function: Any) -> Any:
    """The library's own function behind one of our replacements; anything else as it is."""
    return getattr(function, _ORIGINAL, function)


def refuse_unknown_internals(library: str, version: str, tested: tuple[str, ...], problems: list[str]) -> None:
    """Raise :class:`UnsupportedLibrary` if there are ``problems``: each says what was expected and is not so."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedLibrary(
            f"dsv4-fsdp does not know how this {library} shards models, so it patches nothing.\n"
            f"expected: {library} {', '.join(tested)}, or another with the same internals\n"
            f"got: {library} {version}, in which\n{listed}\n"
            f"what to do: install one of the versions above, or shard with dsv4_fsdp.parallelize; please report it."
        )


def signature_problem(owner: Any, name: str, parameters: tuple[str, ...], *, uses: tuple[str, ...] = ()) -> str | None:
    """What is wrong with ``owner.name``, which should be a function of ``parameters`` that uses these global names."""
    function = unpatched(getattr(owner, name, None))
    where = f"{getattr(owner, '__qualname__', None) or owner.__name__}.{name}"
    if not callable(function):
        return f"{where} is missing"
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        return f"{where} takes ({', '.join(found)}), not ({', '.join(parameters)})"
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    if absent := [use for use in uses if use not in {*code.co_names, *code.co_varnames, *code.co_cellvars}]:
        return f"{where} does not use {', '.join(absent)}"
    return None

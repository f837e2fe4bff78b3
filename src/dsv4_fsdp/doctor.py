"""What this environment can do for the engine: versions, mechanisms of this torch, backends, and what would go wrong.

Mechanisms are *tried*, on a tiny model over torch's fake process group, not read off the version: nightly and vendor
builds have what they have. Needs torch only; what is missing is a line in the report, never an exception.

Must run in a process without a process group: it makes its own and destroys them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Diagnosis", "Fact", "Problem", "diagnose", "run"]

_COLUMNS = 100


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at: what, whether it is there, and a word on it."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Problem:
    """What would go wrong, and what to do. ``fatal``: the engine cannot work."""

    what: str
    mend: str
    fatal: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        system: one line on Python and the machine.
        versions: package -> version, or ``None`` if it is not installed.
        tested: package -> versions that the tests ran with.
        mechanisms, backends: what was tried.
        problems: the fatal ones first.
    """

    system: str
    versions: dict[str, str | None]
    tested: dict[str, tuple[str, ...]]
    mechanisms: tuple[Fact, ...]
    backends: tuple[Fact, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the engine works here."""
        return not any(problem.fatal for problem in self.problems)

    def to_json(self) -> str:
        """All of it, and the verdict as ``ok``."""
        return json.dumps({"ok": self.ok} | asdict(self), indent=2)

    def text(self) -> str:
        """The report for a terminal of 100 columns, the answer first."""
        answer = "The engine works here" if self.ok else "The engine does NOT work here"
        count = len(self.problems)
        said = "1 remark" if count == 1 else f"{count} remarks"
        lines = [f"dsv4-fsdp {self.versions['dsv4-fsdp']} on {self.system}"]
        lines.append(f"{answer}; {said} at the end." if count else f"{answer}.")
        lines += ["", "Versions"]
        for name, found in self.versions.items():
            tested = self.tested.get(name, ())
            base = (found or "").partition("+")[0]
            word = "" if not tested or found is None else "tested" if base in tested else f"tested: {', '.join(tested)}"
            lines.append(f"  {name:<16}{found or 'not installed':<16}{word}".rstrip())
        for title, facts in (
            ("Mechanisms of this torch, each tried on a fake process group", self.mechanisms),
            ("Backends and devices", self.backends),
        ):
            lines += ["", title]
            for fact in facts:
                lines += _wrapped(f"  {'yes' if fact.ok else 'no':<5}{fact.name:<38}", fact.detail)
        lines += ["", "What would go wrong, and how to mend it"]
        for number, problem in enumerate(self.problems, 1):
            label = f"  {number}. " + ("FATAL: " if problem.fatal else "")
            lines += _wrapped(label, f"{problem.what}. {problem.mend}", indent=5)
        return "\n".join(lines if self.problems else [*lines, "  nothing that we know of"])


def _wrapped(label: str, text: str, *, indent: int | None = None) -> list[str]:
    hang = " " * (len(label) if indent is None else indent)
    wrapped = textwrap.wrap(text, _COLUMNS, initial_indent=label, subsequent_indent=hang, break_on_hyphens=False)
    return [line.rstrip() for line in wrapped or [label]]


# --- The examination --------------------------------------------------------------------------------------------------

# What each package is for: said where it is missing.
_PACKAGES = {
    "transformers": "the trainer, keep_fp32_islands and Transformers' DeepSeek-V4",
    "accelerate": "the trainer, and keep_fp32_islands for accelerate and Trainer",
    "peft": "LoRA",
    "safetensors": "checkpoints",
    "datasets": "the trainer's data",
    "typer": "the commands other than doctor",
    "pydantic": "the trainer's settings",
    "rich": "dsv4-fsdp plan",
}
_OPTIONAL = ("trl", "nemo-automodel", "torchao", "tensorboard", "matplotlib", "numpy")


def diagnose() -> Diagnosis:
    """Look at this environment. Takes some seconds, most of them to import torch and transformers.

    Raises ``RuntimeError`` if this process has a process group.
    """
    names = ("dsv4-fsdp", "torch", *_PACKAGES, *_OPTIONAL)
    versions = {name: _version(name) for name in names}
    tested: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    mechanisms: tuple[Fact, ...] = ()
    backends: tuple[Fact, ...] = ()
    if _importable("torch", problems):
        import torch.distributed as dist

        from .integrations import TESTED_VERSIONS
        from .torch_private import CHECKED_TORCH_VERSIONS

        tested = {"torch": CHECKED_TORCH_VERSIONS, **TESTED_VERSIONS}
        if not dist.is_available():
            problems.append(Problem("this torch is built without torch.distributed", "Install another build.", True))
        else:
            mechanisms = _mechanisms(problems)
            backends = _backends(problems)
    _look_at_packages(versions, tested, problems)
    return Diagnosis(
        system=f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        versions=versions,
        tested=tested,
        mechanisms=mechanisms,
        backends=backends,
        problems=tuple(sorted(problems, key=lambda problem: not problem.fatal)),
    )


def run(*, as_json: bool) -> int:
    """Print the diagnosis; returns the exit code, 1 if the engine cannot work here."""
    found = diagnose()
    print(found.to_json() if as_json else found.text())
    return 0 if found.ok else 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        if name == "dsv4-fsdp":  # run from its source folder
            from . import __version__

            return __version__
        return None


def _importable(name: str, problems: list[Problem]) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  a broken installation raises anything, and that is what we are to find
        what = f"{name} cannot be imported: {_first_line(error)}"
        problems.append(Problem(what, f"Install {name} again.", fatal=name == "torch"))
        return False
    return True


def _look_at_packages(
    versions: dict[str, str | None], tested: dict[str, tuple[str, ...]], problems: list[Problem]
) -> None:
    missing = [name for name in _PACKAGES if versions[name] is None]
    if missing:
        what = "not installed: " + "; ".join(f"{name} ({_PACKAGES[name]})" for name in missing)
        problems.append(Problem(what, 'pip install "dsv4-fsdp[train]" brings them.'))
    for name, known in tested.items():
        found = versions[name]
        if found is not None and found.partition("+")[0] not in known:
            mend = f"If something fails, try {known[-1]} before you report it."
            problems.append(Problem(f"{name} {found} is not among the tested versions ({', '.join(known)})", mend))
    for name in ("transformers", "accelerate"):
        if versions[name] is not None and versions["torch"] is not None and _importable(name, problems):
            from .integrations import UnsupportedLibrary, keep_fp32_islands

            try:
                with keep_fp32_islands(name):  # type: ignore[arg-type]
                    pass
            except UnsupportedLibrary as error:
                what = f'keep_fp32_islands("{name}") will refuse: {_first_line(error)}'
                problems.append(Problem(what, f"Install {name} {tested[name][-1]}, or shard with parallelize."))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- Mechanisms -------------------------------------------------------------------------------------------------------


@contextmanager
def _group(backend: str, world_size: int) -> Iterator[DeviceMesh]:
    """A mesh seen from rank 0 of a group of ``world_size`` on the fake backend, or of one rank on a real one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .torch_private import fake_store

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        store = fake_store() if backend == "fake" else dist.FileStore(path, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
        try:
            yield init_device_mesh("cuda" if backend == "nccl" else "cpu", (world_size,))
        finally:
            dist.destroy_process_group()


def _mechanisms(problems: list[Problem]) -> tuple[Fact, ...]:
    import torch.distributed as dist

    if dist.is_initialized():
        raise RuntimeError("doctor tries things on process groups of its own, and this process has one already")
    facts = []
    for name, attempt, need, without in _ATTEMPTS:
        try:
            detail = attempt()
        except Exception as error:  # noqa: BLE001  whatever it raises, the mechanism is not there
            facts.append(Fact(name, False, without))
            if need:
                problems.append(Problem(f"{name}: {_first_line(error)}", _OTHER_TORCH, fatal=True))
        else:
            facts.append(Fact(name, True, detail))
    return tuple(facts)


_OTHER_TORCH = "Install torch 2.12 or later; if yours is, please report it."


def _try_groups() -> str:
    """A unit of a bf16 weight and an fp32 island: two groups, each computed in its own dtype."""
    import torch

    if (found := _step_of_two_dtypes(torch.bfloat16)) != (2, [torch.bfloat16, torch.float32]):
        raise RuntimeError(f"a unit of two dtypes got (groups, computed in) {found}")
    return "bf16 weights and fp32 islands in one unit"


def _try_override() -> str:
    """The same unit stored in fp32: one group, of which each parameter is computed in its own dtype."""
    import torch

    if (found := _step_of_two_dtypes(torch.float32)) != (1, [torch.bfloat16, torch.float32]):
        raise RuntimeError(f"a unit stored in fp32 got (groups, computed in) {found}")
    return "with fp32 storage, one all-gather per unit and pass"


def _step_of_two_dtypes(storage: torch.dtype) -> tuple[int, list[torch.dtype]]:
    """One step of a unit with a weight of this storage and an fp32 island: how many groups, computed in what."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .grouped_unit import fully_shard
    from .torch_private import parameter_groups

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=storage))
            self.island = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend((self.weight.dtype, self.island.dtype))
            return x * self.weight * self.island

    seen: list[torch.dtype] = []
    with _group("fake", 1) as mesh:
        unit = Unit()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(unit, mesh=mesh, mp_policy=policy, fp32_params=["island"])
        unit(torch.ones(4)).sum().backward()
        if any(param.grad is None for param in unit.parameters()):
            raise RuntimeError("a unit of two dtypes got no gradients")
        return len(list(parameter_groups(unit))), seen


def _try_prefetch() -> str:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from .grouped_unit import fully_shard

    with _group("fake", 1) as mesh:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        for module in (first, second):
            fully_shard(module, mesh=mesh)
        model = nn.Sequential(first, second)
        fully_shard(model, mesh=mesh)
        assert isinstance(first, FSDPModule)
        assert isinstance(second, FSDPModule)
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        model(torch.ones(2, 4)).sum().backward()
    return "the next unit is gathered while one computes"


def _try_uneven() -> str:
    from torch import nn
    from torch.distributed.tensor import DTensor

    from .grouped_unit import fully_shard

    with _group("fake", 2) as mesh:
        layer = nn.Linear(4, 3)
        fully_shard(layer, mesh=mesh)
        assert isinstance(layer.weight, DTensor)
        shard = tuple(layer.weight.to_local().shape)
        if shard != (2, 4):
            raise RuntimeError(f"3 rows over 2 ranks: rank 0 got {shard}")
    return "any number of ranks, also where it divides no dim"


def _try_keep_gathered() -> str:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from .grouped_unit import fully_shard

    with _group("fake", 1) as mesh:
        layer = nn.Embedding(4, 4)
        fully_shard(layer, mesh=mesh)
        assert isinstance(layer, FSDPModule)
        layer.set_unshard_in_backward(False)
    return "backward gathers no embedding"


def _try_recompute() -> str:
    import torch
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    block = checkpoint_wrapper(nn.Linear(4, 4), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    block(torch.ones(2, 4)).sum().backward()
    return "activation_checkpointing=True"


# (what, the attempt, whether the engine needs it, what is so without it)
_ATTEMPTS: tuple[tuple[str, Callable[[], str], bool, str], ...] = (
    ("several parameter groups per unit", _try_groups, True, "the engine stands on it"),
    ("uneven shards", _try_uneven, True, "the engine stands on it"),
    ("prefetch, forward and backward", _try_prefetch, True, "parallelize sets it"),
    ("no gather of embeddings in backward", _try_keep_gathered, True, "parallelize sets it"),
    ("non-reentrant checkpointing", _try_recompute, False, "no activation_checkpointing"),
    (
        "native param_dtype_override_fn",
        _try_override,
        False,
        "two all-gathers per unit with fp32 storage; torch >= 2.15",
    ),
)


# --- Backends ---------------------------------------------------------------------------------------------------------


def _backends(problems: list[Problem]) -> tuple[Fact, ...]:
    import torch
    import torch.distributed as dist

    facts = [_try_backend("gloo", dist.is_gloo_available(), problems)]
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        facts.append(_try_backend("nccl", dist.is_nccl_available(), problems))
    else:
        built = "built in, but there is no device" if dist.is_nccl_available() else "not in this build of torch"
        facts.append(Fact("nccl", False, built))
    if not any(fact.ok for fact in facts):
        problems.append(Problem("no backend for collectives works", "Install a torch with gloo or nccl.", fatal=True))
    facts += _devices(problems) if has_cuda else [Fact("CUDA device", False, _why_no_cuda())]
    facts.append(_bf16("bf16 on the CPU", "cpu"))
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    facts.append(Fact("C++ compiler, for torch.compile", compiler is not None, compiler or "inductor has none to call"))
    return tuple(facts)


def _try_backend(name: str, built: bool, problems: list[Problem]) -> Fact:
    import torch
    import torch.distributed as dist

    if not built:
        if name == "nccl":
            what = "there are CUDA devices, but this torch has no nccl"
            problems.append(Problem(what, "Install a CUDA build of torch: gloo is slow between devices."))
        return Fact(name, False, "not in this build of torch")
    try:
        with _group(name, 1):
            one = torch.ones(1, device="cuda" if name == "nccl" else "cpu")
            dist.all_reduce(one)
            assert one.item() == 1
    except Exception as error:  # noqa: BLE001  a driver or network that does not work raises anything
        mend = (
            "Set GLOO_SOCKET_IFNAME to a network interface that exists."
            if name == "gloo"
            else "Look at NCCL_DEBUG=INFO."
        )
        problems.append(Problem(f"{name} does not work: {_first_line(error)}", mend))
        return Fact(name, False, _first_line(error))
    return Fact(name, True, "one rank, one all-reduce")


def _devices(problems: list[Problem]) -> list[Fact]:
    import torch

    facts = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        detail = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
        facts.append(Fact(f"CUDA device {index}", True, detail))
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        facts.append(Fact(f"bf16 on CUDA device {index}", bf16, "" if bf16 else "emulated"))
        if not bf16:
            what = f"{device.name} computes bf16 by emulation only"
            problems.append(
                Problem(what, "Training works there, slowly: use a device of compute capability 8 or more.")
            )
    return facts


def _why_no_cuda() -> str:
    import torch

    return "a CPU build of torch" if torch.version.cuda is None else "none visible to this build for CUDA"


def _bf16(name: str, device: str) -> Fact:
    import torch

    try:
        torch.ones(2, 2, dtype=torch.bfloat16, device=device) @ torch.ones(2, 2, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        return Fact(name, False, _first_line(error))
    return Fact(name, True, "a matrix product")

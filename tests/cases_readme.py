"""The README's example, run inside a rank."""

from __future__ import annotations

import contextlib
import io


def run_readme_example(code: str, path: str) -> str:
    """Run ``code`` with the mesh on this machine's CPU ranks; returns what it printed."""
    assert 'init_device_mesh("cuda", (128,))' in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('init_device_mesh("cuda", (128,))', 'init_device_mesh("cpu", (2,))'), {"path": path})
    return printed.getvalue()

"""What libraries have to say during a run: in words, once each, on rank 0.

A run's processes belong to the run, so their logging is set up here: when a run begins, and never at import.
"""

from __future__ import annotations

import logging
import textwrap
import warnings
from typing import TextIO

__all__ = ["show_notices"]

_WIDTH = 100


def show_notices(*, is_first: bool) -> None:
    """Print warnings, and what the logger ``dsv4_fsdp`` is told, as notes; on ranks other than the first, not at all.

    Transformers' progress bars are turned off everywhere: they would run into ours.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Dealt experts are gathered over two axes, one after the other, when they are written: that is all it would say.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    log = logging.getLogger("dsv4_fsdp")
    log.propagate = False
    if not is_first:
        log.addHandler(logging.NullHandler())
        transformers_logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        return

    said: set[str] = set()

    def note(text: str) -> None:
        if text not in said:
            said.add(text)
            print(textwrap.fill(f"note   {text}", _WIDTH, subsequent_indent=" " * 7), flush=True)

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        note(f"{category.__name__}: {' '.join(str(message).split())}")

    log.addHandler(Notes())
    warnings.showwarning = show_warning

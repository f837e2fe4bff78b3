"""The former name of :mod:`dsv4_fsdp.live_precision`."""

from .live_precision import differences as differences
from .live_precision import precision_table as precision_table
from .live_precision import read_back as read_back

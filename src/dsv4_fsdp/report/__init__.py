"""A run folder as one page and as pictures: read (:mod:`.run_data`), judge (:mod:`.verdict`), draw, render.

Only what a run recorded is shown. What it did not record is named on the page, never filled in.
"""

"""Score and select for the rows of a step: every row over its own session's key pages, reached through the step table.

On the CPU this is `index_scores` a row and `select` over all; rows never see another session's pages.
"""

from kernels.selection.reference import select_places

__all__ = ["select_places"]

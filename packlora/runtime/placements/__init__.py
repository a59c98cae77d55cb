"""Placements that are a folder each, named as the key of `parallel` that asks for one.

The folder's own file has, without torch, a model `Keys` of its keys (config/parallel.py); its module `placement` has
PLACEMENT, a subclass of several.OverProcesses, imported where a run asks for it.
"""

from __future__ import annotations

import packlora.config  # noqa: F401  it imports the keys, which would otherwise import it halfway

"""Objectives that packlora has itself, and terms beside them.

A built-in objective is a folder named as `train.trainer` names it. Its package has a DECLARATION for run files, without
torch (config/trainers.py); its module `loss` has `objective(train)`, imported where a job learns.
"""

from __future__ import annotations

import packlora.config  # noqa: F401  it imports the declarations, which would otherwise import it halfway

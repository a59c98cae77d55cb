"""Pipelines: a base model whose layers lie on several devices, one stage behind the other. A plug-in, found by name
(packlora/parallel/layout.py, `pipeline`) where a run file, a command or the choice of a layout asks for stages.
"""

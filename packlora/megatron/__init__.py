"""Adapters on models of Megatron-Core; needs `packlora[megatron]`.

from packlora.megatron import apply_lora
"""

from packlora.megatron.adapters import MegatronAdapters, apply_lora

__all__ = ["MegatronAdapters", "apply_lora"]

"""Other projects' LoRA kernels on PEFT models, by their own files. What stands in for parts of them that are not wanted:

unsloth      fast_lora, utils, swiglu and geglu of its kernels, and how it finds devices and bitsandbytes, as they are. Not run:
             the package's own __init__ and that of kernels, which change other libraries; its fp8 is left out.
axolotl      kernels/*.py as they are. Stand-ins: its logger, and while importing bitsandbytes where that is missing, whose
             kernels 16-bit weights never reach.
lorafusion   ops and utils as they are. Stand-ins: loguru and libraries of its own benchmarks where they are missing; the GPU's
             name (others than those that it lists take its settings of an H100, as shipped they are refused); symbols of old
             Triton that are looked up at import; for dropout 0 a mask that nobody reads, where as shipped the backward fails.
             lorafusion_tma has its TMA forward, its default on Hopper, launched by Triton's present descriptors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.peers.sources import fetched

BLOCK_PEERS = ("unsloth", "axolotl", "lorafusion", "lorafusion_tma")


def _module(name: str, path: str | None = None, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [path]
    vars(module).update(values)
    return module


@contextlib.contextmanager
def _standing_in(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Modules of these names are found while this lasts; then what there was before."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def _missing(*names: str) -> list[str]:
    return [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]


# --- Unsloth -----------------------------------------------------------------------------------------------------------


@functools.cache
def unsloth() -> Any:
    """unsloth.kernels.fast_lora."""
    from packaging.version import Version

    folder = fetched("unsloth")
    if not torch.cuda.is_available():
        os.environ.setdefault("UNSLOTH_ALLOW_CPU", "1")
    sys.modules["unsloth"] = _module("unsloth", str(folder / "unsloth"))
    sys.modules["unsloth.kernels"] = _module("unsloth.kernels", str(folder / "unsloth" / "kernels"))
    sys.modules["unsloth.kernels.fp8"] = _module("unsloth.kernels.fp8", weight_dequant=None, fp8_linear=None)
    zoo = {
        "unsloth_zoo": _module("unsloth_zoo", ""),
        "unsloth_zoo.utils": _module("unsloth_zoo.utils", Version=Version),
    }
    with _standing_in(zoo if _missing("unsloth_zoo") else {}):
        return importlib.import_module("unsloth.kernels.fast_lora")


# --- Axolotl -----------------------------------------------------------------------------------------------------------


@functools.cache
def axolotl() -> Any:
    """axolotl.kernels.lora."""
    import logging

    folder = fetched("axolotl") / "axolotl"
    sys.modules["axolotl"] = _module("axolotl", str(folder))
    sys.modules["axolotl.kernels"] = _module("axolotl.kernels", str(folder / "kernels"))
    sys.modules["axolotl.utils"] = _module("axolotl.utils", "")
    sys.modules["axolotl.utils.logging"] = _module("axolotl.utils.logging", get_logger=logging.getLogger)
    names = (f"cdequantize_blockwise_{kind}" for kind in ("fp32", "fp16_nf4", "bf16_nf4", "fp32_nf4"))
    functional = _module(
        "bitsandbytes.functional",
        QuantState=type("QuantState", (), {}),
        get_ptr=None,
        lib=types.SimpleNamespace(**dict.fromkeys(names)),
    )
    own = {"bitsandbytes": _module("bitsandbytes", "", functional=functional), "bitsandbytes.functional": functional}
    with _standing_in(own if _missing("bitsandbytes") else {}):
        module = importlib.import_module("axolotl.kernels.lora")
    if (
        not torch.cuda.is_available()
    ):  # its kernels allocate on "cuda": plain torch where the benchmark is only tried out
        vars(module).update(swiglu_forward=_swiglu, swiglu_backward=_swiglu_backward)
    return module


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def _swiglu_backward(d: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The product, and the gradients of gate and up."""
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid
    return act * up, d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * act


# --- LoRAFusion --------------------------------------------------------------------------------------------------------


class _Silent:
    """Stand-in for loguru's logger."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@functools.cache
def lorafusion() -> Any:
    """lorafusion.ops.lora_v1, without TMA."""
    import triton.language as tl

    sys.path.insert(0, str(fetched("lorafusion")))
    if _missing("loguru"):
        sys.modules["loguru"] = _module("loguru", logger=_Silent())
    argument = lambda kind, name=None: kind  # noqa: E731
    parts: dict[str, Any] = {"DefaultNamedArg": argument, "NamedArg": argument, "tqdm": lambda x, **kwargs: x}
    libraries = {name: _module(name, **parts) for name in _missing("tabulate", "mypy_extensions", "tqdm")}
    symbols = [
        name for name in ("_experimental_descriptor_load", "_experimental_descriptor_store") if not hasattr(tl, name)
    ]
    for name in symbols:
        setattr(tl, name, None)
    properties = torch.cuda.get_device_properties
    if not torch.cuda.is_available():
        hopper = types.SimpleNamespace(major=9, multi_processor_count=132)
        torch.cuda.get_device_properties = lambda *args: hopper  # type: ignore[assignment]
    try:
        with _standing_in(libraries), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            common: Any = importlib.import_module("lorafusion.utils.common")
            common.get_device_short_name = lambda: "h100-80gb-hbm3"
            helper = importlib.import_module("lorafusion.ops.triton_ops.tma_utils").TmaAutoTuneHelper
            helper.__init__ = helper.init_tma_descriptor = _no_descriptors
            helper.get_tma_descriptor_kernel_param = lambda self, name: None
            module: Any = importlib.import_module("lorafusion.ops.lora_v1")
    finally:
        torch.cuda.get_device_properties = properties
        for name in symbols:
            delattr(tl, name)
    shipped = module.fused_lora_dyw_dsa_func

    def with_mask(
        dy: torch.Tensor, w: torch.Tensor, ds: torch.Tensor, a: torch.Tensor, dropout_p: float, dropout_mask: Any
    ) -> Any:
        if dropout_mask is None:
            dropout_mask = torch.empty(1, 1, dtype=torch.bool, device=dy.device).expand(len(dy), w.shape[1])
        return shipped(dy=dy, w=w, ds=ds, a=a, dropout_p=dropout_p, dropout_mask=dropout_mask)

    module.fused_lora_dyw_dsa_func = with_mask
    return module


def _no_descriptors(self: Any, *args: Any) -> None:
    self.descriptors = self.cuda_descriptors = {}


@functools.cache
def lorafusion_tma() -> Any:
    """Its TMA forward kernel, in the place of fused_lora_xw_sb_func."""
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    lorafusion()
    tma: Any = importlib.import_module("lorafusion.ops.triton_ops.fused_lora_xw_sb_tma")
    device: Any = importlib.import_module("benchmarks.peers.descriptors")
    tma.tl_experimental_descriptor_load, tma.tl_experimental_descriptor_store = device.load, device.store
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def forward(
        x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, b: torch.Tensor, alpha: float, *, bias: Any = None,
        config: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        (M, K), N, R = x.shape, w.shape[0], s.shape[1]
        has_bias = bias is not None
        added = bias if has_bias else x.new_empty(0)
        out = x.new_empty(M, N)
        settings = (config or tma.get_lora_kernel_config("fused_lora_xw_sb_tma")).to_triton_config()
        settings.kwargs |= {"EPILOGUE_SUBTILE": False, "LOOP_UNROLL_FACTOR": None, "FLATTEN": False}
        rows, columns, depth = (settings.kwargs[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
        grid = (min(processors, triton.cdiv(M, rows) * triton.cdiv(N, columns)),)
        tma.fused_lora_xw_sb_tma_kernel[grid](
            TensorDescriptor(x, [M, K], [K, 1], [rows, depth]), TensorDescriptor(w, [N, K], [K, 1], [columns, depth]), s, b,
            added, TensorDescriptor(out, [M, N], [N, 1], [rows, columns]), M, N, K, R, alpha, has_bias, *s.stride(),
            *b.stride(), added.stride(0) if has_bias else 0, NUM_SMS=processors,
            OUTPUT_DTYPE=tma.torch_dtype_to_triton_dtype(out.dtype), **settings.all_kwargs(),
        )  # fmt: skip
        return out

    return forward


def _lorafusion_forward(module: Any, tma: Any = None) -> Any:
    """forward of a PEFT Linear with one adapter."""
    plain = module.fused_lora_xw_sb_func

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self.active_adapters[0]
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        module.fused_lora_xw_sb_func = plain if tma is None else tma
        try:
            out: torch.Tensor = module.fused_linear_lora(
                x=x.to(A.dtype), linear_w=self.base_layer.weight, lora_a=A, lora_b=B, alpha=self.scaling[name],
                dropout_p=getattr(self.lora_dropout[name], "p", 0.0) if self.training else 0.0,
                linear_bias=self.base_layer.bias,
            )  # fmt: skip
        finally:
            module.fused_lora_xw_sb_func = plain
        return out.to(x.dtype)

    return forward


# --- on a model --------------------------------------------------------------------------------------------------------


def use_lorafusion(model: nn.Module, tma: bool) -> None:
    """LoRAFusion's kernels in all LoRA layers of a PEFT model."""
    from peft.tuners.lora import Linear

    forward = _lorafusion_forward(lorafusion(), lorafusion_tma() if tma else None)
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = types.MethodType(forward, module)


def use_peer(name: str, model: nn.Module) -> None:
    """One of BLOCK_PEERS in a PEFT model of `bench peers`: of modules with q, k and v, with o, and with gate, up and down."""
    if name.startswith("lorafusion"):
        return use_lorafusion(model, name == "lorafusion_tma")
    functions = unsloth() if name == "unsloth" else axolotl()
    for module in model.modules():
        for projection, own in (
            ("q_proj", "apply_lora_qkv"), ("o_proj", "apply_lora_o"), ("gate_proj", "apply_lora_mlp_swiglu"),
        ):  # fmt: skip
            if hasattr(module, projection):
                module.forward = types.MethodType(getattr(functions, own), module)
    return None

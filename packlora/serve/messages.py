"""Protobuf messages of the protocol, in and out: requests become arrays, results become bytes.

The messages are those of tinker.proto, in a pool of their own: a client in the same process has messages of the same names.

Shapes: N places of a sample, K targets of a place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from packlora.engine.sampling import Likeliest, PromptScores
from packlora.errors import quoted
from packlora.serve.errors import Refused
from packlora.serve.limits import Limits

FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES: Mapping[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"),
}  # fmt: skip
EMPTY = -99999.0
"""Log-probability of a cell of likeliest tokens that is empty."""


@functools.cache
def message(name: str) -> Any:
    """Class of a message of tinker.proto."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tinker_public.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("tinker.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@dataclass(frozen=True, slots=True)
class Datum:
    """A sample: token ids int32 [N], and arrays by name, each [N] or [N, K]."""

    ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A forward_backward, or a forward alone. config: numbers and texts of the loss."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


def parsed(body: bytes) -> Any:
    """ForwardBackwardRequest, whose fields are not checked. Raises Refused where it is none."""
    try:
        return message("ForwardBackwardRequest").FromString(body)
    except (DecodeError, ValueError):  # protobuf in plain Python raises ValueError for a text that is no UTF-8
        raise Refused("the body is no ForwardBackwardRequest of tinker 0.38 (protobuf)") from None


def read_forward_backward(found: Any, limits: Limits) -> ForwardBackward:
    """Read what `parsed` gave. Raises Refused, which names the field."""
    if not found.data:
        raise Refused("data: there are no samples; give at least one datum")
    if len(found.data) > limits.datums:
        raise Refused(
            f"data: {len(found.data)} datums, above the limit datums of {limits.datums}; send several requests"
        )
    config: dict[str, float | str] = dict(found.loss_fn_config)
    for name, value in found.loss_fn_config_v2.items():
        config[name] = value.number if value.WhichOneof("value") == "number" else value.text
    data = [_datum(datum, f"data[{number}]", limits) for number, datum in enumerate(found.data)]
    return ForwardBackward(found.model_id, found.seq_id, data, found.loss_fn, config, found.forward_only)


def _datum(datum: Any, where: str, limits: Limits) -> Datum:
    spans = len(datum.model_input_spans) + len(datum.loss_fn_input_spans)
    if spans > limits.spans:
        raise Refused(f"{where}: {spans} spans, above the limit spans of {limits.spans}")
    ids = []
    for number, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            raise Refused(f"{where}.model_input[{number}]: {kind or 'an empty chunk'} is not served; encoded_text is")
        ids.append(array(chunk.encoded_text.tokens, INT32, f"{where}.model_input[{number}].tokens"))
    inputs = {
        name: tensor(value, f"{where}.loss_fn_inputs[{quoted(name)}]", limits)
        for name, value in datum.loss_fn_inputs.items()
    }
    return Datum(np.concatenate(ids) if ids else np.zeros(0, np.int32), inputs)


def array(data: bytes, dtype: int, where: str) -> np.ndarray:
    """Array [n] of bytes, not copied. Raises Refused where it is not whole."""
    kind = DTYPES.get(dtype)
    if kind is None:
        raise Refused(f"{where}: dtype {dtype} is not served; float32, int64 and int32 are")
    if len(data) % kind.itemsize:
        raise Refused(f"{where}: {len(data)} bytes are no whole number of {kind.name}")
    return np.frombuffer(data, kind)


def tensor(value: Any, where: str, limits: Limits) -> np.ndarray:
    """Array of a Tensor, which is made dense where it is sparse: absent cells are 0. Raises Refused."""
    shape = tuple(value.shape)
    layout = value.WhichOneof("layout")
    if layout is None:
        raise Refused(f"{where}: it has no values; dense and sparse_csr are served")
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise Refused(f"{where}: shape {list(shape)}; served are [N] and [N, K]")
    if len(shape) == 2 and shape[1] > limits.soft_targets:
        raise Refused(f"{where}: {shape[1]} targets at a place, above the limit soft_targets of {limits.soft_targets}")
    if max(shape, default=0) > limits.targets or math.prod(shape) > limits.targets:
        raise Refused(f"{where}: shape {list(shape)} is above the limit targets of {limits.targets}")
    if layout == "dense":
        found = array(value.dense, value.dtype, where)
        shape = shape or (len(found),)
        if math.prod(shape) != len(found):
            raise Refused(f"{where}: shape {list(shape)} and {len(found)} values disagree")
        return found.reshape(shape)
    return _dense(value, shape, where)


def _dense(value: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    if len(shape) != 2:
        raise Refused(f"{where}: sparse_csr with shape {list(shape)}; it must be [N, K]")
    csr = value.sparse_csr
    values = array(csr.values, value.dtype, where)
    starts = array(csr.crow_indices, INT64, f"{where}.crow_indices")
    columns = array(csr.col_indices, INT64, f"{where}.col_indices")
    return dense_of(values, starts, columns, (shape[0], shape[1]), 0, f"{where}.")


def dense_of(
    values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: tuple[int, int], absent: int, where: str
) -> np.ndarray:
    """Matrix of a shape from compressed rows. absent: value of cells that are not given. Raises Refused."""
    rows, count = shape[0], len(values)
    is_inside = len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == count and starts.max() == count
    if not is_inside or starts.min() < 0 or (np.diff(starts) < 0).any():
        raise Refused(f"{where}crow_indices: they are no {rows + 1} ascending numbers from 0 to {count}")
    if len(columns) != count or (count and not (columns.min() >= 0 and columns.max() < shape[1])):
        raise Refused(f"{where}col_indices: they are no {count} numbers from 0 to {shape[1] - 1}")
    out = np.full(shape, absent, values.dtype)
    out[np.repeat(np.arange(rows), np.diff(starts)), columns] = values
    return out


# --- results ---------------------------------------------------------------------------------------------------------------


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """ForwardBackwardOutput with log-probabilities of each sample, [N] or [N, K]; one record for those with the same K."""
    out = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        out.metrics[name] = value
    groups: list[list[np.ndarray]] = []
    for own in logprobs:
        if groups and groups[-1][0].shape[1:] == own.shape[1:]:
            groups[-1].append(own)
        else:
            groups.append([own])
    for group in groups:
        record = out.loss_fn_outputs.add(num_datums=len(group))
        field = record.fields["logprobs"]
        data = [own.astype("<f4").tobytes() for own in group]
        field.dtype, field.data = FLOAT32, b"".join(data)
        field.offsets = np.cumsum([0, *map(len, data)]).astype("<i8").tobytes()
        field.trailing_shape.extend(group[0].shape[1:])
    return bytes(out.SerializeToString())


@dataclass(slots=True)
class Sequence_:
    """A sampled sequence. reached: whether a stop token or string ended it."""

    tokens: list[int]
    logprobs: list[float]
    reached: bool
    top: list[Likeliest]


def sample_response(
    sequences: Sequence[Sequence_], scores: PromptScores | None, last: int | None, length: int
) -> bytes:
    """SampleResponse.

    Args:
        last: log-probabilities and likeliest tokens at so many tokens of the prompt are wanted, others are NaN or empty;
            None: of all.
        length: tokens of the prompt.
    """
    out = message("SampleResponse")()
    for own in sequences:
        one = out.sequences.add(
            stop_reason=0 if own.reached else 1,
            tokens=np.array(own.tokens, "<i4").tobytes(),
            logprobs=np.array(own.logprobs, "<f4").tobytes(),
        )
        if own.top:
            ids, logprobs = (
                np.concatenate(parts) for parts in zip(*((o.ids, o.logprobs) for o in own.top), strict=True)
            )
            _set_likeliest(one.topk_sampled_logprobs, ids, logprobs)
    if scores is not None and scores.logprobs is not None:
        found = scores.logprobs.astype("<f4")
        if last is not None:
            found = np.where(np.arange(length) < length - last, np.float32("nan"), found)
        out.prompt_logprobs = found.astype("<f4").tobytes()
    if scores is not None and scores.top is not None:
        k = scores.top.ids.shape[1]
        wanted = (np.arange(1, length) >= length - (length if last is None else last))[:, None]
        ids = np.concatenate([np.zeros((1, k), np.int32), np.where(wanted, scores.top.ids, 0)])
        logprobs = np.concatenate([np.full((1, k), EMPTY), np.where(wanted, scores.top.logprobs, EMPTY)])
        _set_likeliest(out.topk_prompt_logprobs, ids, logprobs)
    if scores is not None and scores.targets is not None:
        out.target_prompt_logprobs.dense = scores.targets.astype("<f4").tobytes()
        out.target_prompt_logprobs.dtype = FLOAT32
        out.target_prompt_logprobs.shape.extend(scores.targets.shape)
    return bytes(out.SerializeToString())


def _set_likeliest(field: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    field.token_ids, field.logprobs = ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
    field.length, field.k = ids.shape

"""Losses through the public client in float64, against their formulas and the autograd of PEFT's model."""

from __future__ import annotations

import urllib.request
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from serving import NAME, host_of, served
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

LENGTHS = (9, 14)
K = 24


@pytest.fixture(scope="module")
def pair(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A training client, and PEFT's model with its adapter in float64."""
    folder, base = tmp_path_factory.mktemp("serve"), tiny_base("llama")
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    host = host_of(base, folder, "dtype=float64")
    with warnings.catch_warnings(), served(host, folder / "state") as (url, _):
        warnings.simplefilter("ignore")
        with tinker.ServiceClient(base_url=url, api_key="tml-local") as client:
            own = client.create_lora_training_client(base_model=NAME, rank=4, seed=1, train_unembed=False).result()
            own.forward_backward([datum(row) for row in range(2)], "cross_entropy")
            own.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            path = own.save_weights_external("begun").result().path
            for file, at in client.create_rest_client().get_external_weights_urls(path).result().urls.items():
                (folder / file).write_bytes(urllib.request.urlopen(at).read())
            torch.set_default_dtype(torch.float64)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
            peft = PeftModel.from_pretrained(model, str(folder), is_trainable=True, autocast_adapter_dtype=False)
            torch.set_default_dtype(torch.float32)
            yield own, peft
    patch.undo()


def ids_of(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(6, 320, LENGTHS[row] + 1)


def datum(row: int, **inputs: Any) -> Any:
    ids = ids_of(row)
    given: dict[str, Any] = {"target_tokens": ids[1:], **inputs}
    own = {
        name: types.TensorData.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=own)


def logp(peft: Any, row: int) -> torch.Tensor:
    """Log-probabilities [N, V]."""
    ids = torch.from_numpy(ids_of(row))[:-1]
    out: torch.Tensor = peft(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return out


def own_logp(peft: Any, row: int) -> torch.Tensor:
    return logp(peft, row).gather(1, torch.from_numpy(ids_of(row))[1:, None])[:, 0]


def check(
    pair: tuple[Any, Any], data: list[Any], loss: str, config: Any, want: torch.Tensor, surrogate: torch.Tensor
) -> None:
    """Value of the loss, and norm of the gradient, which is that of the surrogate."""
    own, peft = pair
    found = own.forward_backward(data, loss, config).result().metrics["loss:sum"]
    norm = own.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert found == pytest.approx(want.item(), rel=1e-10)
    parameters = [one for one in peft.parameters() if one.requires_grad]
    grads = torch.autograd.grad(surrogate, parameters)
    assert norm == pytest.approx(torch.stack([grad.norm() for grad in grads]).norm().item(), rel=1e-10) and norm > 0


def test_gspo_has_one_ratio_a_sequence_and_a_gradient_a_token(pair: tuple[Any, Any]) -> None:
    """Clipping is of sequences, by the sign of each token's advantage; places outside the mask count for nothing."""
    data, total, surrogate, clipped = [], torch.zeros((), dtype=torch.float64), 0.0, 0
    for row, shift in enumerate((0.05, -0.4)):
        n = LENGTHS[row]
        p = own_logp(pair[1], row)
        sampled = (p.detach().numpy() - shift + np.linspace(-0.1, 0.1, n)).astype(np.float32)
        gains, mask = np.linspace(-1, 1, n, dtype=np.float32), (np.arange(n) >= 3).astype(np.float32)
        sampled[:3] = 0
        counted = torch.from_numpy(mask) != 0
        ratio = torch.exp((p.detach() - torch.from_numpy(sampled).double())[counted].mean()).item()
        gains_N = torch.from_numpy(gains).double()
        free, bound = ratio * gains_N, float(np.clip(ratio, 0.9, 1.1)) * gains_N
        total = total - torch.minimum(free, bound)[counted].sum()
        is_free = (free <= bound) & counted
        clipped += int((~is_free & counted).sum())
        surrogate = surrogate - (free * is_free * p).sum()
        data.append(datum(row, logprobs=sampled, advantages=gains, sequence_ratio_mask=mask))
    assert clipped > 2
    check(pair, data, "gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, total, surrogate)


def soft(row: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, K] and weights [N, K], most of which are 0."""
    rng = np.random.default_rng(100 + row)
    tokens = rng.integers(0, 320, (LENGTHS[row], K))
    weights = np.where(rng.random(tokens.shape) < 0.1, rng.normal(size=tokens.shape), 0).astype(np.float32)
    weights[0] = 0
    return tokens, weights


@pytest.mark.parametrize("layout", ["dense", "sparse weights", "sparse both"])
def test_soft_targets_have_the_values_of_the_formula_dense_and_sparse(pair: tuple[Any, Any], layout: str) -> None:
    data, want = [], torch.zeros((), dtype=torch.float64)
    for row in range(2):
        tokens, weights = soft(row)
        own: dict[str, Any] = {"target_tokens": tokens, "weights": weights}
        if layout != "dense":
            own["weights"] = types.TensorData.from_torch_sparse(torch.from_numpy(weights))
            assert own["weights"].sparse_crow_indices is not None
        if layout == "sparse both":  # absent tokens are token 0, whose weights are 0
            tokens = np.where(weights != 0, tokens, 0)
            own["target_tokens"] = types.TensorData.from_torch_sparse(torch.from_numpy(tokens))
            assert own["target_tokens"].sparse_crow_indices is not None
        want = (
            want - (torch.from_numpy(weights).double() * logp(pair[1], row).gather(1, torch.from_numpy(tokens))).sum()
        )
        data.append(datum(row, **own))
    check(pair, data, "cross_entropy", None, want, want)

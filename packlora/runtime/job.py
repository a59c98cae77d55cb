"""One job while it trains: its data, adapter, optimizer, learning rate, step and status.

A job knows nothing of the jobs beside it. trainer.py hands it the losses of its tokens and tells it when its global batch is
complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import get_scheduler

from packlora.adapters.attach import Adapter
from packlora.adapters.files import state_dict
from packlora.config import JobConfig, TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.seeding import stable_hash

IDLE_STEPS = 3
"""Steps in a row that teach a job nothing, after which it is reported."""
USUAL_RATE = 0.01
"""Share of the configured learning rate over which a step must change something; under it are warmup and decay."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step of a job did."""

    step: int
    """Counted from 1."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    notice: str | None = None
    """What a person should know about it."""


def learning_rates(config: TrainConfig, num_steps: int) -> Any:
    """The learning rate of step number n, counted from 0, as transformers' get_scheduler gives it; a pure function."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, num_steps)
    return lambda step: config.learning_rate * schedule.lr_lambdas[0](step)


@dataclass
class Job:
    """State of one job. `grad_scale` is what losses are multiplied with before backward (float16 alone needs it)."""

    config: JobConfig
    data: JobData
    eval_samples: list[Sample]
    adapter: Adapter
    grad_scale: float = 1.0
    step: int = 0
    """Optimizer steps done."""
    status: Literal["running", "done", "failed"] = "running"
    failure: str | None = None
    stopped: str | None = None
    """Why it ends before the steps that it was to take, where it was asked to."""
    tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = self.adapter.named_parameters()
        train = self.config.train
        decayed = [p for name, p in self.parameters.items() if not name.endswith("/bias")]
        biases = [p for name, p in self.parameters.items() if name.endswith("/bias")]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
        )
        self.lr_at = learning_rates(train, self.data.configured_steps)
        dropout = self.adapter.spec.peft.lora_dropout
        self.dropout_key = stable_hash("dropout", self.data.seed) if dropout else None
        self.last_good: dict[str, torch.Tensor] | None = None
        """state_dict of the step before the last: the newest values that are known to give a finite loss."""
        self.untrained = set(self.parameters)
        """Parameters that have never had a gradient."""
        self._loss_sum: torch.Tensor | None = None
        self._tokens = 0
        self._idle = 0
        """Steps in a row, up to the last one, that taught it nothing."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def epoch(self) -> float:
        return self.step / self.data.batches_per_epoch

    def label_tokens(self, step: int) -> int:
        """Of the global batch of a step: what its loss is divided by."""
        return sum(self.data.samples[number].num_labels for number in self.data.global_batch(step))

    def collect(self, loss_sum: torch.Tensor, tokens: int) -> None:
        """Add the loss of a microbatch's tokens of this job; gradients are already in the parameters."""
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._tokens += tokens

    def discard(self) -> None:
        """Forget what was collected for the present global batch."""
        self._loss_sum, self._tokens = None, 0
        for parameter in self.parameters.values():
            parameter.grad = None

    def optimizer_step(self) -> StepResult | None:
        """Finish a global batch: clip, step, count. None if the loss or the gradient is not finite: the job has failed,
        and its parameters are put back to the last values that gave a finite loss.
        """
        assert self._loss_sum is not None
        train, lr = self.config.train, self.lr_at(self.step)
        loss = float(self._loss_sum) / self.label_tokens(self.step)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.grad_scale != 1.0:
            torch._foreach_div_(grads, self.grad_scale)
        norm = torch.nn.utils.get_total_norm(grads)
        grad_norm = float(norm)
        if not math.isfinite(loss):
            self.fail(f"loss {loss:g}", revert=True)
            return None
        if not math.isfinite(grad_norm):
            hint = "; float16 overflows easily, bfloat16 does not" if self.grad_scale != 1.0 else ""
            self.fail(f"gradient norm {grad_norm:g}{hint}", revert=False)
            return None
        if not grads:
            self.fail(
                "no parameter got a gradient: the adapted layers take no part in the model's output", revert=False
            )
            return None
        self.untrained -= {name for name, p in self.parameters.items() if p.grad is not None}
        self.last_good = {key: value.clone() for key, value in state_dict(self.adapter).items()}
        if train.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), train.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        tokens = self._tokens
        self.discard()
        self.step += 1
        self.tokens_seen += tokens
        result = StepResult(self.step, loss, grad_norm, lr, tokens)
        self.log_history.append(
            {
                "step": self.step, "epoch": self.epoch, "loss": loss, "grad_norm": grad_norm, "learning_rate": lr,
                "tokens": tokens,
            }
        )  # fmt: skip
        largest = float(torch.nn.utils.get_total_norm(self.parameters.values(), math.inf))
        if not math.isfinite(largest):
            self.fail("the update made parameters infinite", revert=True)
            return None
        return replace(result, notice=self._notice(result, largest))

    def _notice(self, result: StepResult, largest: float) -> str | None:
        """That the job goes on without learning, said once; not of one that has nothing left to learn (loss 0)."""
        no_gradient = result.grad_norm == 0
        usual = result.lr > USUAL_RATE * self.config.train.learning_rate
        if result.loss == 0 or not (no_gradient or (usual and self._is_unchanged())):
            self._idle = 0
            return None
        self._idle += 1
        if self._idle != IDLE_STEPS and not (self._idle < IDLE_STEPS and self.step == self.data.num_steps):
            return None
        what = "its gradient was exactly 0" if no_gradient else "its adapter did not change by one bit"
        steps = "1 step" if self._idle == 1 else f"{self._idle} steps"
        return (
            f"{what} in {steps} up to step {self.step}: it learns nothing any more (loss {result.loss:.4g}, learning rate "
            f"{result.lr:g}, largest parameter {largest:.3g}); a learning rate that is too high or too low does this"
        )

    def _is_unchanged(self) -> bool:
        """Whether the last step left every parameter as it was; decided by the first one that differs."""
        before = self.last_good or {}
        return all(torch.equal(value, before[key]) for key, value in state_dict(self.adapter).items())

    def stop(self, reason: str) -> None:
        """Let the present step be the last one; learning rates stay those of the configured steps."""
        self.stopped, self.data.step_limit = reason, self.step

    def fail(self, reason: str, revert: bool) -> None:
        """Stop for good; with revert, take back the last step, whose values give no finite loss."""
        self.status, self.failure = "failed", f"after step {self.step}: {reason}"
        self.discard()
        if revert and self.last_good is not None:
            self.step -= 1
            self.tokens_seen -= sum(line.get("tokens", 0) for line in self.log_history if line["step"] > self.step)
            self.log_history = [line for line in self.log_history if line["step"] <= self.step]
            with torch.no_grad():
                for key, tensor in state_dict(self.adapter).items():
                    tensor.copy_(self.last_good[key])
        self.failure += f"; the adapter of step {self.step} is kept"

    def trainer_state(self) -> dict[str, Any]:
        """HF-shaped trainer_state.json, with the job's status beside it."""
        train = self.config.train
        return {
            "global_step": self.step,
            "max_steps": self.data.num_steps,
            "epoch": self.epoch,
            "num_train_epochs": train.num_train_epochs,
            "train_batch_size": train.global_batch_size,
            "num_input_tokens_seen": self.tokens_seen,
            "log_history": self.log_history,
            "status": self.status,
            "failure": self.failure,
            "untrained": sorted(self.untrained),
        } | ({} if self.stopped is None else {"stopped": self.stopped})

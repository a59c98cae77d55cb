"""Keys of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from packlora.changes import plugin
from packlora.config.computing import PlansConfig, QuantizationConfig, ScheduleConfig
from packlora.config.job import JobConfig
from packlora.config.parallel import ParallelConfig
from packlora.config.section import Section
from packlora.config.shared import MOST_PROMPTS, MOST_TOKENS, PathText, Prompt, Strict
from packlora.config.train import CUT_OPTIMS


class Run(Strict):
    """A whole run: one frozen base model and the jobs that share it. Its fields are the keys of a run file.

    Raises:
        pydantic.ValidationError: a value is of the wrong type or out of range. packlora.train makes InputError of it for a run
            file or a dict, with the job's name and the nearest known key.
    """

    base_model: PathText
    """A local folder, a Hugging Face model id, or smollm2-135m for the packaged demo model."""
    revision: PathText | None = None
    """Branch, tag or commit of a base model on the hub; null: its main branch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Dtype of the base model and the activations; adapters and optimizer state are float32 (float64 is for verification).
    auto: bfloat16 on a GPU that computes in it, float16 on an older one, float32 on a CPU; a run that is resumed keeps its own.
    In float16 each job has a loss scale. The code that reads the data
    or loads the model replaces auto by the dtype."""
    quantization: QuantizationConfig | None = None
    """Quantise the frozen linear layers while they are loaded, as QLoRA does: nf4, fp4 or int8, or a mapping: double_quant, or
    method torchao with its quant_type. They are multiplied in dtype. null: as they are saved."""
    compute: Literal["dtype", "fp8", "dora_fp8"] = "dtype"
    """Products of frozen linear layers: in dtype; in FP8, faster and rounded more, on GPUs of compute capability 8.9 or newer;
    or in dtype but for the second product of DoRA under dropout, which is in FP8."""
    device: str = Field("auto", max_length=100)
    """auto takes the GPU if there is one; cpu, cuda or cuda:1 insist. mps is a Mac's GPU, which auto does not take."""
    output_dir: PathText
    """Folder for adapters, checkpoints, logs and the report: new, empty, or one that holds this run, to resume it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of jobs that have none of their own."""
    max_tokens_per_microbatch: int | Literal["auto"] = 4096
    """Most tokens, of all jobs together, in one forward and backward: decides memory and speed, not results. auto: by
    measurements on a GPU, 2048 on a CPU, at least the longest sample."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them: less memory, more time."""
    activation_offloading: bool = False
    """With gradient_checkpointing, keep the layers' inputs in the host's memory until the backward. No number changes."""
    offload_embedding: bool = False
    """Keep the embedding in the host's memory, where the output layer is another weight. No number changes."""
    fit: Literal["memory", "auto", "off"] = "memory"
    """Choice of what is not written, so that the run fits into the free memory of one GPU. memory: the size of microbatches,
    gradient_checkpointing, offload_embedding, activation_offloading, which change no number. auto: also quantization. off:
    nothing."""
    save_every: int = Field(50, ge=0)
    """Optimizer steps of a job between its checkpoints; 0 only at the end."""
    save_total_limit: int | None = Field(2, ge=1)
    """Checkpoints of a job to keep, the newest ones; null keeps all."""
    eval_every: int = Field(0, ge=0)
    """Optimizer steps of a job between evaluations of its eval_path; 0 only before and after training."""
    trust_remote_code: bool = False
    """Let the base model's repository run code of its own."""
    liger: bool | Literal["auto"] = "auto"
    """Fused norms, liger-kernel's rotary embedding and gated activations; auto takes what is installed and fits, on a GPU."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Microbatches run as CUDA graphs, so that the host does not set the pace; auto where the model and the jobs allow it."""
    keep_outputs: bool = False
    """DoRA layers keep their outputs in the place of a product as large. Not for models with kernels, other than liger's, that
    write into the outputs of linear layers behind autograd's back."""
    plans: PlansConfig = Field(default_factory=PlansConfig)
    """Computation of layers with adapters: decides speed and memory, and with lossy the rounding."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Distribution of the run over devices."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Packing of samples into microbatches."""
    sample_prompts: list[Prompt] = Field(default_factory=list, max_length=MOST_PROMPTS)
    """Prompts that each job's adapter completes at every evaluation; samples.jsonl and the page show the completions."""
    sample_max_new_tokens: int = Field(64, ge=1, le=MOST_TOKENS)
    """Most tokens of a completion of sample_prompts."""
    trackers: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(default_factory=list)
    """Experiment trackers that steps and held-out losses are logged to; on this machine, unless their own settings say
    otherwise."""
    sweep: Annotated[Any, Section(lambda: plugin("config").SweepConfig)] = None
    """Search for the best values of a job's keys."""
    jobs: list[JobConfig] = Field(min_length=1)
    """The adapters to train, at least one, all at the same time."""

    _chosen: frozenset[str] = PrivateAttr(frozenset())
    """Keys whose values `fit` chose."""

    def leaves(self, key: str) -> bool:
        """Whether `fit` may choose the value of a key: it is not written."""
        return self.fit != "off" and (key not in self.model_fields_set or key in self._chosen)

    def with_chosen(self, chosen: Mapping[str, Any]) -> Run:
        """A copy with values that `fit` chose, of keys that are not written."""
        values = {key: value for key, value in chosen.items() if self.leaves(key)}
        copy = self.model_copy(update=values)
        copy._chosen = self._chosen | values.keys()
        return copy

    @property
    def trained(self) -> list[JobConfig]:
        """The jobs that are trained: not the one that a sweep's candidates are made from."""
        return self.jobs if self.sweep is None else [job for job in self.jobs if job.name != self.sweep.job]

    @property
    def compares(self) -> bool:
        """Whether jobs are compared with one another, by their evaluations up to the end of a window."""
        return self.sweep is not None

    @property
    def generates(self) -> bool:
        """Whether samples of a job are made while it trains, so that a window can be planned only when it is due."""
        return any(job.rollout is not None for job in self.jobs)

    def prompts_of(self, job: JobConfig) -> list[str]:
        """Prompts that a job's adapter completes at every evaluation: its own or the run's."""
        return self.sample_prompts if job.sample_prompts is None else job.sample_prompts

    def seed_of(self, job: JobConfig) -> int:
        """The seed, 0 to 2**63 - 1, that a job draws from: its own or the run's."""
        return self.seed if job.seed is None else job.seed

    @field_validator("parallel", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" else value

    @field_validator("quantization", mode="before")
    @classmethod
    def _one_method(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @field_validator("plans", mode="before")
    @classmethod
    def _one_plan(cls, value: Any) -> Any:
        return {"plan": value} if isinstance(value, str) else value

    @field_validator("max_tokens_per_microbatch")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 2 <= value <= MOST_TOKENS:
            raise ValueError(f"is {value}; give auto or a number of tokens, at least 2 and at most {MOST_TOKENS}")
        return value

    @model_validator(mode="after")
    def _whole_codes(self) -> Run:
        if self.quantization is not None:
            self.check_quantized("quantization", self.quantization.method in ("nf4", "fp4", "int8"))
        return self

    def check_quantized(self, what: str, made: bool = False) -> None:
        """Raises ValueError where a setting does not go with a quantised base model.

        Args:
            what: makes it one, for the message.
            made: by bitsandbytes while the model is loaded, so that each process makes the codes of its own rows.
        """
        key = self.parallel.in_parts if made else self.parallel.divided
        if key is not None:
            better = (
                "; shard_base takes those of quantization: nf4, fp4 and int8, of a base_model that is saved as floats"
            )
            raise ValueError(
                f"parallel.{key} does not take quantised layers apart ({what}){better}; leave one of them out"
            )

    @model_validator(mode="after")
    def _cut_as_it_can_be(self) -> Run:
        key = self.parallel.in_parts
        for job in self.jobs if key is not None else ():
            if job.train.optim not in CUT_OPTIMS:
                raise ValueError(
                    f"jobs: job {job.name!r} has train.optim: {job.train.optim}, which parallel.{key} does not take; use "
                    f"one of {', '.join(CUT_OPTIMS)}"
                )
        return self

    @model_validator(mode="after")
    def _offloads_checkpoints_of_whole_layers(self) -> Run:
        if self.activation_offloading and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offloading: true keeps checkpoints on the host; set gradient_checkpointing: true"
            )
        key = self.parallel.divided
        if self.activation_offloading and key is not None:
            raise ValueError(f"activation_offloading: true does not go with parallel.{key}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> Run:
        seen: dict[str, str] = {}
        for job in self.jobs:  # case-insensitive file systems would mix two such folders
            if job.name.lower() in seen:
                raise ValueError(
                    f"jobs: the name {job.name!r} is used twice (also as {seen[job.name.lower()]!r}); "
                    "job names become folders and must be unique, ignoring case"
                )
            seen[job.name.lower()] = job.name
        return self

    @model_validator(mode="after")
    def _has_what_its_sweep_needs(self) -> Run:
        if self.sweep is not None:
            self.sweep.check(self)
        return self

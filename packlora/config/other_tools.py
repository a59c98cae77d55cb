"""Keys of Axolotl, TRL, Unsloth, LLaMA-Factory and the Hugging Face Trainer, and what stands for them in a run file.

A refusal of an unknown key says it, and the tables of docs/coming-from.md are compared with it by a test. The nearest known
key would often mean something else.
"""

from __future__ import annotations

_HINTS = {
    # the run
    "see the run's base_model": "model_name_or_path model_name",
    "see the run's revision": "model_revision",
    "see the run's dtype: bfloat16": "bf16 bfloat16 pure_bf16 load_in_16bit",
    "see the run's dtype: float16": "fp16 float16",
    "see the run's dtype": "bnb_4bit_compute_dtype",
    "see the run's quantization: nf4": "load_in_4bit quantization_config bnb_4bit_quant_type quantization_type",
    "see the run's quantization: int8": "load_in_8bit",
    "see the run's quantization: nf4 for 4 bits, int8 for 8": "quantization_bit quantization_method",
    "see the run's quantization: {method: nf4, double_quant: true}":
        "bnb_4bit_use_double_quant use_bnb_nested_quant double_quantization",
    "see the run's gradient_checkpointing":
        "use_gradient_checkpointing disable_gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpointing_kwargs",
    "see the run's liger": "use_liger_kernel enable_liger_kernel",
    "see the run's device: cpu": "use_cpu",
    "see the run's save_every": "save_steps save_strategy saves_per_epoch",
    "see the run's sample_prompts": "generate_samples",
    "see the run's trackers":
        "report_to wandb_project use_wandb use_mlflow use_tensorboard use_trackio wandb_entity wandb_name wandb_watch "
        "wandb_log_model run_name",
    "see the run's parallel": "deepspeed fsdp fsdp_config",
    "see the run's parallel: {timeout_s: SECONDS}": "ddp_timeout",
    "see the run's parallel: {shard_base: N}": "dp_shard_size",
    "see the run's parallel: {tensor: N}": "tensor_parallel_size",
    "see the run's parallel: {expert: N}, and ep_implementation beside it":
        "ep_size expert_parallel_size expert_model_parallel_size",
    "nothing is compiled; see the run's cuda_graphs, which takes the host away on a GPU":
        "compile torch_compile torch_compile_backend torch_compile_mode",
    "see a job's seed; all jobs have the run's seed where they have none": "random_state data_seed",
    # data
    "see a job's data.path": "datasets dataset train_dataset dataset_name dataset_dir",
    "see a job's data.path, a list of sources, each with a weight": "mix_strategy interleave_probs",
    "see a job's data.eval_path and data.eval_split": "val_set_size val_size eval_dataset test_datasets dataset_test_split",
    "see a job's data.subset": "dataset_config",
    "see a job's data.split": "dataset_train_split",
    "see a job's data.columns, {text: NAME}": "dataset_text_field",
    "see a job's data.chat_template": "template chat_template_path chat_template_jinja",
    "see a job's data.chat_template_kwargs, {enable_thinking: false}": "enable_thinking",
    "see a job's data.system": "default_system default_system_message",
    "see a job's data.max_length": "sequence_len max_seq_length max_seq_len cutoff_len",
    "see a job's data.truncate": "truncation_mode excess_length_strategy",
    "see a job's data.streaming": "dataset_streaming",
    "see a job's data.shuffle_buffer_size": "buffer_size",
    "samples are always packed":
        "packing sample_packing padding_free neat_packing pad_to_sequence_len group_by_length eval_sample_packing eval_packing",
    "the loss is over completions and turns of the assistant; of rows with a text over all of it":
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt train_on_responses_only",
    "mask_history: true stands in a row of the data, beside its conversation": "mask_history",
    "nothing is prepared before a run; leave it out":
        "dataset_prepared_path dataset_num_proc dataset_processes preprocessing_num_workers dataloader_num_workers "
        "overwrite_cache remove_unused_columns",
    "samples are never padded, and the tokens are the tokenizer's; leave it out": "special_tokens pad_token",
    # adapter
    "see a job's adapter": "peft_config use_peft finetuning_type",
    "see a job's adapter.r": "rank lora_r lora_rank",
    "see a job's adapter.lora_alpha": "alpha",
    "see a job's adapter.lora_dropout": "dropout",
    "see a job's adapter.lora_dropout, 0": "disable_dropout",
    "adapters are LoRA's or DoRA's, of causal language models; leave it out": "task_type lora_task_type peft_type",
    "see a job's adapter.target_modules": "lora_target_modules lora_target",
    "see a job's adapter.target_modules, all-linear": "lora_target_linear",
    "see a job's adapter.exclude_modules": "freeze_vision_tower finetune_vision_layers",
    "see a job's adapter.target_parameters": "lora_target_parameters",
    "see a job's adapter.modules_to_save": "lora_modules_to_save additional_target",
    "see a job's adapter.layers_to_transform": "peft_layers_to_transform",
    "see a job's adapter.layers_pattern": "peft_layers_pattern",
    "see a job's adapter.rank_pattern": "lora_rank_pattern",
    "see a job's adapter.alpha_pattern": "lora_alpha_pattern",
    "see a job's adapter.trainable_token_indices": "peft_trainable_token_indices",
    "see a job's adapter.use_dora": "peft_use_dora",
    "see a job's adapter.use_rslora": "peft_use_rslora",
    "see a job's adapter.init_lora_weights": "peft_init_lora_weights",
    "see a job's adapter.init_lora_weights, pissa_niter_16": "pissa_init pissa_iter",
    "see a job's adapter.init_lora_weights, loftq": "loftq_config",
    "see a job's adapter.init_from": "lora_model_dir adapter_name_or_path",
    "B has none; a job's adapter.bias trains those of the base": "lora_bias",
    "adapters alone are trained; a job's adapter.modules_to_save trains copies of whole modules": "full_finetuning",
    # train
    "a job's train.global_batch_size is its samples per optimizer step; the run's max_tokens_per_microbatch decides memory":
        "batch_size micro_batch_size per_device_train_batch_size per_device_eval_batch_size eval_batch_size "
        "gradient_accumulation_steps",
    "see a job's train.learning_rate": "lr",
    "see a job's train.num_train_epochs": "epochs num_epochs",
    "see a job's train.lr_scheduler_type": "lr_scheduler",
    "see a job's train.lr_scheduler_kwargs, {min_lr_rate: NUMBER}, with cosine_with_min_lr": "cosine_min_lr_ratio",
    "see a job's train.optim": "optimizer",
    "see a job's train.shuffle": "shuffle_dataset shuffle_merged_datasets disable_shuffling",
    "see a job's train.drop_last": "dataloader_drop_last",
    "see a job's train.eval_steps": "eval_strategy evaluation_strategy evals_per_epoch",
    "see a job's train.early_stopping_patience, in evaluations": "early_stopping_steps",
    "see a job's train.router_aux_loss_coef": "moe_aux_loss_coef",
    "see a job's train.trainer": "rl stage",
    "see a job's train.beta": "rl_beta pref_beta",
    "see a job's train.loss_type": "pref_loss dpo_loss_type",
    "see a job's train.loss_type, [sigmoid, sft], and train.loss_weights": "rpo_alpha pref_ftx",
    "see a job's train.loss_weights": "dpo_loss_weights",
    "see a job's train.label_smoothing": "dpo_label_smoothing",
    "see a job's train.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "see a job's train.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "see a job's train.reference": "ref_model ref_adapter_name ref_model_adapters",
    "the reference is always computed once, before the first step": "precompute_ref_log_probs",
    # rewards
    "see a job's rollout.reward": "reward_funcs",
    "see a job's rollout.max_new_tokens": "max_completion_length",
    "prompts with rollout.max_new_tokens have a job's data.max_length": "max_prompt_length",
    "completions that end by their length are learnt as others": "mask_truncated_completions",
    "tokens are drawn of all, by a job's rollout.temperature": "top_p top_k min_p repetition_penalty",
    "there is no second bound; see a job's train.epsilon_high": "delta",
    "see a job's rollout.max_turns, which is one more": "max_tool_calling_iterations",
    "see a job's rollout.num_generations, which is that of evaluations too": "num_generations_eval",
    "see a job's train.loss_type, gspo for sequence": "importance_sampling_level",
    "see a job's rollout.importance_sampling_mode": "vllm_importance_sampling_mode",
    "see a job's rollout.importance_sampling_clip_max": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "see a job's rollout.importance_sampling_clip_max, null for false": "vllm_importance_sampling_correction",
    "completions are learnt from once; a job's train.global_batch_size counts them":
        "num_iterations steps_per_generation generation_batch_size",
    "completions are drawn on the model itself, with its adapters": "use_vllm vllm_mode use_transformers_paged",
    # options and commands
    "it is an option: packlora train --resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "a folder that holds a run is never overwritten; give another output_dir, or --resume": "overwrite_output_dir",
    "it is a command: packlora merge": "export_dir merge_lora",
    "the page of the run has the curves; see packlora watch": "plot_loss",
    "packlora train trains, and evaluates where samples are held out; leave it out": "do_train do_eval",
    "checkpoints hold what --resume needs, and the folder of a job the adapter; leave it out": "save_only_model",
    "processes are started by torchrun; leave it out": "local_rank ddp_find_unused_parameters",
    "TF32 is a setting of torch's; leave it out": "tf32",
    # nothing stands for it
    "attention of packed samples is packlora's own":
        "attn_implementation flash_attention flash_attn sdp_attention eager_attention flex_attention xformers_attention",
    "on a GPU kernels are chosen by themselves": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
    "nothing is uploaded; the folder of a job is a PEFT adapter": "push_to_hub hub_model_id",
}  # fmt: skip
"""Hints, with the keys of other tools that they are for."""
OTHER_TOOLS = {key: instead for instead, keys in _HINTS.items() for key in keys.split()}
"""Keys of other tools, with what stands for them here."""

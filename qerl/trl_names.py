"""Names of TRL's GRPOConfig that qerl does not take, each refused with what to write instead."""

# What means something else here, or goes by another name.
OTHER_NAMES = {
    "peft_config": "write lora_r, lora_alpha, lora_target_modules",
    "logging_dir": "write output_dir",
    "per_device_train_batch_size": "prompts_per_step x num_generations completions are a rollout; micro_batch_tokens "
    "decides how much goes through the model at a time",
    "gradient_accumulation_steps": "steps_per_generation says how many updates a rollout is cut into; micro-batches "
    "follow from micro_batch_tokens",
    "generation_batch_size": "write prompts_per_step (prompts, not completions)",
    "gradient_checkpointing": "write recompute",
    "bf16": "write dtype=bfloat16",
    "fp16": "write dtype=bfloat16 or float32",
    "warmup_ratio": "write warmup_steps (below 1 it is a share)",
    "use_vllm": "qerl samples with its own engine; drop it",
    "delta": "two-sided clipping is not offered; drop it",
    "vllm_importance_sampling_correction": "write correction.form (token, masked, sequence, geometric or off)",
    "vllm_importance_sampling_cap": "write correction.cap",
    "vllm_importance_sampling_mode": "write correction.form (token, masked, sequence, geometric or off)",
    "per_device_eval_batch_size": "write eval_size (prompts)",
    "eval_strategy": "write eval_steps",
    "save_strategy": "write save_steps",
    "use_peft": "LoRA is on unless base=full; drop it",
    "model_name_or_path": "write model",
    "load_in_4bit": "write base=nvfp4, mxfp4 or nf4",
    "target_modules": "write lora_target_modules",
    "r": "write lora_r",
    "torch_dtype": "write dtype",
    "use_bias_correction_kl": "the KL is always weighted by the ratio (TRL's default); drop it",
    "multi_objective_aggregation": "rewards are summed, then normalised (TRL's default); drop it",
    "num_generations_eval": "evaluation continues each prompt once, greedily; drop it",
    "data_seed": "write seed",
    "resume_from_checkpoint": "write --resume, or qerl.train(..., resume=True)",
    "vllm_importance_sampling_clip_max": "write correction.cap",
    "use_cpu": "write device=cpu",
    "gradient_checkpointing_kwargs": "write recompute",
    "run_name": "write output_dir",
    "lora_dropout": "LoRA has no dropout; drop it",
    "use_rslora": "write lora_alpha times the root of lora_r",
    "load_in_8bit": "write base=nvfp4, mxfp4, nf4 or bf16",
    "bnb_4bit_quant_type": "write base=nf4",
    "max_seq_length": "write max_prompt_length and max_completion_length",
    "lora_modules_to_save": "train_norms=true trains the norms as well; nothing else can be",
    "modules_to_save": "train_norms=true trains the norms as well; nothing else can be",
    "eval_on_start": "evaluation always runs before step 1; drop it",
}

# Short names that people write.
SHORT = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "prompts_per_step (prompts) and num_generations (completions of each)",
    "group_size": "num_generations",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "dataset": "task",
    "reward": "reward_funcs",
    "rewards": "reward_funcs",
}

# What has no counterpart.
WITHOUT_COUNTERPART = {
    "accelerator_config", "auto_find_batch_size", "average_tokens_across_devices", "batch_eval_metrics",
    "bf16_full_eval", "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "dataloader_drop_last",
    "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
    "debug", "deepspeed", "disable_dropout", "disable_tqdm", "do_eval", "do_predict", "do_train",
    "ds3_gather_for_generation", "enable_jit_checkpoint", "entropy_coef", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches",
    "eval_use_gather_object", "fp16_full_eval", "fsdp", "fsdp_config", "full_determinism", "generation_kwargs",
    "greater_is_better", "hub_always_push", "hub_revision", "hub_strategy",
    "hub_token", "ignore_data_skip", "include_for_metrics", "include_num_input_tokens_seen", "label_names",
    "label_smoothing_factor", "length_column_name", "liger_kernel_config", "load_best_model_at_end", "local_rank",
    "log_completions_hub_repo", "log_level", "log_level_replica", "log_multimodal", "log_on_each_node",
    "log_unique_prompts", "logging_first_step", "logging_nan_inf_filter", "logging_strategy", "lr_scheduler_kwargs",
    "max_tool_calling_iterations", "metric_for_best_model", "model_init_kwargs", "neftune_noise_alpha",
    "num_completions_to_print", "off_policy_mask_threshold", "optim_args", "optim_target_modules",
    "pad_to_multiple_of", "parallelism_config", "prediction_loss_only",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "remove_unused_columns",
    "restore_callback_states_from_checkpoint", "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos",
    "save_on_each_node", "save_only_model", "shuffle_dataset", "skip_memory_metrics", "sync_ref_model", "tf32",
    "top_entropy_quantile", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "train_sampling_strategy",
    "transformers_continuous_batching_config", "trust_remote_code", "use_adaptive_entropy", "use_cache", "use_dora",
    "use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged", "vespo_k_neg",
    "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
    "vllm_group_port", "vllm_importance_sampling_clip_min", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip


def trl_hint(key: str) -> str:
    """What to say about a setting that TRL has and qerl has not, or that goes by a longer name; empty for any other."""
    if key in SHORT:
        return f"There is no setting {key}: write {SHORT[key]}."
    if key in OTHER_NAMES:
        return f"{key} is TRL's and not the same here: {OTHER_NAMES[key]}."
    return f"{key} is TRL's and has no counterpart here: drop it." if key in WITHOUT_COUNTERPART else ""

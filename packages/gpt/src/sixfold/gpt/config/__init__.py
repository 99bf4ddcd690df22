"""What a user may say in the TOML file, key by key, and what it means together. Numbers and texts: no torch.

From outside: batch_schedule, frozen, layer_tensors, lora, model_config, presets, resume_rules, rope_scaling, rules,
table, token_budgets, toml, train_config.
"""

"""Reinforcement learning: rollouts, advantages, losses, and the loop that reads in that order (`trainer`).

Pure functions of tensors: `advantage`, `loss`, `correction`, `schedule` (noise and learning rate). `data` draws
prompts, `rollout` samples and scores them, `batch` packs what is trained on, `update` does one optimizer step,
`evaluate` measures, `checkpoint` saves and restores, `folder` keeps a run's files, `guard` watches, `ranks` is what
several processes share. `run` builds all of it from a configuration.
"""

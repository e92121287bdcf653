"""Evaluation: tasks' held-out questions, sampled on our engine without noise and graded as in training."""

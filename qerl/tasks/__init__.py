"""Tasks to train on: problems, their answers, and how a completion is graded."""

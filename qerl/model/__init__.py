"""Models: for now their shapes, what those weigh in each format, and checkpoints with random weights."""

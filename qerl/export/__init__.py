"""What was trained, written for others to use: PEFT's adapter, plain weights, 4 bits again, vLLM's needs."""

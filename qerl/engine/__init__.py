"""The rollout engine, in three layers: scheduler (plain Python numbers, no torch), runner (tensors), graphs.

`block_pool` (who holds which block, prefix reuse), `sequence` and `scheduler` are the first; `cache` (the tensors, in
`virtual_memory`), `drawing` (logits to tokens), `decode` (a decode step) and `runner` (steps that mix prefill and
decode) the second; `graphs` replays decode steps. `engine` is the loop around them.
"""

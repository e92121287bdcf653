"""The rollout engine, in three layers: scheduler (plain Python numbers, no torch), runner (tensors), graphs.

`block_pool` (cache blocks with reference counts and prefix reuse), `sequence`, `scheduler`, `runner` (eager:
paged cache and attention) and `engine` (the loop). Graphs are to come.
"""

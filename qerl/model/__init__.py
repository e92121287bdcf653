"""The decoder that trainer and sampler share: its parts, weights from checkpoints, LoRA and noise.

`architecture` reads what a family is made of, `layers` and `decoder` are the one definition of it, `trained` what is
updated, `packing` what goes through it; `loader` fills it, `adapter` and `noise` change it. `shapes`, `memory` and
`random_checkpoint` know public models by name, without their weights.
"""

"""The Triton kernels, a file for each operation of the folder above, which imports them where they run.

Every kernel starts with `wait`: on Hopper and newer it is launched while the one before it still runs (programmatic
dependent launch), and may read only what never changes within a step before that line.
"""

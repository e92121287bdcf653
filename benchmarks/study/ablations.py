"""The arms of the 135M's tables: settings by name, on top of sums.yaml. The first arm of a table is what others are
compared with."""

from typing import Any

Arms = dict[str, dict[str, Any]]

RECIPE = {"learning_rate": 2e-4, "lora_r": 32, "noise.profile": "uniform", "correction.form": "token"}
QUIET = RECIPE | {"noise.schedule": "off"}
NOISY = RECIPE | {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 1e-2}
STRONG = NOISY | {"noise.sigma_start": 5e-2}
NO_NOISE: Arms = {"no noise": QUIET | {"base": "nvfp4"}}

FORMATS: Arms = {
    "bf16 + LoRA": QUIET | {"base": "bf16"},
    "NVFP4 + LoRA": QUIET | {"base": "nvfp4"},
    "MXFP4 + LoRA": QUIET | {"base": "mxfp4"},
    "NF4 + LoRA (QLoRA)": QUIET | {"base": "nf4"},
    "full, learning rate 1e-5": {"base": "full", "learning_rate": 1e-5},
    "full, learning rate 5e-5": {"base": "full", "learning_rate": 5e-5},
}
LEARNING_RATES = (2e-4, 1e-3, 3e-3, 1e-2)
RATES: Arms = {
    f"{name}, {rate:g}": QUIET | {"base": name.lower(), "learning_rate": rate}
    for rate in LEARNING_RATES
    for name in ("bf16", "NVFP4")
}
SCHEDULES: Arms = NO_NOISE | {
    name: NOISY | {"noise.schedule": name} for name in ("exponential", "linear", "cosine", "logarithmic")
}
NOISE: Arms = NO_NOISE | {
    "0.01": NOISY,
    "0.01, no correction": NOISY | {"correction.form": "off"},
    "0.05": STRONG,
    "0.05, no correction": STRONG | {"correction.form": "off"},
    "0.05, masked": STRONG | {"correction.form": "masked"},
    "0.05, one weight a sequence": STRONG | {"correction.form": "sequence"},
    "by entropy, from 0.01": NOISY | {"noise.schedule": "entropy"},
}
PROFILES: Arms = NO_NOISE | {
    "the same in all blocks": NOISY,
    "growing with depth": NOISY | {"noise.profile": "linear"},
}
RANKS: Arms = {f"r = {r}": QUIET | {"base": "nvfp4", "lora_r": r, "lora_alpha": 2.0 * r} for r in (16, 32, 64, 128)}

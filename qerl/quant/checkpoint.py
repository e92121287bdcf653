"""A checkpoint folder, plain or quantized: its config, where every tensor lies, and quantized weights read back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.quant.layout import Quantized, layout_of
from qerl.quant.safetensors_io import Location, Reader, read_header
from qerl.tiny import tiny_model_folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them holds the vocabulary
PIECE = 1 << 22  # elements read at a time
# What a hub download brings: weights, configuration, tokenizer; no pickles and no code.
HUB_WEIGHTS = ["*.safetensors"]
HUB_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "LICENSE*"]


class Checkpoint:
    """A folder with config.json and safetensors weights. Use as a context manager when tensors are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self.tensors: dict[str, Location] = {}
        expected, files = _weight_files(folder)
        for path in files:
            found = read_header(path)
            self.tensors |= {name: where for name, where in found.items() if expected.get(name, path) == path}
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} tensors that its index names, such as {missing[0]}. Download it again."
            )
        self._reader = Reader()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._reader.__exit__(None, None, None)

    @property
    def nbytes(self) -> int:
        return sum(where.spec.nbytes for where in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """A tensor as the file holds it."""
        return self._reader.read(self.tensors[name]).view(self.tensors[name].spec.shape)

    def read_into(self, name: str, out: Tensor) -> None:
        """A tensor, piece by piece, into one of the same shape on any device and of any dtype."""
        where, flat = self.tensors[name], out.view(-1)
        if where.spec.shape != out.shape:
            raise ValueError(f"{name} has shape {where.spec.shape} where {tuple(out.shape)} belongs.")
        for start in range(0, where.spec.numel, PIECE):
            piece = self._reader.read(where, start, min(PIECE, where.spec.numel - start))
            flat[start : start + len(piece)].copy_(piece)

    @property
    def quantized_modules(self) -> list[str]:
        """Names of the modules whose weight is quantized; none in a plain checkpoint."""
        if not self.config.get("quantization_config"):
            return []
        layout = layout_of(self.config["quantization_config"])
        mark = ".weight.quant_state.bitsandbytes__nf4" if layout.format == "nf4" else ".weight_packed"
        return [name.removesuffix(mark) for name in self.tensors if name.endswith(mark)]

    def read_quantized(self, module: str, device: torch.device | str = "cpu") -> Quantized:
        """The quantized weight of a module ("model.layers.0.self_attn.q_proj")."""
        layout = layout_of(self.config["quantization_config"])
        return layout.decode(
            lambda suffix: self.read(module + suffix).to(device), lambda suffix: module + suffix in self.tensors
        )


def resolve(model: str, check: Callable[[Path], object] = lambda folder: None) -> Path:
    """A local folder as it is, a hub id as its downloaded snapshot, `tiny` as the model that comes with the package
    (a folder of that name is taken instead only if it holds a model). `check` sees it before weights are fetched."""
    folder = Path(model).expanduser()
    if model == "tiny" and not (folder / "config.json").is_file():
        folder = tiny_model_folder()
    if folder.is_dir():
        check(folder)
        return folder
    if folder.exists():
        raise ValueError(f"{model} is a file; name the folder that holds config.json and the weights.")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(f"There is no folder {model}. Name a local checkpoint folder or a hub id (owner/name).")
    check(_download(model, HUB_SMALL))
    return _download(model, HUB_SMALL + HUB_WEIGHTS)


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        said = str(error).splitlines()[0].rstrip(" .:")
        raise ValueError(
            f"There is no local folder {model}, and the hub gave no model of that id ({said}). "
            "Check the name, the network, and for gated models `hf auth login`."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        remedy = "Name the one that holds it."
        if (folder / "metrics.jsonl").is_file():  # a run's folder
            remedy = f"It is a run: name the model it was trained on (--model), and {folder / 'adapter'} as --adapter."
        raise ValueError(f"{folder} has no config.json: it is not a model checkpoint folder. {remedy}")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return config


def _weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """Which file an index promises each tensor in (nothing without an index), and the weight files."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return {}, [folder / SINGLE]
        if any(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                f"{folder} holds only pickled weights (pytorch_model*.bin), which qerl never loads. "
                "Save it once with transformers' save_pretrained, which writes safetensors."
            )
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to read.")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}). Download it again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing[:4])}. Download them."
        )
    return {name: folder / file for name, file in weight_map.items()}, [folder / name for name in names]

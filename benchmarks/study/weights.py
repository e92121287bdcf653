"""A GGUF file, whole or in pieces, as a plain 16-bit checkpoint: `python benchmarks/study/weights.py OUT PIECE...`.

For hosts without a hub that take files of limited size: `split -b 60M model.gguf piece.`, send the pieces, then this.
Needs the package gguf. transformers reads the weights and marks the model as quantized, which it will not save: they go
into a fresh model of the same configuration. What was rounded to 4 bits stays rounded. Where a model's head is its
embedding, the file may hold that matrix twice, rounded in two ways: --tie takes the head's for both.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path


def join(pieces: list[Path], into: Path) -> str:
    """Writes the pieces one after another; SHA-256 of the whole."""
    digest = hashlib.sha256()
    with open(into, "wb") as file:
        for piece in pieces:
            data = piece.read_bytes()
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def convert(folder: Path, name: str, out: Path, tie: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    dropped = ("quantization_config", "_name_or_path", "dtype", "torch_dtype")
    settings = {key: value for key, value in read.config.to_dict().items() if key not in dropped}
    if tie:
        read.get_input_embeddings().weight = read.get_output_embeddings().weight
    plain = type(read)(type(read.config).from_dict(settings | ({"tie_word_embeddings": True} if tie else {})))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("pieces", type=Path, nargs="+", help="of the GGUF file, in order")
    parser.add_argument("--sha256", help="of the whole file; others are refused")
    parser.add_argument("--tie", action="store_true", help="head and embedding are one matrix")
    asked = parser.parse_args()
    if missing := [str(piece) for piece in asked.pieces if not piece.is_file()]:
        parser.error(f"There is no file {', '.join(missing)}.")
    with open(asked.pieces[0], "rb") as file:
        if file.read(4) != b"GGUF":
            parser.error(f"{asked.pieces[0]} does not begin as a GGUF file does. Are the pieces in order?")
    with tempfile.TemporaryDirectory() as folder:
        found = join(asked.pieces, Path(folder) / "model.gguf")
        if asked.sha256 and asked.sha256.lower() != found:
            parser.error(f"The pieces make a file with SHA-256 {found}, not {asked.sha256}. Is one missing?")
        convert(Path(folder), "model.gguf", asked.out, asked.tie)
    print(f"{asked.out}: from a file with SHA-256 {found}")  # noqa: T201


if __name__ == "__main__":
    main()

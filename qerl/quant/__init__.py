"""The 4-bit formats, in plain PyTorch, and the tools that read and write them as checkpoints.

One file a format: `nvfp4`, `mxfp4`, `nf4`, each with `quantize`, `dequantize`, `pack` and `unpack`. They are exact
(compared bit for bit with compressed-tensors and bitsandbytes) and are the reference of every kernel.
Around them: `e2m1` (the number both FP4 formats store), `blocks` (checks and the scale search they share),
`safetensors_io` (tensors read and written piece by piece), `layout` (how a format lies in a file), `checkpoint` (read a
folder, plain or quantized), `plan` and `convert` (stream a folder through a format), `calibrate` (AWQ and GPTQ by
llm-compressor) and `report` (what the rounding cost).
"""

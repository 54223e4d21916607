"""Writes a GGUF file's quantised tensors in another format, for peers that are faster with one than with the original.

What was lost by the first quantisation stays lost: the result serves speed measurements, not comparisons of quality.
"""

from pathlib import Path

import gguf

FILE_TYPES = {"Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
"""Format → what `general.file_type` says."""


def requantised(source: Path, format_name: str, directory: Path) -> Path:
    """Return the path of `source` in the format, made unless it is there; tensors in Q8_0 and in floats stay."""
    target = directory / f"{source.stem}.{format_name}.gguf"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        _write(gguf.GGUFReader(source), format_name, unfinished)
        unfinished.rename(target)
    return target


def _write(reader: gguf.GGUFReader, format_name: str, target: Path) -> None:
    wanted = gguf.GGMLQuantizationType[format_name]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    writer.add_file_type(FILE_TYPES[format_name])
    for tensor in reader.tensors:
        kept = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0, wanted}
        if tensor.tensor_type in kept:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Names the weights that an executor has loaded, so that what other weights have computed is not taken for theirs."""

import hashlib
from pathlib import Path

DIGEST_BYTES = 8


def weights_version(model_path: Path | None) -> str:
    """Return a name that changes when the file does, or any file of a checkpoint's directory; empty without a model.

    It is made of names, sizes and times: to read a large model once more only for its name would double its loading.
    """
    if model_path is None:
        return ""
    files = sorted(model_path.iterdir()) if model_path.is_dir() else [model_path]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        facts = file.stat()
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()

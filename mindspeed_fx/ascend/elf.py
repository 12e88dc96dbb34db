"""What a shared library asks of others: the names in its ELF tables, read without loading it."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Iterator

_DYNAMIC, _DYNSYM, _NEEDED = 6, 11, 1


def wanted(path: str | os.PathLike) -> tuple[set[str], set[str]]:
    """(libraries it needs, symbols it leaves undefined) of a little-endian 64-bit ELF file.

    Raises:
        ValueError: another kind of file.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a little-endian 64-bit ELF file")
        table, entry, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
        libraries, symbols = set(), set()
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind == _DYNAMIC:
                strings = sections[link][4]
                libraries |= {
                    _string(data, strings + value)
                    for tag, value in _entries("<qQ", data, offset, size)
                    if tag == _NEEDED
                }
            elif kind == _DYNSYM:
                strings = sections[link][4]
                rows = _entries("<IBBHQQ", data, offset, size)  # name, info, other, section (0: undefined), value, size
                symbols |= {_string(data, strings + name) for name, _, _, section, _, _ in rows if name and not section}
    return libraries, symbols


def _entries(layout: str, data: mmap.mmap, offset: int, size: int) -> Iterator[tuple]:
    yield from struct.iter_unpack(layout, data[offset : offset + size])


def _string(data: mmap.mmap, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode()

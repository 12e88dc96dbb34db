"""What a shared library asks of others: the names in its ELF tables, read by pyelftools without loading it."""

from __future__ import annotations

import os


def read_needed(path: str | os.PathLike) -> tuple[set[str], set[str]]:
    """(libraries it needs, symbols it leaves undefined) of an ELF file.

    Raises:
        ValueError: another kind of file.
        ImportError: pyelftools is missing.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise ImportError('reading shared libraries needs pyelftools: pip install "mindspeed-fx[ascend]"') from error

    with open(path, "rb") as file:
        try:
            elf = ELFFile(file)
        except ELFError:
            raise ValueError(f"{path} is not an ELF file") from None
        dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")} if dynamic else set()
        undefined = {s.name for s in symbols.iter_symbols() if s["st_shndx"] == "SHN_UNDEF"} if symbols else set()
    return libraries, undefined - {""}

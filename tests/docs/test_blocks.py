"""Every block of code of README.md and docs/ runs, or says why it does not; what else the pages name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, PageError, read_page, read_text
from tests.docs.commands import CommandError, check_synopsis, check_words, make_targets
from tests.docs.run import OPTIONS, BlockError, run_page

OWN_PROCESS = {
    "docs/megatron.md": "the adaptor changes Megatron",
    "docs/guide/megatron.md": "the adaptor changes Megatron",
    "docs/guide/migrating.md": "the adaptor changes Megatron",
    "docs/guide/extend.md": "an operator that is defined stays",
}
"""Pages that change more than a namespace, and what; their blocks all run in the usual tier."""


def _code(page: str) -> list[Block]:
    """Blocks that run or could; of a page that breaks the rules none, since its own test says so."""
    try:
        return [b for b in read_page(page) if b.language in ("python", "bash") and not b.is_setup]
    except PageError:
        return []


RUNNING = [page for page in PAGES if _code(page)]
TIERS = [
    pytest.param(page, tier, marks=marks)
    for tier, marks in (
        ("usual", []),
        ("slow", [pytest.mark.slow, pytest.mark.timeout(900)]),
        ("npu", [pytest.mark.slow, pytest.mark.npu, pytest.mark.timeout(900)]),
    )
    for page in RUNNING
    if page not in OWN_PROCESS and (tier == "usual" or any(b.tag == tier for b in _code(page)))
]


@pytest.mark.parametrize("page, tier", TIERS)
def test_the_blocks_of_a_page_run(page, tier, tmp_path, monkeypatch):
    if tier == "npu":
        toolchain = pytest.importorskip("mindspeed_fx.ascend.toolchain")
        if not all(row["installed"] for row in toolchain.status(None, [])):
            pytest.skip("the Ascend tool chain is not installed")
        if "MINDSPEED_FX_TOOLCHAIN" in os.environ:  # which make gives from the top of the repository
            monkeypatch.setenv("MINDSPEED_FX_TOOLCHAIN", os.path.abspath(os.environ["MINDSPEED_FX_TOOLCHAIN"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", OPTIONS)
    assert run_page(page, tier) == _expected(page, tier)


def test_the_blocks_of_pages_that_change_the_process_run(tmp_path, monkeypatch):
    """All in one process of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", OPTIONS)
    done = subprocess.run([sys.executable, "-m", "tests.docs.run", *OWN_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = dict(re.findall(r"^(\S+\.md): (\d+) blocks$", done.stdout, re.MULTILINE))
    assert {page: int(n) for page, n in ran.items()} == {page: _expected(page, "usual") for page in OWN_PROCESS}


def _expected(page: str, tier: str) -> int:
    return sum(not b.title and b.runs_in(tier) for b in _code(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_keeps_the_rules(page):
    """Each fence has a language, each tag a reason."""
    read_page(page)


def test_most_blocks_run_and_the_others_name_what_they_need():
    """A block that runs nowhere needs a device, several processes, a network, or what is not in this repository."""
    blocks = [b for page in PAGES for b in _code(page)]
    left = [b for b in blocks if b.tag == "not run"]
    needs = r"\b(NPU|GPU|CUDA|processes|ranks|download\w*|Megatron-LM|MindSpeed|minutes)\b"
    assert not [b.place for b in left if not re.search(needs, b.reason)]
    assert len(left) <= 0.2 * len(blocks) and len(blocks) >= 50


def test_files_that_pages_write_are_used_there():
    unused = [
        block.place
        for page in PAGES
        for block in read_page(page)
        if block.title and not any(block.title in b.code for b in read_page(page) if b is not block)
    ]
    assert not unused


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_commands_in_prose_exist(page):
    """`mindspeed-fx ...`, `make ...` and `python -m ...` between back ticks, and in blocks of text."""
    text = (ROOT / page).read_text()
    code = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    shown = [line for b in read_text(text, page) if b.language == "text" for line in b.code.splitlines()]
    for words in (line.removeprefix("$ ") for line in [*code, *shown]):
        if words.startswith("mindspeed-fx "):
            check_synopsis(words)
        elif words.startswith("make "):
            assert words.split()[1] in make_targets() | {"sure"}, words
        elif re.match(r"python -m (tests|benchmarks|docs)\.", words):
            check_words(["python", *words.split()[1:3]], Path())


@pytest.mark.parametrize(
    "text, error, words",
    [
        ("```python\nx = 1\nassert x == 2\n```\n", BlockError, r"README.md:2: AssertionError"),
        ("```python\nx = (\n```\n", BlockError, "SyntaxError"),
        ("<!-- not run: needs several processes -->\n```python\nx = (\n```\n", BlockError, "SyntaxError"),
        ("```bash\nmindspeed-fx explian train.py\n```\n", BlockError, "refused"),
        ("```bash\nmindspeed-fx passes --jsn\n```\n", BlockError, "--jsn is no argument"),
        ("```bash\nmake trian\n```\n", BlockError, "make trian: the Makefile has"),
        ("```bash\npython gone.py\n```\n", BlockError, "no such script here"),
        ('```bash\npip install "mindspeed-fx[reprot]"\n```\n', BlockError, "extras are"),
        ("```bash\ncurl x\n```\n", BlockError, "curl is no program"),
        ('```python title="a.py"\nraise SystemExit(3)\n```\n```bash\npython a.py\n```\n', BlockError, "python a.py"),
        ("```\nx\n```\n", PageError, 'block of ""'),
        ("<!-- not run -->\n```python\nx\n```\n", PageError, "without a reason"),
        ("<!-- slow: two words -->\n```python\nx\n```\n", PageError, "without a reason"),
        ("<!-- slow: takes a minute alone -->\nNothing.\n", PageError, "stands before no block"),
    ],
)
def test_a_broken_block_is_found(text, error, words, tmp_path, monkeypatch):
    """The tests above can fail."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        run_page("README.md", blocks=read_text(text, "README.md"))


@pytest.mark.parametrize("text", ["mindspeed-fx explian", "mindspeed-fx explain X --optoins {}"])
def test_a_broken_command_in_prose_is_found(text):
    with pytest.raises(CommandError):
        check_synopsis(text)

"""The README's code runs, its links lead somewhere, and its commands exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    scope: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "predicted step" in printed and "parameter layers.1.mlp.up.weight" in printed
    assert scope["plan"].mesh == scope["offline"].mesh == (2, 4) and "parameter params.up" in printed


def test_links_and_commands():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z][a-z-]*)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

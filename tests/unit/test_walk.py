"""The execution of docs/howto/rlhf.md, with a page of quick commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import walk

CODE = """\
```python title="double.py"
import sys

print(2 * int(sys.argv[1]))
```

<!-- not run: test_rlhf.py runs this page -->
```bash
python double.py 4 --seed 0 > first
echo again >> runs
```

Text, and a block that is not a stage:

```bash
false
```

<!-- not run: test_rlhf.py runs this page -->
```bash
echo half > second-0-
python double.py COUNT > third
```
"""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(CODE)
    monkeypatch.setattr(walk, "PAGE", path)
    return tmp_path / "place"


def test_an_interrupted_stage_leaves_nothing_and_finished_stages_are_not_repeated(page):
    with pytest.raises(subprocess.CalledProcessError):
        walk.walk(page)  # COUNT is not a number
    assert (page / "second-0-").exists()
    (page / "leftover").mkdir()
    seconds = walk.walk(page, changes={"COUNT": "5"})
    assert len(seconds) == 2
    assert (page / "third").read_text() == "10\n"
    assert (page / "runs").read_text() == "again\n"
    assert not (page / "leftover").exists()
    assert walk.walk(page, changes={"COUNT": "5"}) == seconds


def test_a_changed_stage_is_repeated_together_with_all_later_stages(page):
    walk.walk(page, changes={"COUNT": "5"})
    walk.walk(page, seed=3, changes={"COUNT": "5"})
    assert not (page / "second-0-").exists()
    assert (page / "second-3-").exists()
    assert "--seed 3" in json.loads((page / walk.STAGES).read_text())[0]["commands"]
    assert (page / "runs").read_text() == "again\n"


def test_a_text_that_the_page_does_not_contain_is_refused(page):
    with pytest.raises(ValueError, match="does not contain 'rounds=30'"):
        walk.walk(page, changes={"rounds=30": "rounds=2"})
    assert not page.exists()

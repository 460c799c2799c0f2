"""The report in a browser: nothing is wider than the screen, text is legible, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_rows import EVERYTHING, KERNEL, train_rows

from gradwire_tools.report import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Put into the page for the test: the report itself has no script. A frame has the width of a phone,
# since a window of headless Chromium is never narrower than 500 pixels.
MEASURE = """
<script>
addEventListener("load", () => {
  const view = frames[0], root = view.document.documentElement, wide = [];
  for (const one of view.document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    if (box.width && box.right > view.innerWidth + 0.5) wide.push(one.tagName);
  }
  for (const one of view.document.querySelectorAll(".wide"))
    if (one.scrollWidth > one.clientWidth) wide.push(one.textContent.trim().slice(0, 40));
  const heights = [...view.document.querySelectorAll("svg text")].map(
    (one) => one.getBoundingClientRect().height);
  const outside = [...view.document.querySelectorAll("svg text")].filter((one) => {
    const svg = one.closest("svg").getBoundingClientRect(), box = one.getBoundingClientRect();
    return box.right > svg.right + 6 || box.left < svg.left - 6;
  }).map((one) => one.textContent);
  const style = view.getComputedStyle(view.document.body);
  document.title = "measured";
  document.body.textContent = JSON.stringify({
    scroll: root.scrollWidth, inner: view.innerWidth, wide, outside, least: Math.min(...heights),
    ground: style.backgroundColor, ink: style.color,
  });
});
</script>
"""


def measured(folder: Path, text: str, width: int, scheme: str) -> dict[str, Any]:
    (folder / "report.html").write_text(text, encoding="utf-8")
    frame = f'<iframe src="report.html" width="{width}" height="900" style="border:0"></iframe>'
    (folder / "frame.html").write_text(f"<body>{frame}{MEASURE}</body>")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={['light', 'dark'].index(scheme) ^ 1}"]
    command += ["--window-size=1800,1000", "--virtual-time-budget=5000"]
    command.append((folder / "frame.html").as_uri())
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<body>(\{.*\})</body>", dom, re.DOTALL)
    assert found is not None, dom[:2000]
    told: dict[str, Any] = json.loads(found[1])
    return told


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian package chromium)")
def test_nothing_is_wider_than_the_screen(tmp_path: Path) -> None:
    long = "gradwire:topk:density=0.01:error_feedback=true:algorithm=hierarchical"
    rows = [
        *EVERYTHING,
        *train_rows("none", losses=(3.0, 3.1)),
        *({**KERNEL, "codec": f"codec{at}", "of_limit": 0.001 * 2**at} for at in range(30)),
    ]
    rows = [{**r, "method": long} if r.get("method") == "gradwire-qsgd4" else r for r in rows]
    text = page.render(rows, "w" * 300)
    for width, scheme in ((400, "light"), (400, "dark"), (1600, "light")):
        found = measured(tmp_path, text, width, scheme)
        assert found["inner"] == width
        assert found["scroll"] <= width
        assert found["wide"] == found["outside"] == []
        assert found["least"] >= 9  # pixels of a line of text in a figure
        dark = sum(map(int, re.findall(r"\d+", found["ground"])[:3])) < 3 * 128
        assert dark == (scheme == "dark")
        assert (sum(map(int, re.findall(r"\d+", found["ink"])[:3])) > 3 * 128) == dark

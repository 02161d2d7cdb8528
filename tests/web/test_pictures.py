"""The pictures of README: the graph of a page as a file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from tests.support.pictures import STYLE, standalone
from tests.web.world import World

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_of_the_graph_is_a_whole_file(world: World) -> None:
    world.bury("raw", 1, "torn")
    world.graph("flights", {"raw": ["parsed", "late"]})
    world.flush()
    text = standalone(world.pages().get("/pipelines"), STYLE.read_text())
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    names = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "queue"]
    assert names == ["raw", "parsed", "late"]
    assert "1 dead" in " ".join("".join(each.itertext()) for each in root.iter(f"{SVG}text"))
    assert "href" not in text
    (style,) = root.iter(f"{SVG}style")
    assert style.text is not None
    assert "prefers-color-scheme: dark" in style.text
    used = set(re.findall(r"var\((--[\w-]+)\)", style.text))
    assert used <= set(re.findall(r"(--[\w-]+):", style.text))

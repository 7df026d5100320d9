"""A matplotlib figure as SVG inside a page: named for those who do not see it, no ids twice, colours as CSS variables."""

from __future__ import annotations

import io
from xml.etree import ElementTree as ET

from matplotlib.figure import Figure

from dspine.evaluation.report.style import PALETTE, styled

NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_LINKS = ("clip-path", "{http://www.w3.org/1999/xlink}href")


def save_svg(figure: Figure, file: object) -> None:
    """Write the figure as SVG to a path or binary stream, the same bytes for the same figure."""
    with styled():
        figure.savefig(file, format="svg", metadata=NO_METADATA)  # type: ignore[arg-type]


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element for HTML. `name` goes before all its ids, which must be unique on the page."""
    stream = io.BytesIO()
    save_svg(figure, stream)
    root = ET.fromstring(stream.getvalue())
    for parent in [*root.iter()]:
        for child in [*parent]:
            if _local(child.tag) == "style":  # it would apply to the whole page
                parent.remove(child)
    for element in root.iter():
        _localise(element, name)
    width, height = (float(root.attrib.pop(side).removesuffix("pt")) for side in ("width", "height"))
    root.attrib |= {
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-desc",
        "style": f"aspect-ratio: {width:g} / {height:g}",
    }
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(position, element)
    svg = ET.tostring(root, encoding="unicode", short_empty_elements=True)
    for variable, value in PALETTE.items():
        svg = svg.replace(value, f"var(--{variable})")
    return svg


def _localise(element: ET.Element, name: str) -> None:
    """Take namespaces off (HTML needs none), put `name` before ids and links to them, and drop the font (the page's holds)."""
    element.tag = _local(element.tag)
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.attrib['id']}")
    for link in _LINKS:
        if link in element.attrib:
            element.set(_local(link), element.attrib.pop(link).replace("#", f"#{name}-"))
    if element.tag == "text" and "style" in element.attrib:
        declarations = (part.strip() for part in element.attrib["style"].split(";"))
        element.set("style", "; ".join(part for part in declarations if not part.startswith("font-family")))


def _local(name: str) -> str:
    return name.rpartition("}")[2]

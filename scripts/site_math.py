"""A hook of mkdocs: formulas become MathML when the site is built, so that no page loads a script to show them."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(text: str, **_: object) -> str:
    """Return a page's HTML with each formula that the Markdown extension marked in MathML."""
    return FORMULA.sub(
        lambda found: convert(html.unescape(found[2]), "inline" if found[1] == "span" else "block"),
        text,
    )

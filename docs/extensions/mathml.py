"""Renders formulas as MathML, which browsers show without a script or a network.

docutils converts the subset of LaTeX in `docutils.utils.math`; other commands are errors of the build.
"""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def render(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula, within a line or displayed.

    Args:
        translator: writer of the page.
        node: the formula.

    Raises:
        SkipNode: always, because the formula is complete.
    """
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    translator.body.append(f'<div class="math">\n{formula}\n</div>\n' if is_block else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the renderer with Sphinx.

    Args:
        app: the application.

    Returns:
        Metadata of the extension.
    """
    app.add_html_math_renderer("mathml", (render, None), (render, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Renders formulas as MathML, which browsers show without a script or a network.

docutils converts the subset of LaTeX in `docutils.utils.math`; other commands are errors of the build.
"""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def render_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Writes a formula within a line.

    Args:
        translator: writer of the page.
        node: the formula.

    Raises:
        SkipNode: always, because the formula is complete.
    """
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def render_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Writes a displayed formula.

    Args:
        translator: writer of the page.
        node: the formula.

    Raises:
        SkipNode: always, because the formula is complete.
    """
    translator.body.append(f'<div class="math">\n{tex2mathml(node.astext(), as_block=True)}\n</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the renderer with Sphinx.

    Args:
        app: the application.

    Returns:
        Metadata of the extension.
    """
    app.add_html_math_renderer("mathml", (render_inline, None), (render_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

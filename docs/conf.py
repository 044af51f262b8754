"""The site: `make docs` writes it to build/docs. It is built without a network, and warnings are errors."""

import logging
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "extensions"), str(ROOT), str(ROOT / "models")]

import kvjax  # noqa: E402

project = "kvjax"
author = "the kvjax authors"
version = release = kvjax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    # Our own, in extensions/.
    "house_docstrings",
    "policy_settings",
    "module_list",
]
exclude_patterns = ["extensions"]

html_theme = "furo"
html_title = "kvjax"
html_show_copyright = False
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # the notebook is run at every build
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # what a policy does by its own methods is said once, at `Policy`
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
# Names that are described together ("sinks, recent") stand as they are.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
default_role = "py:obj"  # `name` in a docstring: a link where there is something to link to, code elsewhere
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The folders of results and papers are written from rows; without them the site is built all the same. Sphinx gives
# this warning no type by which it could be suppressed.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda record: "glob pattern" not in str(record.msg))

"""Sphinx configuration. `make docs` builds the site in build/docs, without a network; warnings are errors."""

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
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    # In docs/extensions:
    "mathml",
    "plain_docstrings",
    "policy_settings",
    "module_list",
]
exclude_patterns = ["extensions"]

html_theme = "furo"
html_title = "kvjax"
html_math_renderer = "mathml"
html_show_copyright = False
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # methods of policies are documented at `Policy`
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_preprocess_types = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Reference", "notes_style")]
default_role = "py:obj"  # `name` in a docstring is a link if the name is documented
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

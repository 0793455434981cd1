"""The documentation site: `sphinx-build -W docs build/site` writes it to build/site."""

import importlib.metadata
import inspect
import posixpath
import re

import sphinx.util.inspect
from docutils import nodes
from sphinx.util import logging

project = "jax_ub"
author = "the jax_ub authors"
release = version = importlib.metadata.version("jax_ub")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings quote code with single backticks.
default_role = "code"
highlight_language = "text"  # of code blocks without a language
# `__call__` has the shapes of a layer's inputs. Other special members need no page.
autodoc_default_options = {"members": True, "special-members": "__call__"}
autoclass_content = "both"  # of the class and of its constructor
autodoc_member_order = "bysource"
# An overriding method without a docstring gets no entry: its base class describes it.
autodoc_inherit_docstrings = False
# Hints such as `jax.Array | ScaledArray` would fill the signatures. The sections "Args"
# have the types, with shapes and units.
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_attr_annotations = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "jax_ub"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has a search field
    "show_navbar_depth": 1,
    "use_download_button": False,
}

PUBLIC_MODULES = [
    "jax_ub",
    "jax_ub.errors",
    "jax_ub.flax",
    "jax_ub.flax.linen",
    "jax_ub.fp8",
    "jax_ub.ops",
    "jax_ub.ops.fused",
    "jax_ub.overlap_config",
]
PUBLIC = {
    f"{module}.{name}": getattr(importlib.import_module(module), name)
    for module in PUBLIC_MODULES
    for name in importlib.import_module(module).__all__
}


def readable_signature(app, what, name, obj, options, signature, returns):
    """Shortens defaults, and finds the arguments that nnx's metaclass hides."""
    if what == "class" and signature == "(*args, **kwargs)":
        found = sphinx.util.inspect.signature(obj.__init__)
        parameters = list(found.parameters.values())[1:]  # without self
        found = found.replace(parameters=parameters)
        signature = sphinx.util.inspect.stringify_signature(
            found, show_annotation=False
        )
    short = re.sub(r"<class '([\w.]+)'>", r"\1", signature or "")
    short = re.sub(r"<function (\w+)(?:\.<locals>\.\w+)?>", r"\1", short)
    short = re.sub(r"<flax[\w.]+ object>", "...", short)
    short = short.replace("mappingproxy({})", "{}")
    return short or None, returns


def add_inherited_attributes(app, what, name, obj, options, lines):
    """Appends the attributes that private base classes document, in place.

    These classes have no page. napoleon reads the lines afterwards.
    """
    if what != "class" or lines[:1] != inspect.getdoc(obj).split("\n")[:1]:
        return  # the docstring of a constructor, for example
    for base in obj.__mro__[1:]:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        is_private = (
            base.__module__.startswith("jax_ub.") and base not in PUBLIC.values()
        )
        if is_private and "\nAttributes:" in text:
            lines += ["", *text.partition("\n\n")[2].split("\n")]


def skip_default_functions(app, what, name, obj, skip, options):
    """Skips functions of other packages, which are defaults of a layer's attributes."""
    is_foreign = inspect.isfunction(obj) and not obj.__module__.startswith("jax_ub")
    return True if what == "class" and is_foreign else None


def markdown_to_rst(app, what, name, obj, options, lines):
    """Converts the tables and indented code of a docstring, in place."""
    text = "\n".join(lines)
    text = re.sub(r"(?m)^(?:\|.*(?:\n|$))+", lambda found: list_table(found[0]), text)
    text = re.sub(r"(?m)^(\S.*\n\n)(?= {4}\S)", r"\1.. code-block:: python\n\n", text)
    text = re.sub(
        r"(`[^`]+`)(\w)?", lambda found: "\\ ".join(filter(None, found.groups())), text
    )
    lines[:] = text.split("\n")


def list_table(table):
    """Returns the directive for a table of Markdown."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    head, _, *body = table.strip().split("\n")
    for row in [head, *body]:
        first, *others = (cell.strip() for cell in row.strip("|").split("|"))
        lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    return "\n".join([*lines, ""])


def check_that_every_public_name_is_documented(app, env):
    """Warns about public names that no page of the API reference has."""
    objects = env.get_domain("py").objects
    documented = {id(value) for name, value in PUBLIC.items() if name in objects}
    for name, value in PUBLIC.items():
        if id(value) not in documented and not inspect.ismodule(value):
            logging.getLogger(__name__).warning("docs/api lacks %s", name)


def title_links(app, doctree, docname):
    """Replaces the text of links such as [fp8.md](fp8.md#gemms) by the title there."""
    for link in doctree.findall(nodes.reference):
        target, _, anchor = link.get("refuri", "").partition("#")
        if not link.get("internal") or not link.astext().endswith(".md"):
            continue
        page = posixpath.join(posixpath.dirname(docname), target) if target else docname
        page = posixpath.normpath(page).removesuffix(".html")
        titles = {"": app.env.titles[page].astext()} | {
            entry["anchorname"].removeprefix("#"): entry.astext()
            for entry in app.env.tocs[page].findall(nodes.reference)
        }
        link.children = [nodes.Text(titles.get(anchor, titles[""]))]


def setup(app):
    """Connects the functions above."""
    app.connect("doctree-resolved", title_links)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", skip_default_functions)
    # These run before napoleon, which has the default priority of 500.
    app.connect("autodoc-process-docstring", add_inherited_attributes, priority=300)
    app.connect("autodoc-process-docstring", markdown_to_rst, priority=400)
    app.connect("env-check-consistency", check_that_every_public_name_is_documented)

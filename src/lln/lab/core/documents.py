"""Documents from the templates beside this module: pages, tables in Markdown, and the sentences that stand in them."""

import functools
from typing import Any

import jinja2
import markupsafe

from lln.lab.core.provenance import drop_places
from lln.lab.core.tables import join_words, markdown_table, show_duration, show_number


@functools.cache
def open_templates() -> jinja2.Environment:
    """In pages all text is escaped but for charts, which are drawn here from numbers. `format` is Python's own."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lln.lab.core"), autoescape=jinja2.select_autoescape(["html"]), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "drawn": lambda chart: markupsafe.Markup(chart.svg), "duration": show_duration, "format": format,
        "number": show_number, "drop_places": drop_places, "words": join_words,
    }  # fmt: skip
    environment.globals["markdown_table"] = lambda *given: "\n".join(markdown_table(*given))
    return environment


def write_document(name: str, /, **facts: Any) -> str:
    """A template that is filled in. jinja2.UndefinedError where it names what is not among the facts."""
    return open_templates().get_template(name).render(facts)


def write_markdown(name: str, /, **facts: Any) -> str:
    """A document that ends with its last line."""
    return write_document(name, **facts).rstrip() + "\n"


def write_block(name: str, block: str, /, **facts: Any) -> str:
    """One block of a template."""
    template = open_templates().get_template(name)
    return "".join(template.blocks[block](template.new_context(facts)))


def write_paragraphs(name: str, block: str, /, **facts: Any) -> list[str]:
    """The paragraphs of a block, which blank lines divide, each as one line.

    >>> write_paragraphs("kernels.txt", "title")
    ['The kernels on this GPU']
    """
    parts = write_block(name, block, **facts).split("\n\n")
    return [" ".join(part.split()) for part in parts if part.strip()]

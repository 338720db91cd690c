"""Inline text: data has no effect in HTML, Markdown or a terminal, and nothing of it is lost."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from referee.pages.markup import (
    WIDTH,
    Code,
    ColorLabel,
    Detail,
    Inline,
    Link,
    Strong,
    Text,
    escape_html,
    single_line,
    to_html,
    to_markdown,
    to_plain,
    wrap,
)

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "**bold** _em_ `code` [a](javascript:alert(1)) # head | cell",
    "line\none\r\ntwo\u2028three",
    "\x1b[31mred\x1b[0m \x07bell \x9bcsi",
    "safe\u202etxt.exe\u2066x",
    "www.example.invalid http://example.invalid a@example.invalid",
    "1. first",
    "- item",
    "&lt;b&gt; &amp;",
    "w" * 300,
)
words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60))
inlines = st.one_of(
    words, *(st.builds(kind, words) for kind in (Strong, Code, Detail)), st.builds(Link, words, words),
    st.builds(ColorLabel, words, st.integers(0, 9)),
)  # fmt: skip
texts = st.lists(inlines, max_size=5).map(tuple)
TAGS = {"strong", "code", "a", "small", "span"}


class Reader(HTMLParser):
    """The tags, the addresses and the text of a piece of HTML."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert {name for name, _ in attrs} <= {"href", "class", "style"}
        self.addresses += [str(value) for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data


@given(texts)
@example(("<b>", Strong("</strong><script>")))
def test_html_has_no_tag_of_data_and_shows_all_of_it(text: tuple[Inline, ...]) -> None:
    read = Reader(to_html(text))
    assert set(read.tags) <= TAGS
    assert len([tag for tag in read.tags if tag != "span"]) <= len(text)
    data = "".join(part if isinstance(part, str) else getattr(part, "text", "") for part in text)

    def letters(value: str) -> str:
        return re.sub(r"[\s\u2212-]", "", single_line(value))

    assert letters(read.text) == letters(data)


@given(texts)
def test_no_link_has_another_scheme(text: tuple[Inline, ...]) -> None:
    for address in Reader(to_html(text)).addresses:
        scheme = re.match(r"([A-Za-z][\w+.-]*):", address)
        assert scheme is None or scheme[1] == "https"


@given(texts)
def test_every_form_is_one_line_without_a_control_or_direction_character(text: tuple[Inline, ...]) -> None:
    for shown in (to_html(text).replace("\u00a0", " "), to_markdown(text), to_plain(text)):
        assert shown.isprintable()


PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def effects(line: str) -> tuple[list[str], str]:
    """The kinds of elements that a Markdown parser finds in a line, and its text."""
    blocks = PARSER.parse(line)
    inline = [token for block in blocks for token in block.children or []]
    text = "".join(token.content for token in inline if token.type in ("text", "code_inline"))
    return [token.type for token in [*blocks, *inline] if token.type not in ("text", "text_special")], text


PLAIN = ["paragraph_open", "inline", "paragraph_close"]


@given(words)
@example("[x](y) ![x](y) [x][y] [x]: y <a@b.c> &amp; ~~a~~ __a__ _a_ a_b_c \\* \\")
@example("- [ ] task")
@example("[ ] task")
@example("# heading")
def test_markdown_of_data_is_its_text_and_nothing_else(value: str) -> None:
    line = to_markdown(value)
    kinds, text = effects(line)
    assert kinds == (PLAIN if line else [])
    assert text == single_line(value).strip()
    assert not re.search(r"(?<!\\)://", line)
    assert not re.search(r"(?i)www\.|\w@", line)


@given(texts)
@example((Link("[x]", "address"), "(y)"))
@example((Link("x", "address"),))
@example((Link("\\[", "address"), "x\\]", "(y)"))
@example(("!", Link("x", "address")))
@example(("\\!", "", Link("x", "address")))
def test_markdown_of_several_parts_has_the_marks_of_its_types_alone(text: tuple[Inline, ...]) -> None:
    allowed = {
        Strong: {"strong_open", "strong_close"},
        Link: {"link_open", "link_close"},
        Code: {"code_inline"},
    }
    expected = {*PLAIN}.union(*(allowed.get(type(part), set()) for part in text))
    assert set(effects(to_markdown(text))[0]) <= expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- item", r"\- item"),
        ("1. first", r"1\. first"),
        ("-1.5 %", "-1.5 %"),
        (("- ", Strong("B")), r"\- **B**"),
        ("[ ] task", r"\[ ] task"),
        (Link("x]y", "a"), r"[x\]y](<a>)"),
    ],
)
def test_a_line_of_data_begins_no_list_rule_or_heading(text: Text, line: str) -> None:
    assert to_markdown(text) == line


@given(words)
def test_an_attribute_and_a_figure_get_no_tag_and_no_quote(value: str) -> None:
    escaped = escape_html(value)
    assert not re.search("[<>\"']", escaped)
    assert escaped.isprintable()


@given(texts)
def test_a_terminal_line_is_never_wider_than_the_terminal(text: tuple[Inline, ...]) -> None:
    for line in wrap(text, "- ", "").splitlines():
        assert len(line) <= WIDTH


@pytest.mark.parametrize(
    ("code", "markdown"), [("a`b", "``a`b``"), ("`a", "`` `a ``"), ("a|b", r"a\|b"), ("<b>", "`<b>`")]
)
def test_code_in_markdown_has_sufficient_backticks(code: str, markdown: str) -> None:
    assert to_markdown(Code(code)) == markdown

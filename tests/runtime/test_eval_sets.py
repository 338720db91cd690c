import pytest

from runtime.dotconfig import ConfigError, Entry, Symbols
from runtime.settings import EvalSet, eval_sets


def symbols(value: str) -> Symbols:
    return Symbols(".config", {"EVAL_SETS": Entry("EVAL_SETS", value, True, ".config:7")})


def test_sets_have_names_and_files() -> None:
    found = eval_sets(symbols("wikitext-2 news=texts/*.txt 'b=my texts/b.md'"))
    assert found == (EvalSet("wikitext-2"), EvalSet("news", "texts/*.txt"), EvalSet("b", "my texts/b.md"))
    assert eval_sets(symbols("wikitext-2=wiki.test.raw")) == (EvalSet("wikitext-2", "wiki.test.raw"),)
    assert eval_sets(symbols("")) == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("news", "has 'news' without a file; fix: news=FILE"),
        ("wikitext-2=", "has 'wikitext-2=' without a file"),
        ("a=1.txt a=2.txt", "has the name 'a' twice; fix: "),
        ("=a.txt", "has the name ''; fix: NAME=FILE"),
        ("a/b=a.txt", "has the name 'a/b'; fix: NAME=FILE"),
        (f"{'a' * 41}=a.txt", "fix: NAME=FILE with at most 40"),
    ],
)
def test_a_word_of_another_form_is_refused_with_its_place(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        eval_sets(symbols(value))
    assert ".config:7: CONFIG_EVAL_SETS" in f"{refused.value}"

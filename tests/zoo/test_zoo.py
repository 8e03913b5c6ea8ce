"""Every architecture of the zoo, through both doors: the expected sites, each with its reason, and the same outputs.

``python tests/zoo/rotated.py [MODEL ...]`` writes the expected sites anew, ``python tests/zoo/table.py`` MODELS.md from them.
"""

import pytest
import table

pytest.importorskip("transformers", reason="the zoo's models are transformers'")
pytest.importorskip("diffusers", reason="the zoo's models are diffusers'")

from rotated import DOORS, doors, expected, line, names, tolerance

CASES = [(name, door) for name in names() for door in doors(name)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, door", CASES, ids=[f"{name}-{door}" for name, door in CASES])
def test_architecture(name: str, door: str) -> None:
    report, error = DOORS[door](name)
    assert error <= tolerance(name)
    assert [line(site) for site in report] == expected()[name, door]
    assert all(site.reason for site in report.refused)


def test_models_md_is_the_table_of_these_sites() -> None:
    assert table.MODELS.read_text(encoding="utf-8") == table.table()


def test_what_there_is_to_find() -> None:
    """At least 98 % of the attentions get R3, and of the linears that end an MLP or an expert R4."""
    rows = [table.row(name)[1] for name in names()]
    r3, attentions, _, _, r4, linears = map(sum, zip(*rows))
    lines = [text for lines in expected().values() for text in lines]
    assert r3 >= 0.98 * attentions and r4 >= 0.98 * linears
    assert all("no Hadamard matrix" in text or "fastpath" in text for text in lines if " refused " in text)

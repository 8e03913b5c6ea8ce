"""Every architecture of the zoo, through both doors: the expected sites, each with its reason, and the same outputs.

``python tests/zoo/rotated.py`` writes the expected sites anew, ``python tests/zoo/table.py`` MODELS.md from them.
"""

import pytest

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

"""Report and Site: the table, its HTML, the dict, the counts, and what every door does with refusals."""

import dataclasses
import json
import logging
import pickle
import warnings

import pytest

from rotpass import Recipe, Report, Site
from rotpass.report import Explanation, check

SITES = [
    Site(kind="r3", where="layers.0.attn", size=64, width=64, status="rotated", inserted="online"),
    Site(kind="v", where="layers.0.attn", size=64, width=64, status="already", inserted="folded", undone="folded"),
    Site(kind="r4", where="layers.0.down", size=512, width=1536, status="rotated", inserted="online", undone="folded"),
    Site(kind="r4", where="layers.1.down", size=0, width=36, status="refused", reason='no <matrix> & no "block"'),
]


def test_table() -> None:
    assert str(Report(SITES, ["read me"])).splitlines() == [
        "kind  where          size   status   inserted  undone  reason",
        "r3    layers.0.attn  64     rotated  online    none",
        "v     layers.0.attn  64     already  folded    folded",
        "r4    layers.0.down  3x512  rotated  online    folded",
        'r4    layers.1.down  0      refused  none      none    no <matrix> & no "block"',
        "rotpass: 3 rotated (r3=1 v=1 r4=1), 1 of them already, 1 refused",
        "note: read me",
    ]


def test_empty() -> None:
    report = Report()
    assert str(report).splitlines()[-1] == "rotpass: 0 rotated (r3=0 v=0 r4=0), 0 refused"
    assert report.counts == {"r3": 0, "v": 0, "r4": 0} and report.rotated == report.refused == [] and len(report) == 0


def test_counts_and_lists() -> None:
    report = Report(SITES)
    assert report.counts == {"r3": 1, "v": 1, "r4": 1}
    assert report.rotated == SITES[:3] and report.refused == SITES[3:]
    assert list(report) == SITES and len(report) == 4


def test_html_escapes_what_users_name() -> None:
    sites = [dataclasses.replace(SITES[3], where="<script>alert('x')</script>")]
    text = Report(sites, ["a < b"])._repr_html_()
    assert "<script>" not in text and "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in text
    assert "no &lt;matrix&gt; &amp; no &quot;block&quot;" in text and "a &lt; b" in text
    assert text.count("<tr>") == 2 and text.count("<td>") == 7 and text.count("<th>") == 7


def test_to_dict_is_json() -> None:
    data = json.loads(json.dumps(Report(SITES, ["n"]).to_dict()))
    assert data["counts"] == {"r3": 1, "v": 1, "r4": 1} and data["notes"] == ["n"]
    assert [Site(**site) for site in data["sites"]] == SITES


def test_sites_are_values() -> None:
    assert pickle.loads(pickle.dumps(SITES)) == SITES and len({*SITES, *SITES}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        SITES[0].kind = "v"
    assert pickle.loads(pickle.dumps(Report(SITES))) == Report(SITES)


def test_strict_tells_each_reason_once() -> None:
    refused = [dataclasses.replace(SITES[3], where=f"layers.{i}.down") for i in range(3)]
    other = dataclasses.replace(SITES[3], kind="v", where="", reason="something else")
    with pytest.raises(ValueError) as raised:
        check([*SITES[:1], *refused, other], Recipe(), strict=True, holds_any=True)
    message = str(raised.value)
    assert message.startswith("strict=True and 4 of 5 sites were refused: r4 at layers.0.down: no <matrix>")
    assert message.count("<matrix>") == 1 and message.endswith("v at the root: something else")
    check(SITES[:3], Recipe(), strict=True, holds_any=True)


def test_refusals_are_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="rotpass"):
        check(SITES, Recipe(), strict=False, holds_any=True)
    assert [r.getMessage() for r in caplog.records] == ['refused r4 at layers.1.down: no <matrix> & no "block"']


@pytest.mark.parametrize(
    ("sites", "fields", "holds", "message"),
    [
        (SITES[3:], {}, True, "rotpass rotated nothing: 1 refused, e.g. no <matrix>"),
        ([], {}, True, "rotpass rotated nothing: the graph holds none"),
        ([], {"only": "x"}, True, "rotpass rotated nothing: no place is left by only= and skip="),
        ([], {}, False, None),
        ([], {"r3": False, "v": False, "r4": False}, True, None),
        (SITES, {}, True, None),
    ],
)
def test_warns_once_if_nothing_is_rotated(sites, fields, holds, message) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(sites, Recipe(**fields), strict=False, holds_any=holds)
    assert len(caught) == (message is not None)
    assert message is None or str(caught[0].message).startswith(message)


def test_grouped_by_kind_and_reason() -> None:
    done = Site(kind="r3", where="layers.0.attn", size=64, width=64, status="rotated", inserted="online")
    wide = Site(kind="r4", where="layers.0.mlp.down", size=0, width=3425, status="refused", reason="no matrix")
    sites = [done, wide, dataclasses.replace(done, where="layers.1.attn"), dataclasses.replace(wide, reason="tied")]
    grouped = """\
kind  count  size  status   inserted  undone  for example        reason
r3    2      64    rotated  online    none    layers.0.attn
r4    1      0     refused  none      none    layers.0.mlp.down  no matrix
r4    1      0     refused  none      none    layers.0.mlp.down  tied
rotpass: 2 rotated (r3=2 v=0 r4=0), 2 refused
note: n"""
    assert Report(sites, ["n"]).grouped() == str(Explanation(sites, ["n"])) == grouped
    assert "<th>count</th>" in Explanation(sites)._repr_html_()

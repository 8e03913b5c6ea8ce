"""Recipe and FakeQuant: values, checked when they are made."""

import copy
import dataclasses
import pickle

import pytest

from rotpass import FakeQuant, Recipe
from rotpass.recipe import as_recipe


def test_defaults() -> None:
    assert dataclasses.asdict(Recipe()) == {
        "r3": True, "v": True, "r4": True, "counter": "fold", "block_size": None, "seed": None, "table": "default",
        "cache": "plain", "only": None, "skip": None, "fake_quant": None,
    }  # fmt: skip
    assert FakeQuant() == FakeQuant(q=None, k=None, v=None, down=None)


def test_values() -> None:
    recipe = Recipe(seed=3, only=["*.attn", "x"], skip="y", fake_quant=FakeQuant(k=4, v="fp8"))
    assert recipe.only == ("*.attn", "x") and recipe.skip == ("y",)
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), dataclasses.replace(recipe)):
        assert twin == recipe and hash(twin) == hash(recipe) and repr(twin) == repr(recipe)
    assert recipe != dataclasses.replace(recipe, seed=4) and len({recipe, dataclasses.replace(recipe, seed=None)}) == 2
    assert Recipe(only=iter(["a"])) == Recipe(only=("a",))
    assert eval(repr(recipe)) == recipe
    for value in (recipe, FakeQuant()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.v = False
    with pytest.raises(TypeError):
        Recipe(True)
    with pytest.raises(TypeError):
        FakeQuant(4)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"r3": 1}, TypeError, "Recipe.r3 must be True or False; got 1"),
        ({"v": None}, TypeError, "Recipe.v must be True or False"),
        ({"r4": "no"}, TypeError, "Recipe.r4 must be True or False"),
        (
            {"counter": "folded"},
            ValueError,
            "Recipe.counter must be one of 'fold', 'online', 'prefolded'; got 'folded'",
        ),
        ({"counter": ["fold"]}, ValueError, "Recipe.counter must be one of"),
        ({"table": "Default"}, ValueError, "Recipe.table must be one of 'default', 'quarot', 'compressed-tensors'"),
        ({"cache": True}, ValueError, "Recipe.cache must be one of 'plain', 'rotated'"),
        ({"block_size": 64.0}, TypeError, "Recipe.block_size must be an integer or None"),
        ({"block_size": True}, TypeError, "Recipe.block_size must be an integer or None"),
        ({"block_size": 0}, ValueError, "no Hadamard matrix of that order"),
        ({"block_size": 1}, ValueError, "no Hadamard matrix of that order"),
        ({"block_size": -16}, ValueError, "no Hadamard matrix of that order"),
        ({"block_size": 107}, ValueError, "Recipe.block_size=107: the 'default' table has no Hadamard matrix"),
        ({"seed": "1"}, TypeError, "Recipe.seed must be an integer or None"),
        ({"seed": False}, TypeError, "Recipe.seed must be an integer or None"),
        ({"only": [1]}, TypeError, "Recipe.only must be shell patterns"),
        ({"skip": 3}, TypeError, "Recipe.skip must be shell patterns"),
        ({"skip": (None,)}, TypeError, "Recipe.skip must be shell patterns"),
        ({"fake_quant": {"k": 4}}, TypeError, "Recipe.fake_quant must be a rotpass.FakeQuant or None"),
    ],
)
def test_wrong_values(fields: dict, error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        Recipe(**fields)
    assert message in str(raised.value)


@pytest.mark.parametrize("value", [16, 1, 0, -4, True, "int8", "FP8", 4.5, 4.0, [4]])
@pytest.mark.parametrize("name", ["q", "k", "v", "down"])
def test_wrong_quantizers(name: str, value) -> None:
    with pytest.raises(ValueError, match=f"FakeQuant.{name} must be one of None, 8, 4, 3, 2, 'fp8'; got"):
        FakeQuant(**{name: value})


@pytest.mark.parametrize("value", [None, 8, 4, 3, 2, "fp8"])
def test_quantizers(value) -> None:
    quant = FakeQuant(q=value, k=value, v=value, down=value)
    assert pickle.loads(pickle.dumps(quant)) == quant and hash(quant) == hash(dataclasses.replace(quant))


def test_includes() -> None:
    assert Recipe().includes("") and Recipe().includes("a.b")
    only = Recipe(only=("layers.[01].*", "head"), skip="*.down")
    assert [only.includes(p) for p in ("layers.0.attn", "layers.2.attn", "layers.1.down", "head", "Head")] == [
        True, False, False, True, False,
    ]  # fmt: skip
    assert not Recipe(only=()).includes("a") and Recipe(skip=()).includes("a")


def test_asks_for() -> None:
    recipe = Recipe(r3=False, v=False)
    assert [recipe.asks_for(kind) for kind in ("r3", "v", "r4")] == [False, False, True] and recipe.asks_for_anything
    assert not Recipe(r3=False, v=False, r4=False, fake_quant=FakeQuant(k=4)).asks_for_anything


def test_as_recipe() -> None:
    recipe = Recipe(seed=3)
    assert as_recipe(None, {}) == Recipe() and as_recipe(recipe, {}) == recipe
    assert as_recipe(recipe, {"v": False}) == Recipe(seed=3, v=False)
    with pytest.raises(TypeError, match="unknown recipe field 'seeds', 'x'; valid fields: r3, v, r4, counter"):
        as_recipe(recipe, {"x": 1, "seeds": 2})
    with pytest.raises(TypeError, match="recipe must be a rotpass.Recipe; got str"):
        as_recipe("llama", {})
    with pytest.raises(TypeError, match="recipe must be a rotpass.Recipe"):
        as_recipe({}, {})


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**80])
def test_a_seed_beyond_64_bits(seed):
    with pytest.raises(ValueError, match="must fit in 64 bits"):
        Recipe(seed=seed)
